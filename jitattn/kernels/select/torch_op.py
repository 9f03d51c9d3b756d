"""Choices inside compiled functions: ``torch.ops.jitattn.index_logits`` and the like.

What an operator writes it is given. A page size that isn't given is known where the operator runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.common.torch_op import (
    PAGES,
    define,
    pages_tensors,
    refuse_gradients,
)
from jitattn.kernels.select import index_logits as logits_api
from jitattn.kernels.select import page_bounds as bounds_api
from jitattn.kernels.select import select_pages as pages_api
from jitattn.kernels.select import select_tokens as tokens_api
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.page_tables import table_from_tensors
from jitattn.tensors.quantization import cache_of
from jitattn.tensors.token_lists import IndexLists, PageLists

__all__ = ["index_logits", "page_bounds", "select_pages", "select_tokens"]


def index_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    pages: list[Tensor],
    page_table: str | None,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    max_q_len: int | None,
    scale_layout: str,
    out: Tensor,
) -> None:
    """Score keys: ``torch.ops.jitattn.index_logits``, with the function's arguments.

    Args:
        q: as of ``index_logits``, like what is not said here.
        weights: likewise.
        k_cache: likewise.
        pages: tensors of the page table.
        page_table: its layout.
        seq_lens: lengths.
        qo_indptr: offsets.
        max_q_len: the most query tokens of a request.
        scale_layout: "page" or "token".
        out: float32 [num_tokens, max_kv_len]; written.

    Raises:
        TypeError, ValueError: as ``index_logits``.
    """
    table: Any = table_from_tensors(pages, page_table)
    given = q, weights, k_cache, table, seq_lens, qo_indptr
    logits_api.index_logits(*given, max_q_len=max_q_len, scale_layout=scale_layout, out=out)


def select_tokens(
    logits: Tensor,
    pages: list[Tensor],
    page_table: str | None,
    seq_lens: Tensor,
    k: int,
    qo_indptr: Tensor | None,
    max_q_len: int | None,
    page_size: int | None,
    slots: Tensor,
    counts: Tensor,
) -> None:
    """List tokens: ``torch.ops.jitattn.select_tokens``, with the function's arguments.

    Args:
        logits: as of ``select_tokens``, like what is not said here.
        pages: tensors of the page table.
        page_table: its layout.
        seq_lens: lengths.
        k: entries of a list.
        qo_indptr: offsets.
        max_q_len: the most query tokens of a request.
        page_size: tokens of a page.
        slots: int32 [num_tokens, k]; written.
        counts: int32 [num_tokens]; written.

    Raises:
        TypeError, ValueError: as ``select_tokens``.
    """
    table: Any = table_from_tensors(pages, page_table)
    tokens_api.select_tokens(
        *(logits, table, seq_lens, k, qo_indptr),
        max_q_len=max_q_len,
        page_size=page_size,
        out=IndexLists(slots, counts),
    )


def page_bounds(
    kv_cache: list[Tensor],
    pages: list[Tensor],
    page_table: str | None,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    max_q_len: int | None,
    max_kv_len: int | None,
    kv_layout: str,
    out: Tensor,
) -> None:
    """Bring bounds up to date: ``torch.ops.jitattn.page_bounds``, with the function's arguments.

    Args:
        kv_cache: one tensor of K and V, or one of each.
        pages: tensors of the page table.
        page_table: its layout.
        seq_lens: lengths.
        qo_indptr: offsets of this step's tokens.
        max_q_len: the most of them of a request.
        max_kv_len: the most tokens of a request.
        kv_layout: "NHD" or "HND".
        out: [num_pages, 2, num_kv_heads, head_dim]; written.

    Raises:
        TypeError, ValueError: as ``page_bounds``.
    """
    cache: Any = cache_of(kv_cache)
    table: Any = table_from_tensors(pages, page_table)
    bounds_api.page_bounds(
        *(cache, table, seq_lens, qo_indptr),
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        kv_layout=kv_layout,
        out=out,
    )


def select_pages(
    q: Tensor,
    bounds: Tensor,
    pages: list[Tensor],
    page_table: str | None,
    seq_lens: Tensor,
    k: int,
    page_size: int | None,
    max_kv_len: int | None,
    ids: Tensor,
    numbers: Tensor,
    counts: Tensor,
) -> None:
    """List pages: ``torch.ops.jitattn.select_pages``, with the function's arguments.

    Args:
        q: as of ``select_pages``, like what is not said here.
        bounds: likewise.
        pages: tensors of the page table.
        page_table: its layout.
        seq_lens: lengths.
        k: entries of a list.
        page_size: tokens of a page.
        max_kv_len: the most tokens of a request.
        ids: int32 [batch_size, num_kv_heads, k], the pages that are chosen; written.
        numbers: likewise, their numbers in the request; written.
        counts: int32 [batch_size, num_kv_heads]; written.

    Raises:
        TypeError, ValueError: as ``select_pages``.
    """
    table: Any = table_from_tensors(pages, page_table)
    found = pages_api.select_pages(
        q, bounds, table, seq_lens, k, page_size=page_size, max_kv_len=max_kv_len
    )
    # Lists of new memory are none yet: their numbers don't ascend.
    for target, tensor in zip((ids, numbers, counts), found.tensors, strict=True):
        target.copy_(tensor)


define(
    index_logits,
    f"Tensor q, Tensor weights, Tensor k_cache, {PAGES}Tensor seq_lens, Tensor? qo_indptr, "
    "int? max_q_len, str scale_layout, Tensor(a!) out) -> ()",
)
define(
    select_tokens,
    f"Tensor logits, {PAGES}Tensor seq_lens, int k, Tensor? qo_indptr, int? max_q_len, "
    "int? page_size, Tensor(a!) slots, Tensor(b!) counts) -> ()",
)
define(
    page_bounds,
    f"Tensor[] kv_cache, {PAGES}Tensor seq_lens, Tensor? qo_indptr, int? max_q_len, "
    "int? max_kv_len, str kv_layout, Tensor(a!) out) -> ()",
)
define(
    select_pages,
    f"Tensor q, Tensor bounds, {PAGES}Tensor seq_lens, int k, int? page_size, int? max_kv_len, "
    "Tensor(a!) ids, Tensor(b!) numbers, Tensor(c!) counts) -> ()",
)


# --- traced calls ---------------------------------------------------------------------------------


def trace_logits(call: logits_api.IndexLogitsCall) -> Tensor:
    """Put an ``index_logits`` into the graph."""
    q, out, cache = call.q, call.out, call.k_cache
    refuse_gradients({"weights": call.weights})
    if out is None:
        width = call.max_kv_len
        if width is None:
            row_bytes = q.shape[2] + 4
            page_size = cache.shape[1] if cache.dim() > 2 else cache.shape[1] // row_bytes
            width = call.pages.capacity(page_size)
        out = torch.empty((q.shape[0], width), dtype=torch.float32, device=q.device)
    torch.ops.jitattn.index_logits(
        *(q, call.weights, cache, *pages_tensors(call.pages), call.seq_lens, call.qo_indptr),
        *(call.max_q_len, call.scale_layout, out),
    )
    return out


def trace_tokens(call: tokens_api.SelectTokensCall) -> IndexLists:
    """Put a ``select_tokens`` into the graph."""
    logits, out, k = call.logits, call.out, call.k
    refuse_gradients({"logits": logits})
    if out is None:
        slots = torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)
        counts = torch.empty(logits.shape[:1], dtype=torch.int32, device=logits.device)
        out = IndexLists(slots, counts)
    torch.ops.jitattn.select_tokens(
        *(logits, *pages_tensors(call.pages), call.seq_lens, k, call.qo_indptr, call.max_q_len),
        *(call.page_size, out.slots, out.counts),
    )
    return out


def trace_bounds(call: bounds_api.PageBoundsCall) -> Tensor:
    """Put a ``page_bounds`` into the graph."""
    cache, kv_layout, out = call.kv_cache, call.kv_layout, call.out
    if isinstance(cache, BoundCache):
        cache, kv_layout = (cache.k.tensor, cache.k.tensor), "NHD"
    tensors = [cache] if isinstance(cache, Tensor) else [cache[0], cache[1]]
    if out is None:
        raise ValueError("out is None inside a compiled function: give what an eager call returned")
    torch.ops.jitattn.page_bounds(
        *(tensors, *pages_tensors(call.pages), call.seq_lens, call.qo_indptr, call.max_q_len),
        *(call.max_kv_len, kv_layout, out),
    )
    return out


def trace_pages(call: pages_api.SelectPagesCall) -> PageLists:
    """Put a ``select_pages`` into the graph."""
    q, out = call.q, call.out
    refuse_gradients({"q": q})
    if out is None:
        shape = q.shape[0], call.bounds.shape[2], call.k
        ids, numbers = torch.empty((2, *shape), dtype=torch.int32, device=q.device)
        counts: Tensor | None = torch.empty(shape[:2], dtype=torch.int32, device=q.device)
    else:
        ids, numbers, counts = out.pages, out.numbers, out.counts
    torch.ops.jitattn.select_pages(
        *(q, call.bounds, *pages_tensors(call.pages), call.seq_lens, call.k, call.page_size),
        *(call.max_kv_len, ids, numbers, counts),
    )
    return PageLists(ids, numbers, counts) if out is None else out
