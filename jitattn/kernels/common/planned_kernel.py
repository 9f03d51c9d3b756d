"""Kernels that plans launch, on a device: loaded when needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from jitattn.device.driver import LoadedKernel, load_kernel
from jitattn.jit.build import Pending
from jitattn.kernels.common.tile import AttentionTile

Role = Literal["decode", "decode_multi_token", "prefill"]
"""What a kernel is for: requests of one row tile, of a wider one, or of many rows."""
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

    ``decode_multi_token`` is None where the decode kernel takes requests of a few query tokens.
    """

    decode: PlannedKernel
    prefill: PlannedKernel
    decode_multi_token: PlannedKernel | None

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
