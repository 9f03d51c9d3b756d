"""Views of KV caches: K and V by page, token, head and element, and the scales of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jitattn.spec.config import PlannerConfig
from jitattn.spec.dtype import BLOCK_DTYPES, BYTE_DTYPES, DType
from jitattn.spec.params import BlockScales
from jitattn.tensors.quantization import QuantizedKV
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor

_VECTOR_BYTES = 16

_BYTE_DTYPES = tuple(DType(name).torch_dtype for name in BYTE_DTYPES)


class HasTensor(Protocol):
    """A view of a part of a cache."""

    @property
    def tensor(self) -> Tensor:
        """The part, with the dimensions in an order of their own."""
        ...


class CacheView(NamedTuple):
    """K or V as [num_pages, page_size, num_kv_heads, head_dim], whatever its layout in memory.

    Strides are in elements; that of a dimension of size 1 means nothing in torch and is 0 here.
    """

    tensor: Tensor  # a view with the dimensions in that order
    page_stride: int
    token_stride: int
    head_stride: int
    vector_bytes: int = _VECTOR_BYTES  # that kernels copy at a time where rows allow it

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of pages, tokens and heads."""
        return self.page_stride, self.token_stride, self.head_stride

    @property
    def is_vector_aligned(self) -> bool:
        """Whether every row starts at a multiple of a vector, of 16 bytes but for four bits."""
        size = self.tensor.element_size()
        offsets = [self.tensor.data_ptr(), *(stride * size for stride in self.strides)]
        return all(offset % self.vector_bytes == 0 for offset in offsets)


def view_caches(
    kv_cache: Tensor | tuple[Tensor, Tensor], config: PlannerConfig, device: torch.device
) -> tuple[CacheView, CacheView]:
    """Return K and V of one tensor [num_pages, 2, ...] or of a pair of 4-D tensors.

    FP8 may come as uint8, the bytes it is stored in.

    Raises:
        TypeError: no tensor or pair of tensors, or another dtype than the planner's.
        ValueError: a shape, stride or device that doesn't fit the planner.
    """
    if isinstance(kv_cache, Tensor):
        return _view_halves(kv_cache, config, device)
    if not isinstance(kv_cache, (tuple, list)) or len(kv_cache) != 2:
        raise TypeError(
            f"kv_cache is a {type(kv_cache).__name__}: expected a tensor or (k_cache, v_cache)"
        )
    k = view_cache("k_cache", kv_cache[0], config, config.head_dim, device)
    v = view_cache("v_cache", kv_cache[1], config, config.head_dim_vo or config.head_dim, device)
    check_same_pages("k_cache", k, "v_cache", v, config)
    return k, v


def check_same_pages(
    k_name: str, k: CacheView, v_name: str, v: CacheView, config: PlannerConfig
) -> None:
    """Raise ValueError where one id stands for pages of K and V that aren't equally many."""
    if config.page_table != "separate" and k.tensor.shape[0] != v.tensor.shape[0]:
        what = "tokens" if config.page_table == "ragged" else "pages"
        raise ValueError(
            f"{k_name} has {k.tensor.shape[0]} {what} and {v_name} {v.tensor.shape[0]}: with "
            f"page_table={config.page_table!r} one id stands for both"
        )


def _view_halves(
    kv_cache: Tensor, config: PlannerConfig, device: torch.device
) -> tuple[CacheView, CacheView]:
    if config.page_table == "ragged":
        raise ValueError("kv_cache is one tensor: ragged K and V are a pair (k, v)")
    if config.head_dim_vo not in (None, config.head_dim):
        raise ValueError(
            f"kv_cache is one tensor: with head_dim={config.head_dim} and "
            f"head_dim_vo={config.head_dim_vo} give a pair (k_cache, v_cache)"
        )
    _check_rank("kv_cache", kv_cache, config, num_dims=5)
    if kv_cache.shape[1] != 2:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected 2, K and V, as the second "
            "dimension"
        )
    k = view_cache("kv_cache", kv_cache[:, 0], config, config.head_dim, device)
    v = view_cache("kv_cache", kv_cache[:, 1], config, config.head_dim, device)
    return k, v


def view_cache(
    name: str,
    cache: Tensor,
    config: PlannerConfig,
    row_elements: int,
    device: torch.device,
    *,
    row: str = "head_dim",
) -> CacheView:
    """Return K or V as a planner of ``config`` takes it, whose rows have so many elements.

    Raises:
        TypeError, ValueError: it doesn't fit; ``row`` says what its last dimension is.
    """
    is_ragged = config.page_table == "ragged"
    _check_rank(name, cache, config, num_dims=3 if is_ragged else 4, row=row)
    if is_ragged:
        view = cache.unsqueeze(1)  # pages of one token
    else:
        view = cache if config.kv_layout == "NHD" else cache.transpose(1, 2)
    wanted = (config.page_size or 1, config.num_kv_heads, row_elements)
    if tuple(view.shape[1:]) != wanted:
        raise ValueError(
            f"{name} has shape {list(cache.shape)} with kv_layout={config.kv_layout}: that is "
            f"page_size, num_kv_heads, {row} = {list(view.shape[1:])}, expected {list(wanted)}"
        )
    check_device(name, cache, device)
    check_last_stride(name, cache)
    found = cache_view(view.view(getattr(torch, config.kv_dtype)))  # of its bytes
    # Ragged tokens follow each other at the stride of their pages.
    return found._replace(token_stride=found.page_stride) if is_ragged else found


