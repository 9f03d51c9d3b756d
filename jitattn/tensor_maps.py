"""Tensor maps of a cache: what the hardware that copies boxes of K and V reads them by."""

from __future__ import annotations

from jitattn.binding import CacheView
from jitattn.driver import encode_tensor_map
from jitattn.tiling import SEGMENT_BYTES, DecodeTile, PrefillTile


class TensorMaps:
    """The tensor maps of a cache's K and V, as a launch takes them."""

    __slots__ = ("_at", "_bytes", "_k", "_tile", "_v", "_wide")

    def __init__(
        self,
        k: CacheView,
        v: CacheView,
        tile: DecodeTile | PrefillTile,
        wide_tile: DecodeTile | None = None,
    ) -> None:
        """Encode them.

        Raises:
            ValueError: the driver has none for these strides.
        """
        self._k, self._v, self._tile = k, v, tile
        self._encode((k.tensor.data_ptr(), v.tensor.data_ptr()))
        # None where they are the same: a reference to itself would keep the cache's memory longer.
        self._wide: TensorMaps | None = None
        if wide_tile is not None and _box_of(wide_tile) != _box_of(tile):
            self._wide = TensorMaps(k, v, wide_tile)

    @property
    def wide(self) -> TensorMaps:
        """The maps for the kernel of ``wide_tile``."""
        return self._wide or self

    def at(self, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both, where K and V are at these addresses now."""
        if (k_at, v_at) != self._at:
            self._encode((k_at, v_at))
        return self._bytes

    def _encode(self, at: tuple[int, int]) -> None:
        tile, key_dim = self._tile, self._k.tensor.shape[-1]
        self._bytes = _tensor_map(self._k, at[0], key_dim, tile.box_tokens) + _tensor_map(
            self._v, at[1], tile.value_dim, tile.box_tokens
        )
        self._at = at


def _box_of(tile: DecodeTile | PrefillTile) -> tuple[int, int]:
    return tile.box_tokens, tile.value_dim


def _tensor_map(view: CacheView, pointer: int, box_dim: int, box_tokens: int) -> bytes:
    """Return the map of K or V, whose boxes have ``box_dim`` columns of ``box_tokens`` tokens.

    Dimensions as in struct TensorMap of attention_params.cuh.
    """
    item_bytes = view.tensor.element_size()
    num_pages, page_size, num_heads, head_dim = view.tensor.shape
    segment = SEGMENT_BYTES // item_bytes
    # Nobody steps along a dimension of size 1, whose stride is 0 here, which is none to the driver.
    sizes = num_pages, page_size, num_heads
    strides = [
        stride * item_bytes if size > 1 else SEGMENT_BYTES
        for stride, size in zip(view.strides, sizes, strict=True)
    ]
    encoded = 0 not in strides and encode_tensor_map(
        pointer,
        item_bytes,
        (segment, page_size, head_dim // segment, num_heads, num_pages),
        (strides[1], SEGMENT_BYTES, strides[2], strides[0]),
        (segment, box_tokens, box_dim // segment, 1, 1),
        # Beside a row of one line may lie another head's, which others read when it suits them.
        fetch_bytes=128 if box_dim == segment else 256,
    )
    if not encoded:
        strides = list(view.tensor.stride())
        raise ValueError(f"the driver maps no tensor of strides {strides} at {pointer:#x}")
    return encoded
