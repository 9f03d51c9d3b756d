"""The shape of a CTA that takes tokens in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jitattn.spec.layout import Loader

if TYPE_CHECKING:
    from jitattn.kernels.preprocess.spec import PreprocessSpec


class PreprocessTile(NamedTuple):
    """The shape of a CTA that puts Q, K and V where attention reads them."""

    lanes: int  # threads of a row, which have 16 elements each
    ctas_per_sm: int  # at least: what bounds registers
    num_threads: int = 128
    smem_bytes: int = 0

    @property
    def groups(self) -> int:
        """Rows that a CTA has at a time."""
        return self.num_threads // self.lanes


def preprocess_tile(spec: PreprocessSpec) -> PreprocessTile:
    """Return the tile of a kernel that takes tokens in, the same on every architecture."""
    num_units = max(spec.head_dim, spec.head_dim_vo) // 16
    # A power of two, so that the threads of a row are in one warp and sum in a few exchanges.
    return PreprocessTile(
        lanes=1 << (num_units - 1).bit_length(),
        # Elements that are found one by one take registers for their places.
        ctas_per_sm=4 if spec.loader is Loader.VECTOR else 2,
    )
