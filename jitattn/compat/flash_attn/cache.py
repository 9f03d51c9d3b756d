"""flash-attn's cache as pages: contiguous rows, padded rows, blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count
from jitattn.compat.flash_attn.common import Q_DTYPES, check_table, check_vector
from jitattn.tensors.page_tables import BlockTable, TokenTable
from jitattn.tensors.tensor_checks import check_device, check_tensor

# What a page of a contiguous cache has at most, and at least where the cache's length allows it.
_MOST_TOKENS, _FEWEST_TOKENS = 64, 16


class CachedCall(NamedTuple):
    """Its arguments."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: Tensor | None
    num_splits: int
    return_softmax_lse: bool


class PagedCache(NamedTuple):
    """A cache as pages, and who has which."""

    k: Tensor  # [num_pages, page_size, nheads_k, head_dim]
    v: Tensor
    pages: BlockTable | TokenTable
    capacity: int  # tokens of a request


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check q and the two caches: dtypes, devices, shapes that agree.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_tensor("q", q, Q_DTYPES)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor, (q.dtype,))
        check_device(name, tensor, q.device)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected four dimensions")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache has shape {list(v_cache.shape)}: expected that of k_cache, "
            f"{list(k_cache.shape)}, but for the last dimension"
        )
    if k_cache.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache has heads of {k_cache.shape[3]}: expected {q.shape[3]}, like q")


def paged_cache(given: CachedCall, batch_size: int) -> PagedCache:
    """Return the cache as pages: blocks of a table, or rows cut into pages.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    k_cache, v_cache, block_table = given.k_cache, given.v_cache, given.block_table
    cache_batch_idx, cache_leftpad = given.cache_batch_idx, given.cache_leftpad
    if block_table is not None:
        for name, value in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if value is not None:
                raise ValueError(f"{name} is given: block_table says where a request's tokens are")
        check_table(block_table, batch_size)
        pages = BlockTable(block_table)
        return PagedCache(k_cache, v_cache, pages, pages.capacity(k_cache.shape[1]))
    check_vector("cache_batch_idx", cache_batch_idx, batch_size, k_cache.device)
    check_vector("cache_leftpad", cache_leftpad, batch_size, k_cache.device)
    num_rows, seqlen = k_cache.shape[:2]
    if cache_batch_idx is None and batch_size > num_rows:
        raise ValueError(f"q has {batch_size} requests: k_cache has {num_rows} rows")
    if num_rows * seqlen > INT32_MAX:
        raise ValueError(f"k_cache has {num_rows * seqlen} tokens: expected at most {INT32_MAX}")
    k, v, page_size = _as_pages(k_cache, v_cache)
    if cache_leftpad is not None:
        return PagedCache(k, v, _padded(batch_size, seqlen, cache_batch_idx, cache_leftpad), seqlen)
    pages_of_row = seqlen // page_size
    ids = torch.arange(num_rows * pages_of_row, dtype=torch.int32, device=k.device)
    table = ids.view(num_rows, pages_of_row)
    if cache_batch_idx is None:
        return PagedCache(k, v, BlockTable(table[:batch_size]), seqlen)
    return PagedCache(k, v, BlockTable(table, rows=cache_batch_idx), seqlen)


def _as_pages(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, int]:
    """View rows of a cache as pages of a size that many caches have."""
    num_rows, seqlen = k_cache.shape[:2]
    page_size = math.gcd(seqlen, _MOST_TOKENS)
    is_dense = all(
        num_rows == 1 or cache.stride(0) == seqlen * cache.stride(1) for cache in (k_cache, v_cache)
    )
    if not is_dense or page_size < _FEWEST_TOKENS:
        return k_cache, v_cache, max(seqlen, 1)
    size = num_rows * seqlen // page_size, page_size
    k, v = (
        cache.as_strided(
            (*size, *cache.shape[2:]), (page_size * cache.stride(1), *cache.stride()[1:])
        )
        for cache in (k_cache, v_cache)
    )
    return k, v, page_size


def _padded(
    batch_size: int, seqlen: int, cache_batch_idx: Tensor | None, cache_leftpad: Tensor
) -> TokenTable:
    """Return the slots of rows whose first tokens are padding."""
    steps = torch.arange(seqlen, device=cache_leftpad.device)
    if cache_batch_idx is None:
        cache_batch_idx = torch.arange(batch_size, device=cache_leftpad.device)
    places = cache_leftpad[:, None] + steps
    slots = cache_batch_idx.long()[:, None] * seqlen + places
    return TokenTable(torch.where(places < seqlen, slots, -1).int())


def cached_lens(given: CachedCall, cache: PagedCache) -> Tensor:
    """Return [batch_size], the tokens of each request before this call's."""
    q, cache_seqlens, cache_leftpad = given.q, given.cache_seqlens, given.cache_leftpad
    batch_size = q.shape[0]
    if cache_seqlens is None:
        if given.k is not None:
            raise ValueError("cache_seqlens is None: k needs the place that it is written at")
        cache_seqlens = cache.capacity
    if not isinstance(cache_seqlens, Tensor):
        length = check_count("cache_seqlens", cache_seqlens, least=-1, most=cache.capacity)
        cache_seqlens = torch.full((batch_size,), length, dtype=torch.int32, device=q.device)
    check_vector("cache_seqlens", cache_seqlens, batch_size, q.device)
    return cache_seqlens if cache_leftpad is None else cache_seqlens - cache_leftpad
