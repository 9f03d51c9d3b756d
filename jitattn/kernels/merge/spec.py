"""The spec of the kernel that merges attention states."""

from __future__ import annotations

from typing import ClassVar

from jitattn.kernels.merge.tile import MergeTile
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec


class MergeSpec(KernelSpec):
    """The kernel that merges attention states of one dtype."""

    kernel: ClassVar[str] = "merge"

    dtype: DType

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_merge_{self.dtype.short}"

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields and its symbol."""
        return {"dtype": self.dtype.value, "symbol": self.symbol}

    def tile(self, arch: str) -> MergeTile:
        """Return the shape of a CTA on ``arch``."""
        return MergeTile()

    def template(self, arch: str) -> str:
        """Return the template on ``arch``."""
        return "merge/merge.cu.jinja"

    def config_text(self) -> str:
        """Return arguments that select the kernel: those of a planner whose outputs it merges."""
        return f"q_dtype={self.dtype},kv_dtype={self.dtype}"
