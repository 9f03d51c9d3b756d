"""``flash_attn_with_kvcache``: attention over a cache, after the append of new tokens."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from jitattn.base.validate import check_flag, check_number
from jitattn.compat.flash_attn.append import append_new_tokens
from jitattn.compat.flash_attn.cache import CachedCall, cached_lens, check_caches, paged_cache
from jitattn.compat.flash_attn.common import (
    Window,
    even_indptr,
    is_unsplit,
    planner_for,
    refuse_alibi,
    softmax_scale_of,
)
from jitattn.compat.flash_attn.options import CacheOptions, check_options, sinks_of, table_of
from jitattn.compat.flash_attn.varlen import flash_attn_varlen_func
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.tensors.tensor_checks import check_last_stride, check_memory, check_tensor

_HONOURED = ("page_table", "s_aux", "learnable_sink", "out", "cu_seqlens_q", "max_seqlen_q")


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, **options: Unpack[CacheOptions],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
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
        rotary_cos: [seqlen_ro, rotary_dim / 2], like q, for all places of a row: turns k by its
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
        options: keywords of flash-attn 3 and vLLM, see docs/from-flash-attn.md.

    Returns:
        out [batch_size, seqlen_q, nheads, head_dim of V], or (out, lse), lse float32 [batch_size,
        nheads, seqlen_q], natural. A row that sees no key has out 0 and lse -inf (flash-attn: inf).

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    chosen = check_options(options, _HONOURED)
    block_table = table_of(block_table, chosen)
    given = CachedCall(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, softmax_scale, causal, window_size, softcap,
        rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse, chosen.get("out"),
        sinks_of(chosen, q),
    )  # fmt: skip
    if chosen.get("cu_seqlens_q") is not None:
        return _attend_ragged(given, chosen["cu_seqlens_q"], chosen.get("max_seqlen_q"))
    return _attend_cached(given)


def _attend_ragged(
    given: CachedCall, cu_seqlens_q: Tensor, max_seqlen_q: int | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend queries that follow each other to blocks of a table."""
    others = given.k, given.v, given.cache_batch_idx, given.cache_leftpad
    if given.block_table is None or any(value is not None for value in others):
        raise ValueError("cu_seqlens_q is given: it is for block_table or page_table, without k")
    if not isinstance(given.cache_seqlens, Tensor):
        raise ValueError("cache_seqlens is no tensor: cu_seqlens_q comes with one of [batch_size]")
    found = flash_attn_varlen_func(
        given.q, given.k_cache, given.v_cache, cu_seqlens_q, None,
        given.q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        given.block_table.shape[1] * given.k_cache.shape[1], 0.0, given.softmax_scale,
        given.causal, given.window_size, given.softcap, given.alibi_slopes,
        block_table=given.block_table, seqused_k=given.cache_seqlens, out=given.out,
        s_aux=given.sinks, num_splits=given.num_splits, return_softmax_lse=True,
    )  # fmt: skip
    return (found[0], found[1]) if given.return_softmax_lse else found[0]


def _attend_cached(given: CachedCall) -> Tensor | tuple[Tensor, Tensor]:
    q = given.q
    _check_given(given)
    batch_size, seqlen_q = q.shape[:2]
    cache = paged_cache(given, batch_size)
    cached = cached_lens(given, cache)
    window = Window.of(given.causal, given.window_size, seqlen_q)
    planner = planner_for(
        q,
        cache.k,
        cache.v,
        cache.pages,
        window,
        page_size=cache.k.shape[1],
        sm_scale=softmax_scale_of(given.softmax_scale),
        logits_soft_cap=check_number("softcap", given.softcap, least=0.0),
        batch_invariant=is_unsplit(given.num_splits),
        use_sinks=given.sinks is not None,
    )
    kv = planner.bind((cache.k, cache.v))
    q, seq_lens = append_new_tokens(given, cache, cached, kv)
    offsets = None if seqlen_q == 1 else even_indptr(batch_size, seqlen_q, q.device)
    plan = plan_for_call(planner, cache.pages, seq_lens, offsets, max_q_len=seqlen_q)
    lse = torch.empty((batch_size * seqlen_q, q.shape[2]), dtype=torch.float32, device=q.device)
    out = plan.run(
        q.flatten(0, 1),
        kv,
        out=None if given.out is None else _rows_of(given.out, given),
        sinks=given.sinks,
        lse=lse if given.return_softmax_lse else None,
        custom_mask=window.mask_of_even(batch_size, seqlen_q, q.device),
    )
    assert isinstance(out, Tensor)
    out = out.view(batch_size, seqlen_q, *out.shape[1:])
    if not given.return_softmax_lse:
        return out
    return out, lse.view(batch_size, seqlen_q, -1).transpose(1, 2).contiguous()


def _rows_of(out: Tensor, given: CachedCall) -> Tensor:
    """Return ``out`` by rows, as a view."""
    wanted = [*given.q.shape[:3], given.v_cache.shape[3]]
    check_tensor("out", out, (given.q.dtype,))
    if list(out.shape) != wanted or not out.is_contiguous():
        raise ValueError(f"out has shape {list(out.shape)}: expected {wanted}, contiguous")
    return out.flatten(0, 1)


def _check_given(given: CachedCall) -> None:
    refuse_gradients(
        {
            "q": given.q,
            "k_cache": given.k_cache,
            "v_cache": given.v_cache,
            "k": given.k,
            "v": given.v,
        }
    )
    refuse_alibi(given.alibi_slopes)
    check_flag("causal", given.causal)
    check_flag("rotary_interleaved", given.rotary_interleaved)
    check_flag("return_softmax_lse", given.return_softmax_lse)
    check_caches(given.q, given.k_cache, given.v_cache)
    check_memory("q", given.q)
    check_last_stride("q", given.q)  # before new tokens are written
