"""Tensor maps of a cache, by which TMA loads tiles of K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from jitattn.device.driver import encode_tensor_map, move_tensor_map
from jitattn.spec.layout import SEGMENT_BYTES
from jitattn.tensors.cache_views import CacheView, HasTensor

# Tokens whose segments a grouped tile has one after the other: as many as a swizzle repeats at.
_GROUP_TOKENS = 8


class TmaTile(NamedTuple):
    """Tile of K or V that one TMA instruction loads."""

    tokens: int
    key_columns: int
    value_columns: int
    # Whether it arrives as groups of eight tokens, of which each has all its segments before the
    # next, instead of as segments, of which each has all tokens. Of one head only.
    is_grouped: bool = False
    # Whether the L2 cache fetches two lines of a row at a time. Who waits for memory alone is 5 %
    # slower then on an H200, and who computes too is not: docs/perf-log.md.
    fetches_pairs: bool = False


class LoadedTile(Protocol):
    """What TMA loads for a kernel at a time."""

    @property
    def tma_tokens(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def key_tma_columns(self) -> int:
        """Columns of K; 0: all."""
        ...

    @property
    def value_dim(self) -> int:
        """Columns of V."""
        ...

    @property
    def fetches_pairs(self) -> bool:
        """Whether L2 loads segments in pairs."""
        ...


def tma_tile_of(tile: LoadedTile, head_dim: int) -> TmaTile:
    """Return the TMA tile of a kernel of ``tile``, whose K has ``head_dim`` columns."""
    key_columns = tile.key_tma_columns or head_dim
    return TmaTile(tile.tma_tokens, key_columns, tile.value_dim, fetches_pairs=tile.fetches_pairs)


class TensorMaps:
    """The tensor maps of a cache's K and V, as launches of each kernel take them."""

    __slots__ = ("_encoded", "_form", "_last")

    def __init__(self, form: MapForm, k_at: int, v_at: int) -> None:
        """Of K and V at these addresses; those of later kernels follow when they are needed.

        Raises:
            ValueError: the driver has none for these strides.
        """
        self._form = form
        first = k_at, v_at, form.encode(form.first_tile, k_at, v_at)
        # By tile: kernels of the same tile have the same maps.
        self._encoded: dict[TmaTile, tuple[int, int, bytes]] = {form.first_tile: first}
        # By what kernels are for, which is soon found.
        self._last: dict[str, tuple[int, int, bytes]] = {form.first_role: first}

    def at(self, role: str, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both for a kernel, where K and V are at these addresses now."""
        last = self._last.get(role)
        if last is None or k_at != last[0] or v_at != last[1]:
            tile = self._form.tile_of(role)
            last = self._encoded.get(tile)
            if last is None or (k_at, v_at) != last[:2]:
                last = self._encoded[tile] = k_at, v_at, self._form.encode(tile, k_at, v_at)
            self._last[role] = last
        return last[2]


class MapForm:
    """The tensor maps of caches that lie alike, but for their addresses."""

    __slots__ = ("_known", "_rows", "_tiles", "first_role", "first_tile")

    def __init__(self, k: CacheView, v: CacheView, tiles: Mapping[str, TmaTile]) -> None:
        """Encode nothing yet.

        Args:
            k: keys; what counts is how they lie.
            v: values, likewise.
            tiles: of each kernel, by its role.
        """
        self._rows = _Rows.of(k), _Rows.of(v)
        self._tiles = tiles
        self.first_role, self.first_tile = next(iter(tiles.items()))
        # By tile, where K and V lay when they were asked for first.
        self._known: dict[TmaTile, tuple[tuple[int, int], tuple[bytes, bytes]]] = {}

    def __call__(self, views: Sequence[HasTensor]) -> TensorMaps:
        """Return the maps of a cache of this form, of which the first two views are K and V.

        Raises:
            ValueError: the driver has none for these strides.
        """
        return TensorMaps(self, views[0].tensor.data_ptr(), views[1].tensor.data_ptr())

    def tile_of(self, role: str) -> TmaTile:
        """Return the tile of a kernel; one that uses none gets that of the first."""
        return self._tiles.get(role) or self.first_tile

    def encode(self, tile: TmaTile, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both maps at these addresses, or raise ValueError."""
        places, known = self._known.get(tile, ((), ()))
        if known:
            if places == (k_at, v_at):
                return known[0] + known[1]
            moved = move_tensor_map(known[0], k_at), move_tensor_map(known[1], v_at)
            if moved[0] and moved[1]:
                return moved[0] + moved[1]
        encode = _grouped_map if tile.is_grouped else _tensor_map
        k = encode(self._rows[0], k_at, tile, tile.key_columns)
        v = encode(self._rows[1], v_at, tile, tile.value_columns)
        self._known[tile] = (k_at, v_at), (k, v)
        return k + v


class _Rows(NamedTuple):
    """How K or V lies, [num_pages, page_size, num_heads, head_dim]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of pages, tokens and heads; 0 along a dimension of size 1
    given: tuple[int, ...]  # as the tensor has them
    item_bytes: int

    @classmethod
    def of(cls, view: CacheView) -> _Rows:
        """How ``view`` lies."""
        tensor = view.tensor
        return cls(tuple(tensor.shape), view.strides, tensor.stride(), tensor.element_size())

    @property
    def segment(self) -> int:
        """Elements of a segment of a row."""
        return SEGMENT_BYTES // self.item_bytes

    @property
    def byte_strides(self) -> list[int]:
        """Those of pages, tokens and heads.

        Nobody steps along a dimension of size 1, whose stride is 0 here, which is none to the
        driver.
        """
        return [
            stride * self.item_bytes if size > 1 else SEGMENT_BYTES
            for stride, size in zip(self.strides, self.shape[:3], strict=True)
        ]

    def encode(
        self,
        pointer: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        tile: Sequence[int],
        *,
        in_pairs: bool,
    ) -> bytes:
        """Return the map of these dimensions at an address, or raise ValueError."""
        # Beside a row of one line may lie another head's, which others read when it suits them.
        fetch_bytes = 256 if in_pairs and self.shape[3] > self.segment else 128
        encoded = 0 not in strides and encode_tensor_map(
            pointer, self.item_bytes, sizes, strides, tile, fetch_bytes=fetch_bytes
        )
        if not encoded:
            raise ValueError(
                f"the driver maps no tensor of strides {list(self.given)} at {pointer:#x}"
            )
        return encoded


def _tensor_map(rows: _Rows, pointer: int, tile: TmaTile, columns: int) -> bytes:
    """Return the map of K or V, whose tiles have so many columns.

    Dimensions as in struct TensorMap of attention_params.cuh.
    """
    num_pages, page_size, num_heads, head_dim = rows.shape
    page_stride, token_stride, head_stride = rows.byte_strides
    if tile.tokens > page_size:  # no pages: tokens follow each other
        num_pages, page_size = 1, num_pages
        page_stride, token_stride = SEGMENT_BYTES, page_stride
    # A row that ends inside a segment is cut there, and TMA tiles have one segment each.
    is_clipped = head_dim % rows.segment != 0
    num_segments, tile_segments = head_dim // rows.segment, columns // rows.segment
    row_columns = rows.segment
    if is_clipped:
        row_columns, num_segments, tile_segments = head_dim, 1, 1
    return rows.encode(
        pointer,
        (row_columns, page_size, num_segments, num_heads, num_pages),
        (token_stride, SEGMENT_BYTES, head_stride, page_stride),
        (rows.segment, tile.tokens, tile_segments, 1, 1),
        in_pairs=tile.fetches_pairs,
    )


def _grouped_map(rows: _Rows, pointer: int, tile: TmaTile, columns: int) -> bytes:
    """Return the map of rows of one head, whose tiles are groups of tokens.

    Dimensions {elements of a segment, tokens of a group, segments of a row, groups, pages}.
    """
    num_pages, page_size, _, head_dim = rows.shape
    page_stride, token_stride, _ = rows.byte_strides
    groups = page_size // _GROUP_TOKENS
    return rows.encode(
        pointer,
        (rows.segment, _GROUP_TOKENS, head_dim // rows.segment, groups, num_pages),
        (token_stride, SEGMENT_BYTES, token_stride * _GROUP_TOKENS, page_stride),
        (rows.segment, _GROUP_TOKENS, columns // rows.segment, tile.tokens // _GROUP_TOKENS, 1),
        in_pairs=tile.fetches_pairs,
    )
