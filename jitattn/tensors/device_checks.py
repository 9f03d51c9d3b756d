"""What ``JITATTN_CHECK=1`` verifies on the device before a launch: lengths, offsets and page ids.

Everything here reads the device and waits for it, so nothing calls it unless the check is on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jitattn.spec.config import PagedConfig
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.tensor_checks import refuse_falling, refuse_first
from jitattn.tensors.tensor_layouts import Batch


def check_lengths(batch: Batch, config: PagedConfig) -> None:
    """Raise ValueError for a length beyond the table, a row outside it, or offsets that fall.

    Raises:
        ValueError: naming the first request that is wrong, and its value.
    """
    pages, seq_lens = batch.pages, batch.seq_lens
    if seq_lens is None:  # nothing that lists say is too long
        return
    if batch.qo_indptr is not None:
        refuse_falling("qo_indptr", batch.qo_indptr)
        q_lens = batch.qo_indptr.diff()
        message = f"request {{}} has {{}} query tokens: max_q_len is {batch.max_q_len}"
        refuse_first(q_lens > batch.max_q_len, q_lens, message)
    limits = pages.check_offsets(seq_lens, config.page_size or 1).clamp(max=batch.max_kv_len)
    refuse_first(
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
    pages: PlannedTable,
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
    lens = seq_lens.long().clamp(min=0)
    first = torch.zeros_like(lens)
    if config.window_left >= 0:
        q_lens = torch.ones_like(lens) if qo_indptr is None else qo_indptr.diff().long()
        first = (lens - q_lens - config.window_left).clamp(min=0)
    pages.check_entries(first, lens, num_pages, config.page_size or 1)
