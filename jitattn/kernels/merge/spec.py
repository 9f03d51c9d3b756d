"""The spec of the kernel that merges attention states."""

from __future__ import annotations

from typing import ClassVar

from jitattn.kernels.merge.tile import MergeTile
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec, Tile


class MergeSpec(KernelSpec):
    """The kernel that merges attention states of one dtype."""

    kernel: ClassVar[str] = "merge"
    path: ClassVar[str] = "merge/merge.cu.jinja"
    cta: ClassVar[Tile] = MergeTile()

    dtype: DType

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_merge_{self.dtype.short}"

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields and its symbol."""
        return {"dtype": self.dtype.value, "symbol": self.symbol}

    def config_text(self) -> str:
        """Return arguments that select the kernel: those of a planner whose outputs it merges."""
        return f"q_dtype={self.dtype},kv_dtype={self.dtype}"
