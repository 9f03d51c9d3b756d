"""flash-attn 2's ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``, forward only.

The signatures are flash-attn's, and so are shapes, alignment of queries and keys, and what rotary
tables mean. Planners are cached by their configuration, and every call makes a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, check_flag, check_number
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.attention.functional import planner_of
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.kernels.preprocess.api import append_kv
from jitattn.tensors.page_tables import (
    INTEGERS,
    BlockTable,
    Pages,
    RaggedKV,
    TokenTable,
    check_device,
    check_indptr,
    check_tensor,
)

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

_16_BITS = (torch.float16, torch.bfloat16)
# What a page of a contiguous cache has at most, and at least where the cache's length allows it.
_MOST_TOKENS, _FEWEST_TOKENS = 64, 16


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write k and v behind the cached tokens, in place, and attend q to all of them.

    Query i of a request with seqlen_q queries and n keys, those of ``k`` included, sits at
    n - seqlen_q + i. What differs from flash-attn: docs/from-flash-attn.md.

    Args:
        q: [batch_size, seqlen_q, nheads, head_dim], float16 or bfloat16.
        k_cache: [batch_size_cache, seqlen_cache, nheads_k, head_dim], or with ``block_table``
            [num_blocks, block_size, nheads_k, head_dim]; like q, any strides but the last.
        v_cache: likewise; its heads may have another size.
        k: [batch_size, seqlen_new, nheads_k, head_dim], or None.
        v: likewise; with ``k``, or None.
        rotary_cos: [seqlen_ro, rotary_dim / 2], like q, for all places of a request: turns k by its
            places, and q by those from ``cache_seqlens`` on (causal, or a window) or by that one.
        rotary_sin: likewise.
        cache_seqlens: tokens in the cache, a number or int32 or int64 [batch_size]; None: it is
            full. ``k`` needs it. Negative: padding, out is 0 and nothing is read or written.
        cache_batch_idx: int32 or int64 [batch_size], rows of the cache; without ``block_table``.
        cache_leftpad: int32 or int64 [batch_size], where the first token of a row stands;
            ``cache_seqlens`` counts from the row's beginning; without ``block_table``.
        block_table: int32 [batch_size, blocks_per_request].
        softmax_scale: None: head_dim ** -0.5.
        causal: queries see no later keys.
        window_size: (left, right), keys that a query sees on either side of its own; -1 is all.
        softcap: score becomes softcap * tanh(score / softcap); 0 is off.
        rotary_interleaved: pairs are neighbours; False: rotary_dim / 2 apart.
        alibi_slopes: refused unless None.
        num_splits: 0, or 1: bits don't depend on the rest of the batch. Others are refused.
        return_softmax_lse: return the logarithms of the sums, too.

    Returns:
        out [batch_size, seqlen_q, nheads, head_dim of V], or (out, lse), lse float32 [batch_size,
        nheads, seqlen_q], natural. A row that sees no key has out 0 and lse -inf (flash-attn: inf).

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    # fmt: off
    return _attend_cached(_Given(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, softmax_scale, causal, window_size, softcap,
        rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse,
    ))
    # fmt: on


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attend the queries of requests that follow each other to their keys.

    Query i of a request with n queries and m keys sits at m - n + i.

    Args:
        q: [total_q, nheads, head_dim], float16 or bfloat16. Rows past ``cu_seqlens_q[-1]`` have out
            0 and lse -inf.
        k: [total_k, nheads_k, head_dim], or with ``block_table`` [num_blocks, block_size, nheads_k,
            head_dim] of any block size; like q.
        v: likewise; its heads may have another size.
        cu_seqlens_q: int32 [batch_size + 1], where the queries of each request begin.
        cu_seqlens_k: likewise of the keys; with ``block_table`` only the lengths count.
        max_seqlen_q: the most queries of a request; one with more is a ValueError on the CPU and
            NaN on the device.
        max_seqlen_k: the most keys, likewise.
        dropout_p: refused unless 0.
        softmax_scale: None: head_dim ** -0.5.
        causal: queries see no later keys.
        window_size: see ``flash_attn_with_kvcache``.
        softcap: score becomes softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: refused unless None.
        deterministic: of flash-attn's backward pass. The forward pass always is: no effect.
        return_attn_probs: return lse and an empty tensor, too: probabilities come with dropout
            alone.
        block_table: int32 [batch_size, blocks_per_request], or None.

    Returns:
        out [total_q, nheads, head_dim of V], or (out, lse, empty), lse float32 [nheads, total_q],
        natural. A row that sees no key has out 0 and lse -inf (flash-attn: inf).

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    refuse_gradients({"q": q, "k": k, "v": v})
    _refuse_alibi(alibi_slopes)
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}: there is no dropout here, expected 0")
    check_flag("causal", causal)
    check_flag("deterministic", deterministic)
    check_flag("return_attn_probs", return_attn_probs)
    _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    max_q_len = min(check_count("max_seqlen_q", max_seqlen_q, least=0), q.shape[0])
    max_kv_len = check_count("max_seqlen_k", max_seqlen_k, least=0)
    pages: Pages = RaggedKV(cu_seqlens_k) if block_table is None else BlockTable(block_table)
    window = _Window.of(causal, window_size, max_q_len)
    planner = _planner(
        q,
        k,
        v,
        pages,
        window,
        page_size=None if block_table is None else k.shape[1],
        sm_scale=_scale(softmax_scale),
        logits_soft_cap=check_number("softcap", softcap, least=0.0),
    )
    limits = {"max_q_len": max_q_len, "max_kv_len": max_kv_len}
    plan = plan_for_call(planner, pages, cu_seqlens_k.diff(), cu_seqlens_q, **limits)
    mask = window.mask_of(cu_seqlens_q, q.shape[0], max_q_len)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    out = plan.run(q, (k, v), lse=lse.t(), custom_mask=mask)
    assert isinstance(out, Tensor)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _check_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
) -> None:
    check_tensor("q", q, _16_BITS)
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}: expected [total_q, nheads, head_dim]")
    for name, tensor in (("k", k), ("v", v)):
        _check_keys(name, tensor, q, None if block_table is None else "block_table")
    for name, indptr in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_indptr(name, indptr)
        check_device(name, indptr, q.device)
    if block_table is not None:
        _check_table(block_table, cu_seqlens_k.shape[0] - 1)


# --- what both have -------------------------------------------------------------------------------


class _Window(NamedTuple):
    """Which keys around its own a query sees; ``right`` is None where no mask is needed."""

    causal: bool
    left: int
    right: int | None

    @classmethod
    def of(cls, causal: bool, window_size: object, max_q_len: int) -> _Window:
        if not isinstance(window_size, Sequence) or len(window_size) != 2:
            raise TypeError(f"window_size is {window_size!r}: expected a pair (left, right)")
        left, right = (check_count("window_size", n, least=-INT32_MAX) for n in window_size)
        # The last query's own key is the last one.
        is_limit = not causal and 0 < right < max_q_len - 1
        return cls(causal or right == 0, max(left, -1), right if is_limit else None)

    def mask_of_even(self, batch_size: int, q_len: int, device: torch.device) -> Tensor | None:
        """Return bool [batch_size * q_len, q_len] over a request's last keys, for ``run``."""
        if self.right is None:
            return None
        rows = torch.arange(q_len, device=device)
        return (rows <= rows[:, None] + self.right).repeat(batch_size, 1)

    def mask_of(self, indptr: Tensor, num_tokens: int, max_q_len: int) -> Tensor | None:
        """Return bool [num_tokens, max_q_len] for requests whose rows begin at ``indptr``."""
        if self.right is None:
            return None
        rows = torch.arange(num_tokens, dtype=indptr.dtype, device=indptr.device)
        request = torch.searchsorted(indptr[1:], rows, right=True)
        # Rows past the last request are as if they were its own.
        ends = torch.cat((indptr[1:], indptr[-1:]))[request]
        last = max_q_len - (ends - rows) + self.right
        return torch.arange(max_q_len, device=indptr.device) <= last[:, None]


