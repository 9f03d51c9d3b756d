"""The spec of kernels of multi-head latent attention."""

from __future__ import annotations

from typing import ClassVar

from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.common.tile import PrefillTile, WarpgroupTile
from jitattn.kernels.mla.tile import NARROW_ROWS, has_warpgroup_tile, mla_tile, uses_tma
from jitattn.spec.dtype import DType


class MLASpec(AttentionSpec):
    """A kernel of multi-head latent attention.

    ``head_dim`` counts a latent and its ``k_pe``, ``head_dim_vo`` the latent.
    """

    kernel: ClassVar[str] = "mla"

    row_tile: int  # query rows that a CTA handles
    k_pe_dtype: DType
    has_scales: bool  # rows hold a float32 scale for each 128 elements of their latent

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        parts = [f"jitattn_mla_r{self.row_tile}_{self._suffix}"]
        parts += [f"rope{self.k_pe_dtype.short}"] * (self.k_pe_dtype is not self.kv_dtype)
        parts += ["scales"] * self.has_scales
        return "_".join(parts)

    @property
    def merge_symbol(self) -> str:
        """Name of the kernel that merges what this one leaves in parts."""
        return f"{self.symbol}_merge"

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields and both symbols."""
        return super().context() | {"merge_symbol": self.merge_symbol}

    def tile(self, arch: str) -> PrefillTile | WarpgroupTile:
        """Return the shape of a CTA on ``arch``."""
        return mla_tile(self, arch)

    def uses_tma(self, arch: str) -> bool:
        """Return whether TMA loads latents and k_pe of caches whose strides allow it."""
        return uses_tma(self, arch)

    def is_narrow(self, arch: str) -> bool:
        """Return whether it is the kernel of few query rows, beside one of any number."""
        return self.row_tile in NARROW_ROWS and has_warpgroup_tile(
            self.q_dtype, self.kv_dtype, arch
        )

    def template(self, arch: str) -> str:
        """Return the template on ``arch``."""
        if self.is_narrow(arch):
            return "mla/mla_sm90_narrow.cu.jinja"
        if has_warpgroup_tile(self.q_dtype, self.kv_dtype, arch):
            return "mla/mla_sm90.cu.jinja"
        return "mla/mla_sm80.cu.jinja"