def cache_view(tensor: Tensor) -> CacheView:
    """Return K or V that is [num_pages, page_size, num_kv_heads, head_dim] with its strides."""
    page, token, head = (
        stride if size > 1 else 0
        for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    )
    return CacheView(tensor, page, token, head)


def _check_rank(
    name: str, cache: object, config: PlannerConfig, *, num_dims: int, row: str = "head_dim"
) -> None:
    dtype = getattr(torch, config.kv_dtype)
    check_tensor(name, cache, (dtype, torch.uint8) if dtype in _BYTE_DTYPES else (dtype,))
    assert isinstance(cache, Tensor)
    if cache.dim() != num_dims:
        page = "page_size, num_kv_heads" if config.kv_layout == "NHD" else "num_kv_heads, page_size"
        wanted = {
            3: "num_kv_tokens, num_kv_heads",
            4: f"num_pages, {page}",
            5: f"num_pages, 2, {page}",
        }
        raise ValueError(
            f"{name} has shape {list(cache.shape)}: expected [{wanted[num_dims]}, {row}]"
        )


_VIEW = "jitattn_view"


def mark_view(tensor: Tensor, view: object) -> None:
    """Note on the first tensor of a cache which tables it is for."""
    setattr(tensor, _VIEW, view)


def view_of(kv_cache: object) -> object:
    """Return what a page manager noted on a cache; None where it comes from elsewhere."""
    first = kv_cache[0] if isinstance(kv_cache, (tuple, list)) and kv_cache else kv_cache
    return getattr(getattr(first, "k", first), _VIEW, None)


class BlockCaches(NamedTuple):
    """K and V in four bits, as [num_pages, page_size, num_kv_heads, head_dim / 2] of uint8.

    And the scales of their blocks, with zeros, as bytes [num_pages, page_size, num_kv_heads, bytes
    of a row].
    """

    k: CacheView
    v: CacheView
    k_scales: CacheView
    v_scales: CacheView

    @property
    def is_vector_aligned(self) -> bool:
        """Whether every row of each begins at a multiple of what kernels copy at a time."""
        return all(view.is_vector_aligned for view in self)


def view_block_caches(
    kv_cache: object, config: PlannerConfig, device: torch.device
) -> BlockCaches | None:
    """Return the parts of a cache of four bits; None where neither it nor the planner is of them.

    Raises:
        TypeError: no ``QuantizedKV``, where the planner's kv_dtype has blocks.
        ValueError: a ``QuantizedKV`` where it is another, or a shape or device that doesn't fit.
    """
    if not isinstance(kv_cache, QuantizedKV):
        if config.kv_dtype not in BLOCK_DTYPES:
            return None
        raise TypeError(
            f"kv_cache is a {type(kv_cache).__name__}: with kv_dtype={config.kv_dtype} expected a "
            "QuantizedKV, which has the scales of blocks, too"
        )
    if config.kv_dtype not in kv_cache.kv_dtypes:
        raise ValueError(
            f"kv_cache is a QuantizedKV of {kv_cache.kv_dtype}: the planner has "
            f"kv_dtype={config.kv_dtype}"
        )
    kind = DType(config.kv_dtype).blocks
    assert kind is not None
    dims = config.head_dim, config.head_dim_vo or config.head_dim
    # Rows of an odd number of blocks are copied in halves of a vector.
    vector = 16 if all(dim % 32 == 0 for dim in dims) else 8
    data = replace(config, kv_dtype="uint8")
    scales = data if kind.has_zeros else replace(config, kv_dtype="float8_e4m3fn")
    k, v = (
        view_cache(name, tensor, data, dim // 2, device, row="head_dim / 2")._replace(
            vector_bytes=vector
        )
        for name, tensor, dim in zip(
            ("kv_cache.k", "kv_cache.v"), (kv_cache.k, kv_cache.v), dims, strict=True
        )
    )
    blocks = (
        view_cache(name, tensor, scales, num_bytes, device, row="bytes of scales")._replace(
            vector_bytes=_scale_vector(num_bytes)
        )
        for name, tensor, num_bytes in zip(
            ("kv_cache.k_block_scales", "kv_cache.v_block_scales"),
            kv_cache.scale_bytes,
            map(kind.row_bytes, dims),
            strict=True,
        )
    )
    check_same_pages("kv_cache.k", k, "kv_cache.v", v, config)
    return BlockCaches(k, v, *blocks)


def _scale_vector(num_bytes: int) -> int:
    """Return what is copied of a row's scales at a time: block_vector() of constants.cuh.jinja."""
    return next((size for size in (16, 8, 4) if num_bytes % size == 0), 1)


class BlockArguments:
    """Where the scales of a cache's blocks lie, as launches take it: in the place of maps."""

    __slots__ = ("_at", "_bytes", "_k_at", "_v_at", "_views")

    def __init__(self, views: Sequence[CacheView]) -> None:
        """Of the last two views of a cache, which are kept."""
        self._views = views[-2:]
        # These say where the scales are now: the memory of a tensor may move.
        self._k_at, self._v_at = (view.tensor.data_ptr for view in self._views)
        self._at: tuple[int, int] | None = None
        self._bytes = b""

    def at(self, role: str, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both, the same for every kernel and wherever K and V are."""
        del role, k_at, v_at
        at = self._k_at(), self._v_at()
        if at != self._at:
            self._bytes = b"".join(
                bytes(BlockScales(pointer, *view.strides))
                for pointer, view in zip(at, self._views, strict=True)
            )
            self._at = at
        return self._bytes
