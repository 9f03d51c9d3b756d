"""Kernels of a device as host code gets and launches them, outside of plans."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import torch
from torch import _C

from jitattn.base import knobs
from jitattn.base.errors import ConfigError
from jitattn.spec.arch import arch_for
from jitattn.spec.family import KernelSpec, Tile
from jitattn.tensors.tensor_checks import check_supported

if TYPE_CHECKING:
    from jitattn.device.driver import DeviceFacts, Launch, LoadedKernel


_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_lock = threading.Lock()


def arch_of(facts: DeviceFacts) -> str:
    """Return the architecture whose code a device runs.

    Raises:
        ConfigError: no kernel runs on it.
    """
    major, minor = facts.compute_capability
    arch = arch_for(major, minor)
    if arch is None:
        raise ConfigError(
            [
                f"{facts.name} has compute capability {major}.{minor}: kernels exist for 8.x, 9.0, "
                "10.x and 12.x"
            ]
        )
    return arch


def load(spec: KernelSpec, device_index: int) -> LoadedKernel:
    """Return the kernel of ``spec`` on a device.

    Raises:
        CompileError, KernelNotFoundError: it can't be had.
    """
    kernel = _loaded.get((spec, device_index))
    if kernel is not None:
        return kernel
    from jitattn.device.driver import device_facts, load_kernel
    from jitattn.jit.build import build

    with _lock:
        arch = arch_of(device_facts(device_index))
        built = build(spec, arch, knobs.load())
        smem_bytes = spec.tile(arch).smem_bytes
        kernel = load_kernel(built.cubin, built.symbol, device_index, smem_bytes)
        _loaded[spec, device_index] = kernel
    return kernel


def is_loaded(spec: KernelSpec, device_index: int) -> bool:
    """Whether ``load`` returns at once, as it must while a stream is being captured."""
    return (spec, device_index) in _loaded


def unload() -> None:
    """Forget all kernels: tests begin anew."""
    _loaded.clear()


@functools.cache
def tile_of(spec: KernelSpec, device_index: int) -> Tile:
    """Return the tile of ``spec`` on a device."""
    from jitattn.device.driver import device_facts

    return spec.tile(arch_of(device_facts(device_index)))


def arch_on(device_index: int) -> str:
    """Return the architecture whose code a device runs."""
    from jitattn.device.driver import device_facts

    return arch_of(device_facts(device_index))


def num_sms(device_index: int) -> int:
    """Return the multiprocessors of a device."""
    from jitattn.device.driver import device_facts

    return device_facts(device_index).num_sms


def card_of(device: torch.device) -> int | None:
    """Return the index of a CUDA device, whose tensors have kernels; None of the CPU.

    Raises:
        ValueError: it is another device.
    """
    check_supported(device)
    return device.index if device.type == "cuda" else None


def launch_on(device_index: int, launch: Launch) -> None:
    """Launch on the current stream of a device, which need not be the current one."""
    stream = _C._cuda_getCurrentRawStream(device_index)
    if _C._cuda_getDevice() == device_index:
        launch(stream)
    else:
        with torch.cuda.device(device_index):
            launch(stream)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured, which must not be waited for."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
