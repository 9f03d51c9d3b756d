"""Run a plan by the definition, in float64 torch, on any device."""

from __future__ import annotations

import math

from torch import Tensor

from jitattn.binding import BoundCache
from jitattn.config import PlannerConfig
from jitattn.pages import BlockTable, CsrPages, Pages, RaggedKV, TokenTable
from jitattn.reference import attention, first_visible, gather


class ReferencePlan:
    """Plans and runs by the definition, in float64 torch."""

    def __init__(
        self,
        config: PlannerConfig,
        sm_scale: float,
        pages: Pages,
        seq_lens: Tensor,
        limit: int,
    ) -> None:
        self._config = config
        self._sm_scale = sm_scale
        self._seq_lens = seq_lens
        self._pages = pages
        self._limit = limit
        self._limits: list[int] = []
        self._lens: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the lengths; on the CPU, refuse those beyond the table.

        Raises:
            ValueError: a length on the CPU that the table can't hold.
        """
        lens = [max(int(n), 0) for n in self._seq_lens.tolist()]
        self._limits = [min(self._limit, self._entries(b)) for b in range(len(lens))]
        if self._seq_lens.device.type == "cpu":
            for b, (kv_len, limit) in enumerate(zip(lens, self._limits, strict=True)):
                if kv_len > limit:
                    raise ValueError(
                        f"seq_lens[{b}] is {kv_len}: the table or max_kv_len ends at {limit}"
                    )
        self._lens = lens

    def _entries(self, request: int) -> int:
        """The most tokens that ``kv_indptr`` allows a request."""
        pages = self._pages
        if not isinstance(pages, CsrPages | RaggedKV):
            return self._limit
        begin, end = (int(n) for n in pages.kv_indptr[request : request + 2])
        if isinstance(pages, RaggedKV):
            return end - begin
        return (min(end, pages.kv_indices.shape[0]) - begin) * (self._config.page_size or 1)

    def run(
        self,
        q: Tensor,
        kv: BoundCache,
        pages: Pages,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Compute a call that was checked."""
        for b, kv_len in enumerate(self._lens):
            if kv_len > self._limits[b]:
                out[b] = math.nan
                if lse is not None:
                    lse[b] = math.nan
                continue
            row_out, row_lse = self._attend(q[b : b + 1], kv, pages, b, sinks)
            out[b] = row_out[0].to(out.dtype)
            if lse is not None:
                lse[b] = row_lse[0].to(lse.dtype)

    def _attend(
        self, q: Tensor, kv: BoundCache, pages: Pages, request: int, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kv_len = self._lens[request]
        start = first_visible(kv_len, 1, self._config.window_left)
        return attention(
            q,
            _gather(kv.k.tensor, pages, request, kv_len, start, which=0),
            _gather(kv.v.tensor, pages, request, kv_len, start, which=1),
            [0, 1],
            [0, kv_len],
            causal=self._config.causal,
            window_left=self._config.window_left,
            logits_soft_cap=self._config.logits_soft_cap,
            sm_scale=self._sm_scale,
            sinks=sinks,
        )


def _gather(
    cache: Tensor, pages: Pages, request: int, kv_len: int, start: int, *, which: int
) -> Tensor:
    """Copy the tokens of a request out of K (``which`` 0) or V (1)."""
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
    tokens = cache.new_full((kv_len, *cache.shape[2:]), math.nan)
    live = slots[start:kv_len].long()
    tokens[start:] = cache[live // page_size, live % page_size]
    return tokens
