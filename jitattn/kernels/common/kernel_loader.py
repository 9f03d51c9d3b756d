"""Building and loading of a planner's kernels on a CUDA device, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from jitattn.base import knobs
from jitattn.device.driver import LoadedKernel, load_kernel
from jitattn.jit.build import Pending, start
from jitattn.kernels.common.spec import AttentionSpec, ScheduleSpec
from jitattn.kernels.common.tile import AttentionTile
from jitattn.spec.family import KernelSpec

Role = Literal["decode", "decode_multi_token", "prefill_narrow", "prefill"]
"""What a kernel is for: requests of one row tile, of a wider one, of few rows, or of many."""
ROLES: tuple[Role, ...] = get_args(Role)


class PlannedKernel:
    """An attention kernel on a device, and the tile it was rendered with; loaded when needed."""

    def __init__(
        self, pending: Pending, tile: AttentionTile, row_tile: int, device_index: int
    ) -> None:
        """Hold a kernel that may still be compiling."""
        self.tile = tile
        self.row_tile = row_tile
        self.pending = pending
        self._device_index = device_index
        self._loaded: LoadedKernel | None = None

    def load(self) -> LoadedKernel:
        """Load the kernel, once it is built; raises what ``build`` raises, at every call."""
        if self._loaded is None:  # who gets here at the same time does the same
            symbol = self.pending.result().symbol
            self._loaded = self.load_symbol(symbol, smem_bytes=self.tile.smem_bytes)
        return self._loaded

    def load_symbol(self, symbol: str, *, smem_bytes: int) -> LoadedKernel:
        """Load a kernel of the same cubin, once it is built."""
        return load_kernel(self.pending.result().cubin, symbol, self._device_index, smem_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class BoundKernels:
    """The kernels whose loaders suit a bound cache, by role.

    ``decode_multi_token`` is None where the decode kernel takes requests of a few query tokens, and
    ``prefill_narrow`` where the prefill kernel does, which is None where decode kernels take all.
    """

    decode: PlannedKernel
    prefill: PlannedKernel | None = None
    decode_multi_token: PlannedKernel | None = None
    prefill_narrow: PlannedKernel | None = None

    def of(self, role: Role) -> PlannedKernel:
        """Return the kernel of a role."""
        kernel: PlannedKernel = getattr(self, role)
        return kernel

    def load(self, roles: Collection[Role]) -> None:
        """Load the kernels of these roles, and those that take no time."""
        for role in ROLES:
            kernel: PlannedKernel | None = getattr(self, role)
            if kernel is not None and (role in roles or kernel.pending.was_found):
                kernel.load()


class ScheduleKernel(NamedTuple):
    """The kernel that makes schedules, and the threads of its CTA."""

    kernel: LoadedKernel
    num_threads: int


KernelMaker = Callable[[Sequence[AttentionSpec], Sequence[Pending]], BoundKernels]
"""Returns the kernels of some specs, which may still be compiling."""


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a planner: where it came from and what it costs.

    ``origin`` is "compiled", "disk", "precompiled" or "memory"; ``smem_bytes`` counts static and
    dynamic shared memory of a CTA.
    """

    name: str
    arch: str
    origin: str
    seconds: float
    registers: int
    spill_bytes: int
    smem_bytes: int
    compiler: str


class KernelLoader:
    """The kernels of one configuration on a device.

    Those of most caches are built at once, those of others when such a cache is bound. Nobody
    waits for a prefill or a multi-token decode kernel to compile before a plan needs one.
    Thread-safe.

    Attributes:
        kernels: those of most caches.
        schedule_kernel: the one that makes schedules.
    """

    def __init__(
        self,
        main_specs: Sequence[AttentionSpec],
        make_kernels: KernelMaker,
        *,
        device_index: int,
        arch: str,
        hint: str,
        schedule: ScheduleSpec,
    ) -> None:
        """Start to build ``main_specs``, and load the first, for decode, and the schedule kernel.

        Args:
            main_specs: the kernels of most caches.
            make_kernels: how kernels are made of specs.
            device_index: the device.
            arch: its architecture.
            hint: the configuration, as an error about a missing kernel names it.
            schedule: the kernel that makes schedules.

        Raises:
            ValueError: in a capture.
            CompileError, KernelNotFoundError: one of the first two can't be had.
        """
        _refuse_loading()
        self._make_kernels = make_kernels
        self._arch = arch
        self._hint = hint
        self._lock = threading.Lock()
        self._started: list[tuple[KernelSpec, Pending]] = []
        self._needed: frozenset[Role] = frozenset(("decode",))
        decode, *others = main_specs
        # In this order: on few cores the prefill kernel takes the one that the schedule frees.
        pending = self._start((decode, schedule, *others))
        self.kernels = make_kernels((decode, *others), (pending[0], *pending[2:]))
        self._bound = {(decode, *others): self.kernels}
        tile = schedule.tile(arch)
        built = pending[1].result()
        self.schedule_kernel = ScheduleKernel(
            load_kernel(built.cubin, built.symbol, device_index, tile.smem_bytes), tile.num_threads
        )
        self.kernels.load(self._needed)

    def kernels_for(self, specs: Sequence[AttentionSpec]) -> BoundKernels:
        """Return the kernels of these specs, built on first use; what plans need of them is loaded.

        Raises:
            ValueError: they are not there yet, in a capture.
        """
        key = tuple(specs)
        if key not in self._bound:
            _refuse_loading()
        with self._lock:
            if key not in self._bound:
                self._bound[key] = self._make_kernels(specs, self._start(specs))
            kernels, needed = self._bound[key], self._needed
        kernels.load(needed)
        return kernels

    def need(self, role: Role) -> None:
        """Load the kernels of a role, those of caches still to be bound too.

        So that no run has to: it may be captured, and nothing is loaded in a capture.
        """
        if role in self._needed:
            return
        _refuse_loading()
        while True:
            bound = tuple(self._bound.values())
            for kernels in bound:
                kernels.load((role,))
            # What can't be loaded is not needed of later caches, either: others may do without.
            with self._lock:
                if len(bound) == len(self._bound):
                    self._needed = self._needed.union((role,))
                    return

    def infos(self) -> list[KernelInfo]:
        """Return the kernels asked for so far, and wait for those that still compile."""
        return [self._info(spec, pending) for spec, pending in tuple(self._started)]

    def _info(self, spec: KernelSpec, pending: Pending) -> KernelInfo:
        kernel = pending.result()
        return KernelInfo(
            name=kernel.symbol,
            arch=kernel.arch,
            origin=kernel.origin,
            seconds=kernel.seconds,
            registers=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            smem_bytes=kernel.smem_bytes + spec.tile(self._arch).smem_bytes,
            compiler=kernel.compiler,
        )

    def _start(self, specs: Sequence[KernelSpec]) -> tuple[Pending, ...]:
        pending = start(specs, self._arch, knobs.load(), hint=self._hint)
        self._started += zip(specs, pending, strict=True)
        return pending


def _refuse_loading() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a kernel is not loaded, and a capture can't load it: make such a call before it"
        )
