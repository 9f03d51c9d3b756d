"""The cache of an indexer: keys of e4m3 with a float32 scale each, in the layouts in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jitattn.base.validate import check_name
from jitattn.kernels.select.params import IndexCache
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor

SCALE_LAYOUTS = ("page", "token")
_SCALE_BYTES = 4
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class IndexCacheView:
    """Keys and scales of a cache by page and token; strides and offsets in bytes."""

    tensor: Tensor  # uint8 [num_pages, ...]
    page_size: int
    head_dim: int
    page_stride: int
    key_stride: int
    scale_offset: int
    scale_stride: int

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return int(self.tensor.shape[0])

    def fill(self, params: IndexCache) -> None:
        """Write what kernels read of it, but for addresses."""
        params.num_pages, params.page_stride = self.num_pages, self.page_stride
        params.key_stride, params.scale_shift = self.key_stride, self.scale_stride - self.key_stride

    def is_aligned(self, address: int) -> bool:
        """Whether every key begins at a multiple of a vector, where the cache begins there.

        Raises:
            ValueError: not even scales begin at a multiple of 4 bytes.
        """
        bits = address | self.page_stride | self.key_stride
        if (bits | self.scale_offset | self.scale_stride) % _SCALE_BYTES:
            raise ValueError(
                "k_cache has an address or strides that are no multiples of 4 bytes, as scales of "
                "float32 need"
            )
        return bits % _VECTOR_BYTES == 0

    def keys_of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys of slots, float8_e4m3fn [n, head_dim], and their scales, float32 [n]."""
        pages, places = slots // self.page_size, slots % self.page_size
        keys = self._bytes(0, self.key_stride, self.head_dim)[pages, places]
        scales = self._bytes(self.scale_offset, self.scale_stride, _SCALE_BYTES)[pages, places]
        return keys.view(torch.float8_e4m3fn), scales.view(torch.float32)[:, 0]

    def _bytes(self, offset: int, stride: int, count: int) -> Tensor:
        """Return uint8 [num_pages, page_size, count] of what begins ``offset`` bytes in a page."""
        return self.tensor.as_strided(
            (self.num_pages, self.page_size, count),
            (self.page_stride, stride, 1),
            self.tensor.storage_offset() + offset,
        )


def view_index_cache(
    k_cache: object, head_dim: int, scale_layout: object, device: torch.device
) -> IndexCacheView:
    """Return the keys and scales of a cache.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device doesn't fit; as ``index_logits``.
    """
    layout = check_name("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_tensor("k_cache", k_cache, (torch.uint8, torch.float8_e4m3fn))
    assert isinstance(k_cache, Tensor)
    check_device("k_cache", k_cache, device)
    row_bytes = head_dim + _SCALE_BYTES
    pages = k_cache.view(torch.uint8)
    if pages.dim() == 4 and pages.shape[2] == 1:
        pages = pages.squeeze(2)
    elif pages.dim() == 2 and layout == "page" and pages.shape[1] % row_bytes == 0:
        check_last_stride("k_cache", pages)
        pages = pages.view(pages.shape[0], pages.shape[1] // row_bytes, row_bytes)
    if pages.dim() != 3 or pages.shape[2] != row_bytes or pages.shape[1] == 0:
        raise ValueError(
            f"k_cache has shape {list(k_cache.shape)}: expected [num_pages, page_size, {row_bytes}]"
            f", {head_dim} elements as q has and the bytes of a scale; or [num_pages, page_size, 1,"
            f" {row_bytes}], or with scale_layout='page' [num_pages, page_size * {row_bytes}]"
        )
    check_last_stride("k_cache", pages)
    page_size = pages.shape[1]
    page_stride = pages.stride(0) if pages.shape[0] > 1 else 0
    token_stride = pages.stride(1) if page_size > 1 else row_bytes
    if layout == "token":
        strides = page_stride, token_stride, head_dim, token_stride
        return IndexCacheView(pages, page_size, head_dim, *strides)
    if token_stride != row_bytes:
        raise ValueError(
            f"k_cache has strides {list(k_cache.stride())}: with scale_layout='page' a page is "
            "contiguous"
        )
    strides = page_stride, head_dim, page_size * head_dim, _SCALE_BYTES
    return IndexCacheView(pages, page_size, head_dim, *strides)
