"""Tensor maps of a cache: what the hardware that copies boxes of K and V reads them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jitattn.binding import CacheView
from jitattn.driver import encode_tensor_map
from jitattn.tiling import SEGMENT_BYTES, AttentionTile

# Tokens whose segments a box of groups brings one after the other: as many as a swizzle repeats at.
_GROUP_TOKENS = 8


class Box(NamedTuple):
    """What a kernel brings at a time."""

    tokens: int
    key_columns: int
    value_columns: int
    # Whether it arrives as groups of eight tokens, of which each has all its segments before the
    # next, instead of as segments, of which each has all tokens. Of one head only.
    is_grouped: bool = False


def box_of(tile: AttentionTile, head_dim: int) -> Box:
    """Return the boxes that a kernel of ``tile`` brings, whose K has ``head_dim`` columns."""
    return Box(tile.box_tokens, tile.key_box_columns or head_dim, tile.value_dim)


class TensorMaps:
    """The tensor maps of a cache's K and V, as launches of each kernel take them."""

    __slots__ = ("_boxes", "_encoded", "_first", "_k", "_last", "_v")

    def __init__(self, k: CacheView, v: CacheView, boxes: Mapping[str, Box]) -> None:
        """Encode those of the first kernel; the others follow when they are needed.

        Args:
            k: keys.
            v: values.
            boxes: what the kernels bring at a time, by what they are for.

        Raises:
            ValueError: the driver has none for these strides.
        """
        self._k, self._v, self._boxes = k, v, boxes
        # By box: kernels that bring the same have the same maps.
        self._encoded: dict[Box, tuple[int, int, bytes]] = {}
        # By what kernels are for, which is soon found.
        self._last: dict[str, tuple[int, int, bytes]] = {}
        self._first = next(iter(boxes))
        self.at(self._first, k.tensor.data_ptr(), v.tensor.data_ptr())

    def at(self, role: str, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both for a kernel, where K and V are at these addresses now."""
        last = self._last.get(role)
        if last is None or k_at != last[0] or v_at != last[1]:
            # A kernel that uses none gets those of the first.
            box = self._boxes.get(role) or self._boxes[self._first]
            last = self._encoded.get(box)
            if last is None or (k_at, v_at) != last[:2]:
                last = self._encoded[box] = k_at, v_at, self._encode(box, k_at, v_at)
            self._last[role] = last
        return last[2]

    def _encode(self, box: Box, k_at: int, v_at: int) -> bytes:
        encode = _grouped_map if box.is_grouped else _tensor_map
        return encode(self._k, k_at, box.key_columns, box.tokens) + encode(
            self._v, v_at, box.value_columns, box.tokens
        )


def _tensor_map(view: CacheView, pointer: int, box_dim: int, box_tokens: int) -> bytes:
    """Return the map of K or V, whose boxes have ``box_dim`` columns of ``box_tokens`` tokens.

    Dimensions as in struct TensorMap of attention_params.cuh.
    """
    num_pages, page_size, num_heads, head_dim = view.tensor.shape
    segment = SEGMENT_BYTES // view.tensor.element_size()
    page_stride, token_stride, head_stride = _byte_strides(view)
    return _encode(
        view,
        pointer,
        (segment, page_size, head_dim // segment, num_heads, num_pages),
        (token_stride, SEGMENT_BYTES, head_stride, page_stride),
        (segment, box_tokens, box_dim // segment, 1, 1),
    )


def _grouped_map(view: CacheView, pointer: int, box_dim: int, box_tokens: int) -> bytes:
    """Return the map of rows of one head, whose boxes arrive as groups of tokens.

    Dimensions {elements of a segment, tokens of a group, segments of a row, groups, pages}.
    """
    num_pages, page_size, _, head_dim = view.tensor.shape
    segment = SEGMENT_BYTES // view.tensor.element_size()
    page_stride, token_stride, _ = _byte_strides(view)
    groups = page_size // _GROUP_TOKENS
    return _encode(
        view,
        pointer,
        (segment, _GROUP_TOKENS, head_dim // segment, groups, num_pages),
        (token_stride, SEGMENT_BYTES, token_stride * _GROUP_TOKENS, page_stride),
        (segment, _GROUP_TOKENS, box_dim // segment, box_tokens // _GROUP_TOKENS, 1),
    )


def _byte_strides(view: CacheView) -> list[int]:
    """Return those of pages, tokens and heads.

    Nobody steps along a dimension of size 1, whose stride is 0 here, which is none to the driver.
    """
    item_bytes = view.tensor.element_size()
    return [
        stride * item_bytes if size > 1 else SEGMENT_BYTES
        for stride, size in zip(view.strides, view.tensor.shape[:3], strict=True)
    ]


def _encode(
    view: CacheView,
    pointer: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> bytes:
    encoded = 0 not in strides and encode_tensor_map(
        pointer, view.tensor.element_size(), sizes, strides, box
    )
    if not encoded:
        strides_given = list(view.tensor.stride())
        raise ValueError(f"the driver maps no tensor of strides {strides_given} at {pointer:#x}")
    return encoded
