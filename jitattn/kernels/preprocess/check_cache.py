"""The cache that tokens are written into, as ``preprocess_qkv`` and ``append_kv`` take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_name
from jitattn.spec.config import MAX_PAGE_SIZE
from jitattn.spec.dtype import BLOCK_DTYPES, BYTE_DTYPES, KV_DTYPES, DType, dtype_name
from jitattn.tensors.cache_views import CacheView, cache_view
from jitattn.tensors.quantization import KVCache, QuantizedKV
from jitattn.tensors.scales import Scale, ScaleLike, scale_value, view_scale
from jitattn.tensors.tensor_checks import check_last_stride, check_tensor, check_writable

_CACHES = {DType(name).torch_dtype: DType(name) for name in KV_DTYPES if name not in BLOCK_DTYPES}
_SMALLEST_FLOAT = torch.finfo(torch.float32).tiny  # of full precision


@dataclass(frozen=True, slots=True)
class WrittenCache:
    """K and V as [num_pages, page_size, num_kv_heads, elements], and what their elements are."""

    k: CacheView
    v: CacheView
    kv_dtype: DType
    k_blocks: CacheView | None = None  # bytes of scales: [.., bytes of a row]
    v_blocks: CacheView | None = None

    @classmethod
    def of(
        cls,
        kv_cache: KVCache,
        k: Tensor,
        v: Tensor,
        *,
        kv_layout: str,
        kv_dtype: torch.dtype | str | None,
        is_separate: bool,
    ) -> Self:
        """Check a cache for ``k`` and ``v``; ``is_separate``: with page ids for each of them.

        Raises:
            TypeError, ValueError: it doesn't fit.
        """
        kv_layout = check_name("kv_layout", kv_layout, ("NHD", "HND"))
        wanted = None if kv_dtype is None else dtype_name(kv_dtype, "kv_dtype")
        if isinstance(kv_cache, QuantizedKV):
            cache = cls._of_blocks(kv_cache, k, v, kv_layout, wanted)
        else:
            cache = cls._of_tensors(kv_cache, k, v, kv_layout, wanted)
        _check_same_pages(cache.k, cache.v, is_separate)
        return cache

    @classmethod
    def _of_tensors(
        cls,
        kv_cache: Tensor | tuple[Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        kv_layout: str,
        wanted: str | None,
    ) -> Self:
        if isinstance(kv_cache, Tensor):
            if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
                raise ValueError(
                    f"kv_cache has shape {list(kv_cache.shape)}: expected [num_pages, 2, "
                    f"{_page_dims(kv_layout)}, head_dim], or a pair (k_cache, v_cache)"
                )
            named = (("kv_cache", kv_cache[:, 0], k), ("kv_cache", kv_cache[:, 1], v))
        elif isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
            named = (("k_cache", kv_cache[0], k), ("v_cache", kv_cache[1], v))
        else:
            raise TypeError(
                f"kv_cache is a {type(kv_cache).__name__}: expected a tensor, (k_cache, v_cache) "
                "or a QuantizedKV"
            )
        dtypes = [_stored_dtype(name, cache, wanted) for name, cache, _ in named]
        if dtypes[0] is not dtypes[1]:
            raise TypeError(
                f"v_cache has dtype {dtypes[1].value}: expected {dtypes[0].value}, as K"
            )
        dtype = getattr(torch, dtypes[0].value)
        views = [
            _view(name, cache.view(dtype), (k.shape[1], part.shape[2]), kv_layout)
            for name, cache, part in named
        ]
        return cls(views[0], views[1], dtypes[0])

    @classmethod
    def _of_blocks(
        cls, cache: QuantizedKV, k: Tensor, v: Tensor, kv_layout: str, wanted: str | None
    ) -> Self:
        if wanted not in (None, *cache.kv_dtypes):
            raise ValueError(f"kv_dtype is {wanted}: kv_cache is a QuantizedKV of {cache.kv_dtype}")
        kv_dtype = DType(cache.kv_dtype if wanted is None else wanted)
        assert kv_dtype.blocks is not None
        k_dim, v_dim = k.shape[2], v.shape[2]
        k_scales, v_scales = cache.scale_bytes
        views = [
            _view(name, tensor, (k.shape[1], row), kv_layout)
            for name, tensor, row in (
                ("kv_cache.k", cache.k, k_dim // 2),
                ("kv_cache.v", cache.v, v_dim // 2),
                ("kv_cache.k_block_scales", k_scales, kv_dtype.blocks.row_bytes(k_dim)),
                ("kv_cache.v_block_scales", v_scales, kv_dtype.blocks.row_bytes(v_dim)),
            )
        ]
        return cls(views[0], views[1], kv_dtype, views[2], views[3])

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """What is written, by name: K and V, and after both the scales of their blocks."""
        views = (
            ("kv_cache's K", self.k),
            ("kv_cache's V", self.v),
            ("kv_cache's k_block_scales", self.k_blocks),
            ("kv_cache's v_block_scales", self.v_blocks),
        )
        return [(name, view.tensor) for name, view in views if view is not None]

    def scale(self, name: str, scale: ScaleLike | None, device: torch.device) -> Scale:
        """Return a scale of K or V, 1 where it is not given.

        Raises:
            TypeError, ValueError: it doesn't fit, or the cache has none.
        """
        num_kv_heads = self.k.tensor.shape[2]
        found = view_scale(name, scale, self.kv_dtype.value, device, num_kv_heads=num_kv_heads)
        return Scale(1.0) if found is None else as_divisor(name, found)


def as_divisor(name: str, scale: Scale) -> Scale:
    """Return a scale that values can be divided by.

    Raises:
        ValueError: it is a number that is 0, or none of full precision.
    """
    if scale.tensor is None:
        _check_divisor(name, scale.value)
    return scale


def divisor_value(name: str, scale: object) -> float:
    """Return a scale that is a number and that values are divided by.

    Raises:
        TypeError: it is none.
        ValueError: it is 0, or no finite float32 of full precision.
    """
    return _check_divisor(name, scale_value(name, scale))


def _check_divisor(name: str, value: float) -> float:
    if abs(value) < _SMALLEST_FLOAT:
        raise ValueError(
            f"{name} is {value}: values are divided by it, expected a magnitude of at "
            f"least {_SMALLEST_FLOAT:.3g}"
        )
    return value


def _page_dims(kv_layout: str) -> str:
    return "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"


def _stored_dtype(name: str, cache: object, wanted: str | None) -> DType:
    check_tensor(name, cache, (*_CACHES, torch.uint8))
    assert isinstance(cache, Tensor)
    if cache.dtype is torch.uint8:
        if wanted in BLOCK_DTYPES:
            raise ValueError(
                f"kv_dtype is {wanted}: give a QuantizedKV, which has the scales of blocks"
            )
        if wanted not in BYTE_DTYPES:
            raise ValueError(
                f"{name} has dtype uint8, and kv_dtype is {wanted}: say what its bytes are with "
                f"kv_dtype, one of {', '.join(BYTE_DTYPES)}"
            )
        return DType(wanted)
    given = _CACHES[cache.dtype]
    if wanted not in (None, given.value):
        raise ValueError(f"kv_dtype is {wanted}: {name} has dtype {given.value}")
    return given


def _view(name: str, cache: Tensor, row: tuple[int, int], kv_layout: str) -> CacheView:
    """Return a cache of rows of so many heads and elements."""
    if cache.dim() != 4:
        ragged = " (K and V without pages are written by copying)" if cache.dim() == 3 else ""
        raise ValueError(
            f"{name} has shape {list(cache.shape)}: expected [num_pages, "
            f"{_page_dims(kv_layout)}, head_dim]{ragged}"
        )
    view = cache if kv_layout == "NHD" else cache.transpose(1, 2)
    if tuple(view.shape[2:]) != row:
        raise ValueError(
            f"{name} has shape {list(cache.shape)} with kv_layout={kv_layout}: rows of "
            f"num_kv_heads, elements = {list(view.shape[2:])}, expected {list(row)}"
        )
    if not 1 <= view.shape[1] <= MAX_PAGE_SIZE:
        raise ValueError(f"{name} has pages of {view.shape[1]} tokens: expected 1 to 2**20")
    if view.shape[0] > INT32_MAX:
        raise ValueError(f"{name} has {view.shape[0]} pages: expected fewer than 2**31")
    check_last_stride(name, view)
    check_writable(name, view)
    return cache_view(view)


def _check_same_pages(k: CacheView, v: CacheView, is_separate: bool) -> None:
    if k.tensor.shape[1] != v.tensor.shape[1]:
        raise ValueError(
            f"v_cache has pages of {v.tensor.shape[1]} tokens: expected {k.tensor.shape[1]}, as K"
        )
    if not is_separate and k.tensor.shape[0] != v.tensor.shape[0]:
        raise ValueError(
            f"k_cache has {k.tensor.shape[0]} pages and v_cache {v.tensor.shape[0]}: one id stands "
            "for both"
        )