def _planner(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: _Window, **others: object
) -> AttentionPlanner:
    arguments = {
        "num_qo_heads": q.shape[-2],
        "num_kv_heads": k.shape[-2],
        "head_dim": q.shape[-1],
        "head_dim_vo": v.shape[-1],
        "q_dtype": q.dtype,
        "kv_dtype": k.dtype,
        "page_table": pages.layout.value,
        "causal": window.causal,
        "window_left": window.left,
        "use_custom_mask": window.right is not None,
    }
    return planner_of(arguments | others, q.device)


def _refuse_alibi(alibi_slopes: Tensor | None) -> None:
    if alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes are given, expected None: AttentionPlanner(variant='alibi') has ALiBi"
        )


def _check_keys(name: str, keys: Tensor, q: Tensor, table: str | None) -> None:
    """Raise unless ``keys`` fit q: tokens, or blocks of them with a ``table``."""
    check_tensor(name, keys, (q.dtype,))
    check_device(name, keys, q.device)
    wanted = "[num_blocks, block_size, nheads_k, head_dim]" if table else "[total_k, nheads_k, ..]"
    if keys.dim() != (4 if table else 3):
        with_table = f"with {table}" if table else "without block_table"
        raise ValueError(f"{name} has shape {list(keys.shape)}: expected {wanted} {with_table}")


