"""Launches of the functions around attention: checked once, then only patched.

A function keeps its last calls by how their tensors lay. Another call whose tensors lie alike
passes the same checks, so that only addresses are written before the launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import _C, Tensor

from jitattn.base import knobs
from jitattn.spec.kernel_spec import TransferSpec
from jitattn.spec.params import Lengths
from jitattn.spec.tile import Tile, tile_for
from jitattn.spec.transfer_config import config_of
from jitattn.tensors.cache_views import recogniser
from jitattn.tensors.tensor_checks import check_supported

if TYPE_CHECKING:
    from jitattn.device.driver import Launch, LoadedKernel

Call = TypeVar("Call")
# Calls that a thread keeps of a function: the layers of a model lie in few ways.
_MAX_RECENT = 16


class Recent(threading.local, Generic[Call]):
    """The last calls of a function in this thread, since a launch is for one thread at a time."""

    def __init__(self) -> None:
        """Know none."""
        self._calls: list[tuple[object, int, Callable[..., bool], Call]] = []

    def find(self, facts: object, tensors: Sequence[Tensor]) -> Call | None:
        """Return a call of equal ``facts`` whose tensors lay like these."""
        count = len(tensors)
        for known, known_count, lie_alike, call in self._calls:
            if known == facts and count == known_count and lie_alike(*tensors):
                return call
        facts, distinct = _distinct(facts, tensors)
        return self.find(facts, distinct) if len(distinct) < count else None

    def add(self, facts: object, tensors: Sequence[Tensor], call: Call) -> Call:
        """Keep a call that passed its checks, and return it."""
        facts, distinct = _distinct(facts, tensors)
        self._calls.insert(0, (facts, len(distinct), recogniser(distinct), call))
        del self._calls[_MAX_RECENT:]
        return call


def _distinct(facts: object, tensors: Sequence[Tensor]) -> tuple[object, Sequence[Tensor]]:
    """Return the tensors without repetitions, which are a fact: a recogniser takes none."""
    if len(set(map(id, tensors))) == len(tensors):
        return facts, tensors
    order = {id(tensor): i for i, tensor in enumerate(tensors)}
    pattern = tuple(order[id(tensor)] for tensor in tensors)
    return (facts, pattern), [tensors[i] for i in sorted(order.values())]


@functools.cache
def load(spec: TransferSpec, device_index: int) -> LoadedKernel:
    """Return the kernel of ``spec`` on a device.

    Raises:
        CompileError, KernelNotFoundError: it can't be had.
    """
    from jitattn.device.driver import device_facts, load_kernel
    from jitattn.jit.build import build
    from jitattn.kernels.attention.kernels import arch_of

    arch = arch_of(device_facts(device_index))
    built = build(spec, arch, knobs.load(), hint=config_of(spec).arguments_text())
    return load_kernel(built.cubin, built.symbol, device_index, 0)


@functools.cache
def tile_of(spec: TransferSpec, device_index: int) -> Tile:
    """Return the tile of ``spec`` on a device."""
    from jitattn.device.driver import device_facts
    from jitattn.kernels.attention.kernels import arch_of

    return tile_for(spec, arch_of(device_facts(device_index)))


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


def lengths_of(lengths: Tensor) -> Lengths:
    """Return the parameters of a vector of lengths."""
    params = Lengths(None, lengths.stride(0), lengths.dtype is torch.int64, lengths.shape[0])
    params.values = lengths.data_ptr()
    return params


def asks_for_checks() -> bool:
    """Whether JITATTN_CHECK is set: then calls that aren't captured look at what tensors hold."""
    return knobs.load().check


@contextmanager
def checking() -> Iterator[None]:
    """Say that what is refused here was looked at because of JITATTN_CHECK."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"JITATTN_CHECK: {error}") from None


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured, which must not be waited for."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
