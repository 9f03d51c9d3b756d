"""The attention kernels of a planner on a device: loaded when needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from jitattn.device.driver import LoadedKernel, load_kernel
from jitattn.jit.build import Pending
from jitattn.kernels.common.tile import AttentionTile

Role = Literal["decode", "wide", "prefill"]
"""What a kernel is for: requests of one row tile, of a wider one, or of many rows."""
ROLES: tuple[Role, ...] = get_args(Role)


class AttentionKernel:
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
            kernel = self.pending.result()
            self._loaded = load_kernel(
                kernel.cubin, kernel.symbol, self._device_index, self.tile.smem_bytes
            )
        return self._loaded


@dataclass(frozen=True, eq=False, slots=True)
class BoundKernels:
    """The kernels whose loaders suit a bound cache; ``wide`` is None where there is none."""

    decode: AttentionKernel
    prefill: AttentionKernel
    wide: AttentionKernel | None

    def of(self, role: Role) -> AttentionKernel:
        """Return the kernel that is for this."""
        kernel: AttentionKernel = getattr(self, role)
        return kernel

    def load(self, roles: Collection[Role]) -> None:
        """Load the kernels that are for these, and those that take no time."""
        for role in ROLES:
            kernel: AttentionKernel | None = getattr(self, role)
            if kernel is not None and (role in roles or kernel.pending.was_found):
                kernel.load()
