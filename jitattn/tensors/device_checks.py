"""What ``JITATTN_CHECK=1`` verifies on the device before a launch: lengths, offsets and page ids.

Everything here reads the device and waits for it, so nothing calls it unless the check is on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jitattn.spec.config import PagedConfig
from jitattn.tensors.cache_views import Batch
from jitattn.tensors.page_tables import BlockTable, CsrPages, Pages, RaggedKV, TokenTable


def check_lengths(batch: Batch, config: PagedConfig) -> None:
    """Raise ValueError for a length beyond the table, a row outside it, or offsets that fall.

    Raises:
        ValueError: naming the first request that is wrong, and its value.
    """
    pages, seq_lens = batch.pages, batch.seq_lens
    limits = torch.full_like(seq_lens, batch.max_kv_len, dtype=torch.int64)
    if batch.qo_indptr is not None:
        _check_rising("qo_indptr", batch.qo_indptr)
        q_lens = batch.qo_indptr.diff()
        message = f"request {{}} has {{}} query tokens: max_q_len is {batch.max_q_len}"
        _refuse_first(q_lens > batch.max_q_len, q_lens, message)
    if isinstance(pages, CsrPages | RaggedKV):
        indptr = pages.kv_indptr.long()
        _check_rising("kv_indptr", pages.kv_indptr)
        size = (config.page_size or 1) if isinstance(pages, CsrPages) else 1
        limits = torch.minimum(limits, indptr.diff() * size)
        if isinstance(pages, CsrPages):
            _refuse_first(
                indptr[1:] > pages.kv_indices.shape[0],
                indptr[1:],
                f"kv_indptr of request {{}} ends at {{}}: kv_indices has "
                f"{pages.kv_indices.shape[0]} entries",
            )
    elif pages.rows is not None:
        num_rows = (pages.table if isinstance(pages, BlockTable) else pages.slots).shape[0]
        outside = (pages.rows < 0) | (pages.rows >= num_rows)
        _refuse_first(
            outside & (seq_lens > 0),
            pages.rows,
            f"rows[{{}}] is {{}}: the table has {num_rows} rows",
        )
    _refuse_first(
        seq_lens.long() > limits,
        seq_lens,
        "seq_lens[{}] is {}, longer than its table or max_kv_len allows",
    )


def check_queries(qo_indptr: Tensor | None, num_tokens: int) -> None:
    """Raise ValueError when q has fewer rows than the requests have query tokens."""
    if qo_indptr is not None and int(qo_indptr[-1]) > num_tokens:
        raise ValueError(
            f"JITATTN_CHECK: qo_indptr[-1] is {int(qo_indptr[-1])}: q has {num_tokens} rows"
        )


def check_page_ids(
    pages: Pages,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    num_pages: Mapping[str, int],
    config: PagedConfig,
) -> None:
    """Raise ValueError for an entry of a visible token that lies outside the cache.

    Args:
        pages: the tables.
        seq_lens: those of the plan.
        qo_indptr: likewise.
        num_pages: of each tensor of the cache, by its name: a separate table's rows are for them.
        config: the planner's.

    Raises:
        ValueError: naming the first request with such an entry, and the entry.
    """
    page_size = config.page_size or 1
    main = next(iter(num_pages))
    lens = seq_lens.long().clamp(min=0)
    first = torch.zeros_like(lens)
    if config.window_left >= 0:
        q_lens = torch.ones_like(lens) if qo_indptr is None else qo_indptr.diff().long()
        first = (lens - q_lens - config.window_left).clamp(min=0)
    if isinstance(pages, RaggedKV):
        ends = pages.kv_indptr[:-1].long() + lens
        _refuse_first(
            ends > num_pages[main],
            ends,
            f"request {{}} ends at token {{}} of {' and '.join(num_pages)}",
        )
        return
    if isinstance(pages, TokenTable):
        slots = _rows(pages.slots, pages.rows)
        _check_entries(main, slots, first, lens, num_pages[main] * page_size)
        return
    first, last = first // page_size, (lens + page_size - 1) // page_size
    if isinstance(pages, CsrPages):
        _check_csr(main, pages, first, last, num_pages[main])
        return
    table = _rows(pages.table, pages.rows)
    for which, name in enumerate(num_pages):
        ids = table if table.dim() == 2 else table[:, which]
        _check_entries(name, ids, first, last, num_pages[name])


def _check_csr(name: str, pages: CsrPages, first: Tensor, last: Tensor, num_pages: int) -> None:
    width = int(last.max()) if last.numel() else 0
    columns = torch.arange(width, device=last.device)
    entries = pages.kv_indptr[:-1].long()[:, None] + columns
    entries = entries.clamp(max=max(pages.kv_indices.shape[0] - 1, 0))
    _check_entries(name, pages.kv_indices[entries], first, last, num_pages)


def _check_entries(name: str, ids: Tensor, first: Tensor, last: Tensor, end: int) -> None:
    columns = torch.arange(ids.shape[1], device=ids.device)
    is_read = (columns >= first[:, None]) & (columns < last[:, None])
    wrong = is_read & ((ids < 0) | (ids >= end))
    worst = wrong.int().argmax(dim=1, keepdim=True) if ids.shape[1] else first[:, None]
    _refuse_first(
        wrong.any(dim=1),
        ids.gather(1, worst)[:, 0] if ids.shape[1] else first,
        f"request {{}} has the entry {{}} for {name}: the cache ends at {end}",
    )


def _rows(table: Tensor, rows: Tensor | None) -> Tensor:
    # A padding request may have any row: nothing of it is looked at.
    return table if rows is None else table[rows.long().clamp(0, table.shape[0] - 1)]


def _refuse_first(wrong: Tensor, values: Tensor, message: str) -> None:
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ValueError("JITATTN_CHECK: " + message.format(request, int(values[request])))


def _check_rising(name: str, indptr: Tensor) -> None:
    begins = indptr[:-1].long()
    _refuse_first(begins < 0, begins, name + " of request {} begins at {}, before 0")
    _refuse_first(
        indptr.long().diff() < 0, indptr[1:], name + " of request {} ends at {}, before it begins"
    )
