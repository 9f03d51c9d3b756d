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
    out: Tensor | None = None
    sinks: Tensor | None = None


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
    step = _row_step(k_cache, v_cache)
    page_size = math.gcd(seqlen, step, _MOST_TOKENS)
    if cache_leftpad is not None or page_size < _FEWEST_TOKENS:
        page_size = 1
    k, v = (_as_pages(name, cache, step, page_size) for name, cache in _named(k_cache, v_cache))
    if cache_leftpad is not None:
        padded = _padded(batch_size, seqlen, step, cache_batch_idx, cache_leftpad)
        return PagedCache(k, v, padded, seqlen)
    rows = torch.arange(num_rows, dtype=torch.int32, device=k.device) * (step // page_size)
    ids = rows[:, None] + torch.arange(seqlen // page_size, dtype=torch.int32, device=k.device)
    if cache_batch_idx is None:
        ids = ids[:batch_size]
    if page_size == 1:
        return PagedCache(k, v, TokenTable(ids, rows=cache_batch_idx), seqlen)
    return PagedCache(k, v, BlockTable(ids, rows=cache_batch_idx), seqlen)


def _named(k_cache: Tensor, v_cache: Tensor) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    return ("k_cache", k_cache), ("v_cache", v_cache)


def _row_step(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return how many tokens apart rows begin, which slices of a cache have more than they hold.

    Raises:
        ValueError: it is no whole number, or another for V.
    """
    num_rows, seqlen = k_cache.shape[:2]
    if num_rows <= 1 or seqlen == 0:
        return seqlen
    # The stride of a dimension of one token says nothing.
    strides = [cache.stride()[0 if seqlen == 1 else 1] for cache in (k_cache, v_cache)]
    steps = [
        cache.stride(0) / max(stride, 1)
        for cache, stride in zip((k_cache, v_cache), strides, strict=True)
    ]
    for (name, cache), step in zip(_named(k_cache, v_cache), steps, strict=True):
        if not step.is_integer() or step != steps[0]:
            raise ValueError(
                f"{name} has strides {list(cache.stride())}: rows of both caches begin the same "
                "number of tokens apart"
            )
    return int(steps[0])


def _as_pages(name: str, cache: Tensor, step: int, page_size: int) -> Tensor:
    """View rows as pages of a size that many caches have; a length is none, nor compiled in."""
    num_rows, seqlen = cache.shape[:2]
    num_tokens = max(num_rows - 1, 0) * step + seqlen if num_rows else 0
    if num_tokens > INT32_MAX:
        raise ValueError(f"{name} has {num_tokens} tokens: expected at most {INT32_MAX}")
    size = num_tokens // page_size, page_size, *cache.shape[2:]
    token = cache.stride(0 if seqlen == 1 else 1)
    return cache.as_strided(size, (page_size * token, token, *cache.stride()[2:]))


def _padded(
    batch_size: int,
    seqlen: int,
    step: int,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor,
) -> TokenTable:
    """Return the slots of rows whose first tokens are padding."""
    steps = torch.arange(seqlen, device=cache_leftpad.device)
    if cache_batch_idx is None:
        cache_batch_idx = torch.arange(batch_size, device=cache_leftpad.device)
    places = cache_leftpad[:, None] + steps
    slots = cache_batch_idx.long()[:, None] * step + places
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
