"""The attention kernels of a planner on a device: loaded when needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jitattn.build import Pending
from jitattn.driver import LoadedKernel, load_kernel
from jitattn.tiling import AttentionTile

Role = Literal["decode", "wide", "prefill"]
"""What a kernel is for: requests of one row tile, of a wider one, or of many rows."""


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


@dataclass(eq=False, slots=True)
class BoundKernels:
    """The kernels whose loaders suit a bound cache; ``wide`` is None until a plan needs it."""

    decode: AttentionKernel
    prefill: AttentionKernel
    wide: AttentionKernel | None = None

    def of(self, role: Role) -> AttentionKernel:
        """Return the kernel that is for this."""
        kernel: AttentionKernel = getattr(self, role)
        return kernel

    def load(self, *, with_prefill: bool) -> None:
        """Load the decode kernel, and the prefill kernel if that is wanted or takes no time."""
        self.decode.load()
        if with_prefill or self.prefill.pending.was_found:
            self.prefill.load()
