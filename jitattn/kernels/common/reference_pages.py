"""The tokens of a request, found through its page table, as the reference backend reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jitattn.tensors.page_tables import BlockTable, CsrPages, Pages, RaggedKV, TokenTable


def gather(cache: Tensor, page_ids: Tensor, kv_len: int, *, start: int = 0) -> Tensor:
    """Copy the tokens of one request out of its pages.

    Args:
        cache: [num_pages, page_size, num_kv_heads, head_dim], any strides.
        page_ids: [>= ceil(kv_len / page_size)], any integer dtype; entries past the last page
            and wholly before ``start`` are not read.
        kv_len: tokens of the request; zero or less is none.
        start: first token that matters, at the most kv_len.

    Returns:
        [max(kv_len, 0), num_kv_heads, head_dim], contiguous. Tokens of pages wholly before
        ``start`` are NaN, and the largest number of a type that has none.
    """
    _, page_size, num_kv_heads, head_dim = cache.shape
    kv_len = max(kv_len, 0)
    first_page, last_page = start // page_size, -(-kv_len // page_size)
    if last_page > page_ids.shape[0]:
        raise ValueError(
            f"kv_len {kv_len} needs {last_page} pages of {page_size}, got {page_ids.shape[0]} ids"
        )
    nothing = math.nan if cache.dtype.is_floating_point else torch.iinfo(cache.dtype).max
    tokens = cache.new_full((last_page * page_size, num_kv_heads, head_dim), nothing)
    if first_page < last_page:
        live = page_ids[first_page:last_page].long()
        tokens[first_page * page_size :] = chosen(cache, (live,)).flatten(0, 1)
    return tokens[:kv_len]


def chosen(cache: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    """``cache[index]``, as bytes of an FP8 cache, which not every torch can index on the CPU."""
    if cache.dtype.itemsize > 1:
        return cache[index]
    return cache.view(torch.uint8)[index].view(cache.dtype)


def first_visible(kv_len: int, q_len: int, window_left: int) -> int:
    """The first key that the first query row of a request can see, ignoring causality."""
    return 0 if window_left < 0 else min(max(0, kv_len - q_len - window_left), max(kv_len, 0))


def most_tokens(pages: Pages, request: int, page_size: int, num_kv_tokens: int) -> int:
    """The most tokens that a request may have by its table."""
    if not isinstance(pages, CsrPages | RaggedKV):
        return pages.capacity(page_size)
    begin, end = (int(n) for n in pages.kv_indptr[request : request + 2])
    if isinstance(pages, RaggedKV):
        return min(end, num_kv_tokens) - begin
    return (min(end, pages.kv_indices.shape[0]) - begin) * page_size


def entries_of(
    pages: Pages, request: int, start: int, kv_len: int, page_size: int, which: int
) -> tuple[Tensor, int]:
    """The entries that a request reads, and how many of them a page has."""
    if isinstance(pages, TokenTable):
        return _row(pages.slots, pages.rows, request)[start:kv_len], page_size
    first, last = start // page_size, -(-kv_len // page_size)
    if isinstance(pages, BlockTable):
        row = _row(pages.table, pages.rows, request)
        return (row if row.dim() == 1 else row[which])[first:last], 1
    begin = int(pages.kv_indptr[request])
    if isinstance(pages, CsrPages):
        return pages.kv_indices[begin + first : begin + last], 1
    return torch.tensor([begin, begin + kv_len - 1], device="cpu"), 1


def gather_tokens(
    cache: Tensor, pages: Pages, request: int, kv_len: int, start: int, *, which: int
) -> Tensor:
    """Copy the tokens of a request out of K (``which`` 0) or V (1)."""
    if kv_len == 0:
        return cache[:0, 0]
    if isinstance(pages, TokenTable):
        return _gather_slots(cache, _row(pages.slots, pages.rows, request), kv_len, start)
    if isinstance(pages, BlockTable):
        row = _row(pages.table, pages.rows, request)
        return gather(cache, row if row.dim() == 1 else row[which], kv_len, start=start)
    begin = int(pages.kv_indptr[request])
    if isinstance(pages, CsrPages):
        return gather(cache, pages.kv_indices[begin:], kv_len, start=start)
    return cache[begin : begin + kv_len, 0]


def _row(table: Tensor, rows: Tensor | None, request: int) -> Tensor:
    return table[request if rows is None else int(rows[request])]


def _gather_slots(cache: Tensor, slots: Tensor, kv_len: int, start: int) -> Tensor:
    page_size = cache.shape[1]
    nothing = math.nan if cache.dtype.is_floating_point else torch.iinfo(cache.dtype).max
    tokens = cache.new_full((kv_len, *cache.shape[2:]), nothing)
    live = slots[start:kv_len].long()
    tokens[start:] = chosen(cache, (live // page_size, live % page_size))
    return tokens
