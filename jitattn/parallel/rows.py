"""The batch that one rank attends: its lengths, and query tokens as requests where they must be.

A kernel counts a query's position from the last key of its request. Where a rank has some of the
keys, the last query may stand anywhere after its last one. So with several causal query tokens each
is a request of its own, which has as many of the rank's keys as come before it, in the row of pages
of the request that it belongs to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.shards import Shard


class GlobalBatch(NamedTuple):
    """A batch as all ranks have it.

    Attributes:
        seq_lens: KV tokens of each request on all ranks, this step's included.
        qo_indptr: where its query tokens begin; None is one each.
        max_q_len: the most of a request.
    """

    seq_lens: Tensor
    qo_indptr: Tensor | None
    max_q_len: int


class LocalBatch:
    """What a rank's plan is made of, in tensors of its own, which ``refresh`` writes anew.

    Attributes:
        seq_lens: this rank's KV tokens of each of its requests.
        qo_indptr: where their query tokens begin; None is one each.
        max_q_len: the most of a request.
        pages: their table.
        has_rows: whether that reads rows of the caller's, which may have changed by the next call.
    """

    def __init__(self, batch: GlobalBatch, pages: PageTable, shard: Shard, causal: bool) -> None:
        """Count on the device."""
        self._batch = batch
        self._shard = shard
        self.is_split = causal and batch.qo_indptr is not None
        self.max_q_len = 1 if self.is_split else batch.max_q_len
        self._requests: Tensor | None = None
        self.seq_lens, self.qo_indptr = self._counted()
        self.pages = self.pages_of(pages)
        # Without rows of its own the plan's table stays the same.
        self.has_rows = self._requests is not None and (
            pages.rows_of(self._requests) is not self._requests
        )

    def refresh(self) -> None:
        """Count again, from what the caller's tensors hold now."""
        lens, indptr = self._counted()
        self.seq_lens.copy_(lens)
        if self.qo_indptr is not None and indptr is not None:
            self.qo_indptr.copy_(indptr)

    def pages_of(self, pages: PageTable) -> PageTable:
        """Return the table of the rank's requests, of one that lists those of the caller."""
        if self._requests is None:
            return pages
        return pages.with_rows(pages.rows_of(self._requests))

    def _counted(self) -> tuple[Tensor, Tensor | None]:
        seq_lens, indptr, _ = self._batch
        if indptr is None:
            return self._shard.lens(seq_lens), None
        if not self.is_split:
            return self._shard.lens(seq_lens), indptr.clone()
        return self._split(seq_lens, indptr)

    def _split(self, seq_lens: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
        """Return lengths and offsets of query tokens as requests, and keep whose they are."""
        most, device = self._batch.max_q_len, indptr.device
        tokens = torch.arange(seq_lens.shape[0] * most, device=device)
        ends = indptr[1:].long().contiguous()
        _check_on_cpu(indptr, most)
        requests = torch.searchsorted(ends, tokens, right=True)
        requests = requests.clamp(max=max(seq_lens.shape[0] - 1, 0))
        seen = seq_lens.long()[requests] - (ends[requests] - tokens) + 1
        lens = self._shard.lens(seen.where(tokens < indptr[-1], 0))
        # A request with more tokens than max_q_len gets NaN, as a length beyond any table does.
        is_long = (indptr.diff() > most)[requests]
        lens = lens.masked_fill(is_long & (tokens < indptr[-1]), INT32_MAX)
        offsets = torch.arange(tokens.shape[0] + 1, dtype=torch.int32, device=device)
        offsets = torch.minimum(offsets, indptr[-1])
        offsets[-1:] = indptr[-1:]
        if self._requests is None:
            self._requests = requests
        else:
            self._requests.copy_(requests)
        return lens, offsets


def _check_on_cpu(indptr: Tensor, most: int) -> None:
    if indptr.device.type == "cpu":
        for request, q_len in enumerate(indptr.diff().tolist()):
            if q_len > most:
                raise ValueError(f"request {request} has {q_len} query tokens: max_q_len is {most}")