def _scale(value: object) -> float | None:
    """Return ``softmax_scale`` as planners take it."""
    return None if value is None else check_number("softmax_scale", value)


def _even_indptr(batch_size: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length


def _is_unsplit(num_splits: object) -> bool:
    count = check_count("num_splits", num_splits, least=0)
    if count > 1:
        raise ValueError(
            f"num_splits is {count}: expected 0 (the device decides) or 1 (bits that don't depend "
            "on the batch)"
        )
    return count == 1


# --- flash_attn_with_kvcache ----------------------------------------------------------------------


class _Given(NamedTuple):
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


def _attend_cached(given: _Given) -> Tensor | tuple[Tensor, Tensor]:
    q = given.q
    _check_given(given)
    batch_size, seqlen_q = q.shape[:2]
    cache = _view_cache(given, batch_size)
    cached = _cached_lens(given, cache)
    window = _Window.of(given.causal, given.window_size, seqlen_q)
    planner = _planner(
        q,
        cache.k,
        cache.v,
        cache.pages,
        window,
        page_size=cache.k.shape[1],
        sm_scale=_scale(given.softmax_scale),
        logits_soft_cap=check_number("softcap", given.softcap, least=0.0),
        batch_invariant=_is_unsplit(given.num_splits),
    )
    kv = planner.bind((cache.k, cache.v))
    q, seq_lens = _written(given, cache, cached)
    offsets = None if seqlen_q == 1 else _even_indptr(batch_size, seqlen_q, q.device)
    plan = plan_for_call(planner, cache.pages, seq_lens, offsets, max_q_len=seqlen_q)
    lse = torch.empty((batch_size * seqlen_q, q.shape[2]), dtype=torch.float32, device=q.device)
    out = plan.run(
        q.flatten(0, 1),
        kv,
        lse=lse if given.return_softmax_lse else None,
        custom_mask=window.mask_of_even(batch_size, seqlen_q, q.device),
    )
    assert isinstance(out, Tensor)
    out = out.view(batch_size, seqlen_q, *out.shape[1:])
    if not given.return_softmax_lse:
        return out
    return out, lse.view(batch_size, seqlen_q, -1).transpose(1, 2).contiguous()


def _check_given(given: _Given) -> None:
    refuse_gradients(
        {
            "q": given.q,
            "k_cache": given.k_cache,
            "v_cache": given.v_cache,
            "k": given.k,
            "v": given.v,
        }
    )
    _refuse_alibi(given.alibi_slopes)
    check_flag("causal", given.causal)
    check_flag("rotary_interleaved", given.rotary_interleaved)
    check_flag("return_softmax_lse", given.return_softmax_lse)
    _check_caches(given.q, given.k_cache, given.v_cache)


def _written(given: _Given, cache: _Cache, cached: Tensor) -> tuple[Tensor, Tensor]:
    """Append k and v, if any; q, turned, and [batch_size], the tokens of each request then."""
    q, k, v = given.q, given.k, given.v
    tables = given.rotary_cos, given.rotary_sin
    if k is None or v is None:
        _refuse_without_k(k=k, v=v, rotary_cos=tables[0], rotary_sin=tables[1])
        return q, cached
    seqlen_new = _check_new(k, v, given)
    if tables != (None, None):
        cos, sin = _check_rotary(*tables, q, cache.capacity)
        how = cos, sin, given.rotary_interleaved
        k = _rotated(k, cached, *how, step=1)
        is_moving = given.causal or any(0 <= n < cache.capacity for n in given.window_size)
        q = _rotated(q, cached, *how, step=int(is_moving))
    seq_lens = torch.where(cached < 0, 0, cached + seqlen_new)
    append_kv(
        k.contiguous().flatten(0, 1),
        v.contiguous().flatten(0, 1),
        (cache.k, cache.v),
        pages=cache.pages,
        seq_lens=seq_lens,
        qo_indptr=_even_indptr(q.shape[0], seqlen_new, q.device),
    )
    return q, seq_lens


# --- the cache ------------------------------------------------------------------------------------


class _Cache(NamedTuple):
    """A cache as pages, and who has which."""

    k: Tensor  # [num_pages, page_size, nheads_k, head_dim]
    v: Tensor
    pages: BlockTable | TokenTable
    capacity: int  # tokens of a request


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    check_tensor("q", q, _16_BITS)
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


def _view_cache(given: _Given, batch_size: int) -> _Cache:
    k_cache, v_cache, block_table = given.k_cache, given.v_cache, given.block_table
    cache_batch_idx, cache_leftpad = given.cache_batch_idx, given.cache_leftpad
    if block_table is not None:
        for name, value in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if value is not None:
                raise ValueError(f"{name} is given: block_table says where a request's tokens are")
        _check_table(block_table, batch_size)
        pages = BlockTable(block_table)
        return _Cache(k_cache, v_cache, pages, pages.capacity(k_cache.shape[1]))
    _check_vector("cache_batch_idx", cache_batch_idx, batch_size, k_cache.device)
    _check_vector("cache_leftpad", cache_leftpad, batch_size, k_cache.device)
    num_rows, seqlen = k_cache.shape[:2]
    if cache_batch_idx is None and batch_size > num_rows:
        raise ValueError(f"q has {batch_size} requests: k_cache has {num_rows} rows")
    if num_rows * seqlen > INT32_MAX:
        raise ValueError(f"k_cache has {num_rows * seqlen} tokens: expected at most {INT32_MAX}")
    k, v, page_size = _as_pages(k_cache, v_cache)
    if cache_leftpad is not None:
        return _Cache(k, v, _padded(batch_size, seqlen, cache_batch_idx, cache_leftpad), seqlen)
    pages_of_row = seqlen // page_size
    ids = torch.arange(num_rows * pages_of_row, dtype=torch.int32, device=k.device)
    table = ids.view(num_rows, pages_of_row)
    if cache_batch_idx is None:
        return _Cache(k, v, BlockTable(table[:batch_size]), seqlen)
    return _Cache(k, v, BlockTable(table, rows=cache_batch_idx), seqlen)


def _check_table(block_table: Tensor, batch_size: int) -> None:
    check_tensor("block_table", block_table, (torch.int32,))
    if block_table.dim() != 2 or block_table.shape[0] != batch_size:
        raise ValueError(
            f"block_table has shape {list(block_table.shape)}: expected [{batch_size}, "
            "blocks_per_request]"
        )


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


def _check_vector(name: str, value: Tensor | None, size: int, device: torch.device) -> None:
    if value is None:
        return
    check_tensor(name, value, INTEGERS)
    if tuple(value.shape) != (size,):
        raise ValueError(f"{name} has shape {list(value.shape)}: expected [{size}]")
    check_device(name, value, device)


def _cached_lens(given: _Given, cache: _Cache) -> Tensor:
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
    _check_vector("cache_seqlens", cache_seqlens, batch_size, q.device)
    return cache_seqlens if cache_leftpad is None else cache_seqlens - cache_leftpad


# --- new tokens -----------------------------------------------------------------------------------


def _refuse_without_k(**others: Tensor | None) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} is given: it needs k and v, which are appended together")


