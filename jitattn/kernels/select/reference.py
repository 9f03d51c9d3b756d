"""The definitions of choices in PyTorch: scores in float64, order by a stable sort.

Nothing is written before everything is known: what is refused leaves outputs as they were.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jitattn.kernels.select.index_cache import IndexCacheView
from jitattn.kernels.select.query_rows import QueryBatch
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.quantization import saturated


def index_logits_by_definition(
    q: Tensor, weights: Tensor, cache: IndexCacheView, batch: QueryBatch, out: Tensor
) -> None:
    """Write the logits of every query token, -inf where it sees nothing."""
    rows = torch.full(out.shape, -math.inf, dtype=torch.float64, device=out.device)
    for request, begin, q_len, kv_len in batch.on_cpu():
        slots = batch.known_slots(request, kv_len, cache.num_pages)
        keys, scales = cache.keys_of(slots)
        for i in range(q_len):
            seen = max(kv_len - q_len + i + 1, 0)
            dots = q[begin + i].double() @ keys[:seen].double().T
            # Zero times what is not a number stays none.
            sums = (weights[begin + i].double()[:, None] * dots.relu()).sum(0)
            rows[begin + i, :seen] = sums * scales[:seen].double()
    out.copy_(rows)


def choose_by_definition(scores: Tensor, k: int) -> Tensor:
    """Return the places of the k largest, in ascending order; ties go to the earlier one."""
    return torch.sort(scores, descending=True, stable=True).indices[:k].sort().values


def select_tokens_by_definition(
    logits: Tensor, k: int, batch: QueryBatch, slots: Tensor, counts: Tensor
) -> None:
    """Write the lists of every query token; -1 behind what is chosen."""
    chosen_slots, chosen_counts = torch.full_like(slots, -1), torch.zeros_like(counts)
    for request, begin, q_len, kv_len in batch.on_cpu():
        known = batch.pages.slots_of(request, kv_len, batch.page_size)
        for i in range(q_len):
            row = logits[begin + i, : max(kv_len - q_len + i + 1, 0)]
            seen = (row != -math.inf).nonzero().flatten()
            chosen = seen[choose_by_definition(row[seen], k)]
            if (known[chosen] < 0).any():
                raise ValueError(f"request {request} has a token that its table has no page for")
            chosen_slots[begin + i, : len(chosen)] = known[chosen]
            chosen_counts[begin + i] = len(chosen)
    slots.copy_(chosen_slots)
    counts.copy_(chosen_counts)


def page_bounds_by_definition(
    keys: Tensor, batch: QueryBatch, bounds: Tensor, *, is_update: bool
) -> None:
    """Write the least and the largest keys of the pages of every request that may have changed.

    ``keys`` are [num_pages, page_size, num_kv_heads, head_dim].
    """
    found = bounds.clone()
    for request, _, q_len, kv_len in batch.on_cpu():
        first = max(kv_len - q_len, 0) // batch.page_size if is_update else 0
        if is_update and q_len == 0:
            continue
        slots = batch.known_slots(request, kv_len, keys.shape[0])
        for begin in range(first * batch.page_size, kv_len, batch.page_size):
            page = int(slots[begin]) // batch.page_size
            values = keys[page, : min(kv_len - begin, batch.page_size)].double()
            found[page, 0] = saturated(values.amin(0), bounds.dtype)
            found[page, 1] = saturated(values.amax(0), bounds.dtype)
    bounds.copy_(found)


def page_scores_by_definition(q: Tensor, bounds: Tensor) -> Tensor:
    """Return the bounds of scores, float64 [num_kv_heads, n].

    Args:
        q: [num_qo_heads, head_dim].
        bounds: [n, 2, num_kv_heads, head_dim], of the pages of a request.
    """
    num_kv_heads = bounds.shape[2]
    group = q.double().view(num_kv_heads, q.shape[0] // num_kv_heads, q.shape[1])[None]
    least, largest = (bounds[:, i, :, None].double() for i in (0, 1))
    return torch.maximum(group * least, group * largest).sum((2, 3)).T


def select_pages_by_definition(
    q: Tensor, bounds: Tensor, k: int, batch: QueryBatch, lists: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write the lists of every KV head: pages, numbers and counts; -1 behind what is chosen."""
    pages, numbers, counts = lists
    pages.fill_(-1)
    numbers.fill_(-1)
    counts.fill_(0)
    for request, _, _, kv_len in batch.on_cpu():
        num_pages = -(-kv_len // batch.page_size)
        if num_pages == 0:
            continue
        ids = _page_ids(batch.pages, request, num_pages, bounds.shape[0])
        scores = page_scores_by_definition(q[request], bounds[ids])
        # Above all numbers; NaN would be, too, but comes behind.
        inner = torch.arange(1, max(num_pages - 1, 1), device=ids.device)
        ends = {0, num_pages - 1}
        for head in range(scores.shape[0]):
            room = max(k - len(ends), 0)
            best = (
                inner[choose_by_definition(scores[head, inner], room)]
                if num_pages > 2
                else inner[:0]
            )
            chosen = torch.tensor(sorted({*ends, *best.tolist()}), device=ids.device)
            pages[request, head, : len(chosen)] = ids[chosen].to(torch.int32)
            numbers[request, head, : len(chosen)] = chosen.to(torch.int32)
            counts[request, head] = len(chosen)


def _page_ids(pages: PageTable, request: int, count: int, num_pages: int) -> Tensor:
    ids = pages.entries(request)[:count].long()
    wrong = ids[(ids < 0) | (ids >= num_pages)]
    if wrong.numel():
        raise ValueError(f"request {request} has page {int(wrong[0])}: there are {num_pages} pages")
    return ids
