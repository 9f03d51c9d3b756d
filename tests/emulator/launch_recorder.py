"""A CUDA backend without a GPU: tensors lie on the CPU, and launches are recorded, not made.

Everything between the public API and the driver's launch function is the real thing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

import jitattn
from jitattn.device import driver
from jitattn.device.driver import DeviceFacts
from jitattn.device.workspace import Workspace
from jitattn.jit.build import Kernel
from jitattn.kernels.attention.kernels import AttentionKernels
from jitattn.kernels.common import cuda_kernels, kernel_loader, tma
from jitattn.kernels.common.params import KERNEL_PARAMS, ScheduleParams
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import AnyLayout, Layout, layout_of
from tests.support.empty_kernel import empty_kernel

CPU = torch.device("cpu")


@dataclass
class FakePending:
    """Stands for a kernel that was found."""

    spec: KernelSpec
    was_found: bool = True

    def result(self) -> Kernel:
        return empty_kernel(self.spec)


class FakeKernel:
    """Stands for a loaded kernel."""

    def __init__(self, symbol: str, device_index: int, smem_bytes: int) -> None:
        self.symbol = symbol
        self.device_index = device_index
        self.smem_bytes = smem_bytes
        self.argument = self
        self.begins_early = False


def encode_tensor_map(
    pointer: int, item_bytes: int, *shape: Sequence[int], fetch_bytes: int
) -> bytes | None:
    """Stand for the driver: the arguments, one after the other; None for what it refuses."""
    dims, strides, box = shape
    if any(not 0 < stride < 2**40 or stride % 16 for stride in strides) or pointer % 16:
        return None
    numbers = (pointer, item_bytes, *dims, *strides)
    return struct.pack("<11Q5IH18x", *numbers, *box, fetch_bytes)


def move_tensor_map(encoded: bytes, pointer: int) -> bytes | None:
    """Stand for the driver, as ``encode_tensor_map`` does."""
    return None if pointer % 16 else struct.pack("<Q", pointer) + encoded[8:]


@dataclass(frozen=True)
class Recorded:
    """One launch as the driver would have seen it."""

    symbol: str
    grid: int
    num_threads: int
    stream: int
    parts: tuple[ctypes.Structure, ...]  # parameters; of a schedule those of each kernel
    devices: tuple[int, ...]  # those that were made the current one

    @property
    def params(self) -> ctypes.Structure:
        """Those of the kernel, or of a plan's first."""
        return self.parts[0]


@dataclass
class LaunchRecorder:
    """The driver's state, and what it was asked for."""

    layout: AnyLayout = Layout.SHARED
    stream: int = 0
    device: int = 0
    is_capturing: bool = False
    status: int = 0
    launches: list[Recorded] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    workspaces: dict[int, Workspace] = field(default_factory=dict)

    def launch(self, config: object, kernel: FakeKernel, pointer: object, extra: None) -> int:
        """Stand for ``cuLaunchKernelEx``, called with ready-made arguments."""
        assert extra is None
        is_schedule = kernel.symbol.startswith("jitattn_schedule")
        kind = ScheduleParams if is_schedule else KERNEL_PARAMS[self.layout]
        shape = config._obj
        at, size = pointer._obj.value, ctypes.sizeof(kind)
        parts = [
            kind.from_buffer_copy(ctypes.string_at(at + i * size, size))
            for i in range(shape.grid_x if is_schedule else 1)
        ]
        assert (shape.grid_y, shape.grid_z, shape.block_y, shape.block_z) == (1, 1, 1, 1)
        assert shape.smem_bytes == kernel.smem_bytes
        self.launches.append(
            Recorded(
                kernel.symbol,
                shape.grid_x,
                shape.block_x,
                shape.stream or 0,
                tuple(parts),
                tuple(self.devices),
            )
        )
        return self.status

    def planner(self, **arguments: object) -> jitattn.AttentionPlanner:
        """A planner of the CUDA backend for tensors on the CPU."""
        planner = jitattn.AttentionPlanner(**arguments, device="cpu")
        kernels = AttentionKernels(planner.config, torch.device("cuda", 0))
        kernels.device = CPU
        planner.kernels, planner.backend = kernels, "cuda"
        self.layout = layout_of(planner.config.page_table)
        return planner

    def last(self) -> Recorded:
        return self.launches[-1]

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Stand for ``torch.cuda.device``."""
        self.devices.append(device)
        yield
        self.devices.pop()

    def workspace(self, device: torch.device, stream: int) -> Workspace:
        return self.workspaces.setdefault(stream, Workspace(device))


def install(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    """Put the fake in the place of the driver, the builder and torch's notion of both."""
    fake = LaunchRecorder()
    facts = DeviceFacts(0, "card", (9, 0), num_sms=132, max_smem_bytes=232448)

    def start(
        specs: Sequence[KernelSpec], arch: str, knobs: object, *, hint: str
    ) -> tuple[FakePending, ...]:
        return tuple(FakePending(spec) for spec in specs)

    monkeypatch.setattr(tma, "encode_tensor_map", encode_tensor_map)
    monkeypatch.setattr(tma, "move_tensor_map", move_tensor_map)
    monkeypatch.setattr(cuda_kernels, "device_facts", lambda index: facts)
    monkeypatch.setattr(kernel_loader, "start", start)
    monkeypatch.setattr(kernel_loader, "load_kernel", lambda cubin, *rest: FakeKernel(*rest))
    monkeypatch.setattr(cuda_kernels, "default_workspace", fake.workspace)
    monkeypatch.setattr(driver, "_launch_function", lambda: fake.launch)
    for name, function in (
        ("_cuda_getCurrentRawStream", lambda index: fake.stream),
        ("_cuda_getDevice", lambda: fake.device),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(torch.cuda, "device", fake.current)
    return fake