def _check_new(k: Tensor, v: Tensor, given: _Given) -> int:
    """Check what is appended; how many tokens a request."""
    batch_size = given.q.shape[0]
    for name, tensor, cache in (("k", k, given.k_cache), ("v", v, given.v_cache)):
        check_tensor(name, tensor, (cache.dtype,))
        wanted = (batch_size, k.shape[1] if k.dim() == 4 else None, *cache.shape[2:])
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [{batch_size}, seqlen_new, "
                f"{cache.shape[2]}, {cache.shape[3]}]"
            )
        check_device(name, tensor, cache.device)
    return k.shape[1]


def _check_rotary(
    cos: Tensor | None, sin: Tensor | None, q: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is None:
            raise ValueError(f"{name} is None: rotary_cos and rotary_sin come together")
        check_tensor(name, table, (q.dtype,))
        check_device(name, table, q.device)
        if table.dim() != 2 or not 0 < 2 * table.shape[1] <= q.shape[3]:
            raise ValueError(
                f"{name} has shape {list(table.shape)}: expected [seqlen_ro, rotary_dim / 2], "
                f"rotary_dim at most {q.shape[3]}"
            )
        if table.shape[0] < capacity:
            raise ValueError(
                f"{name} has {table.shape[0]} rows: expected {capacity}, for all tokens of a "
                "request that the cache holds"
            )
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin has shape {list(sin.shape)}: expected {list(cos.shape)}")
    return cos, sin


def _rotated(
    x: Tensor, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, step: int
) -> Tensor:
    """Turn [batch_size, length, heads, head_dim] by the positions ``first`` + ``step`` * i."""
    positions = first.long()[:, None] + step * torch.arange(x.shape[1], device=x.device)
    positions = positions.clamp(0, max(cos.shape[0] - 1, 0))  # those of padding are any
    c, s = (table[positions].float().unsqueeze(2) for table in (cos, sin))
    rotary_dim = 2 * cos.shape[1]
    turned = x[..., :rotary_dim].float()
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = a * c - b * s, a * s + b * c
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)
