"""NVFP4 caches: their bytes and the scales of their blocks, checked, and as kernels take them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from jitattn.spec.config import PlannerConfig
from jitattn.spec.params import BlockScales
from jitattn.tensors.cache_views import CacheView, check_same_pages, view_cache
from jitattn.tensors.quantization import NVFP4_BLOCK, QuantizedKV

_NVFP4 = "nvfp4"


class BlockCaches(NamedTuple):
    """K and V in four bits, as [num_pages, page_size, num_kv_heads, head_dim / 2] of uint8.

    And the scales of their blocks, [num_pages, page_size, num_kv_heads, head_dim / 16] of e4m3.
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
    """Return the parts of an NVFP4 cache; None where neither it nor the planner is one of NVFP4.

    Raises:
        TypeError: no ``QuantizedKV``, where the planner's kv_dtype is NVFP4.
        ValueError: a ``QuantizedKV`` where it is another, or a shape or device that doesn't fit.
    """
    if not isinstance(kv_cache, QuantizedKV):
        if config.kv_dtype != _NVFP4:
            return None
        raise TypeError(
            f"kv_cache is a {type(kv_cache).__name__}: with kv_dtype={_NVFP4} expected a "
            "QuantizedKV, which has the scales of blocks, too"
        )
    if config.kv_dtype != _NVFP4:
        raise ValueError(
            f"kv_cache is a QuantizedKV of {_NVFP4}: the planner has kv_dtype={config.kv_dtype}"
        )
    dims = config.head_dim, config.head_dim_vo or config.head_dim
    # Rows of an odd number of blocks are copied in halves of a vector.
    vector = 16 if all(dim % 32 == 0 for dim in dims) else 8
    data = replace(config, kv_dtype="uint8")
    scales = replace(config, kv_dtype="float8_e4m3fn")
    k, v = (
        replace(
            view_cache(name, tensor, data, dim // 2, device, row="head_dim / 2"),
            vector_bytes=vector,
        )
        for name, tensor, dim in zip(
            ("kv_cache.k", "kv_cache.v"), (kv_cache.k, kv_cache.v), dims, strict=True
        )
    )
    blocks = (
        replace(
            view_cache(name, tensor, scales, dim // NVFP4_BLOCK, device, row="head_dim / 16"),
            vector_bytes=_scale_vector(dim),
        )
        for name, tensor, dim in zip(
            ("kv_cache.k_block_scales", "kv_cache.v_block_scales"),
            (kv_cache.k_block_scales, kv_cache.v_block_scales),
            dims,
            strict=True,
        )
    )
    check_same_pages("kv_cache.k", k, "kv_cache.v", v, config)
    return BlockCaches(k, v, *blocks)


def _scale_vector(dim: int) -> int:
    """Return what is copied of a row's scales at a time: block_vector() of constants.cuh.jinja."""
    num_bytes = dim // NVFP4_BLOCK
    return next((size for size in (16, 8, 4) if num_bytes % size == 0), 1)


class BlockArguments:
    """Where the scales of a cache's blocks lie, as launches take it: in the place of maps."""

    __slots__ = ("_at", "_bytes", "_caches", "_k_at", "_v_at")

    def __init__(self, caches: BlockCaches) -> None:
        """Of ``caches``, which are kept."""
        self._caches = caches
        # These say where the scales are now: the memory of a tensor may move.
        self._k_at = caches.k_scales.tensor.data_ptr
        self._v_at = caches.v_scales.tensor.data_ptr
        self._at: tuple[int, int] | None = None
        self._bytes = b""

    def at(self, role: str, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both, the same for every kernel and wherever K and V are."""
        del role, k_at, v_at
        at = self._k_at(), self._v_at()
        if at != self._at:
            views = self._caches.k_scales, self._caches.v_scales
            self._bytes = b"".join(
                bytes(BlockScales(pointer, *view.strides))
                for pointer, view in zip(at, views, strict=True)
            )
            self._at = at
        return self._bytes
