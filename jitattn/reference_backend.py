"""Run a plan by the definition, in float64 torch, on any device."""

from __future__ import annotations

import math

from torch import Tensor

from jitattn.binding import BoundCache
from jitattn.config import PlannerConfig
from jitattn.pages import BlockTable
from jitattn.reference import attention, first_visible, gather


class ReferencePlan:
    """Plans and runs by the definition, in float64 torch."""

    def __init__(
        self,
        config: PlannerConfig,
        sm_scale: float,
        pages: BlockTable,
        seq_lens: Tensor,
        limit: int,
    ) -> None:
        self._config = config
        self._sm_scale = sm_scale
        self._seq_lens = seq_lens
        self._limit = limit
        self._lens: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the lengths; on the CPU, refuse those beyond the table.

        Raises:
            ValueError: a length on the CPU that the table can't hold.
        """
        lens = [int(n) for n in self._seq_lens.tolist()]
        if self._seq_lens.device.type == "cpu":
            for b, kv_len in enumerate(lens):
                if kv_len > self._limit:
                    raise ValueError(
                        f"seq_lens[{b}] is {kv_len}: the table or max_kv_len ends at {self._limit}"
                    )
        self._lens = lens

    def run(
        self,
        q: Tensor,
        kv: BoundCache,
        pages: BlockTable,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Compute a call that was checked."""
        table = pages.table if pages.rows is None else pages.table[pages.rows.long()]
        for b, kv_len in enumerate(self._lens):
            if kv_len > self._limit:
                out[b] = math.nan
                if lse is not None:
                    lse[b] = math.nan
                continue
            row_out, row_lse = self._attend(q[b : b + 1], kv, table[b], max(kv_len, 0), sinks)
            out[b] = row_out[0].to(out.dtype)
            if lse is not None:
                lse[b] = row_lse[0].to(lse.dtype)

    def _attend(
        self, q: Tensor, kv: BoundCache, row: Tensor, kv_len: int, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        k_ids, v_ids = (row, row) if row.dim() == 1 else (row[0], row[1])
        start = first_visible(kv_len, 1, self._config.window_left)
        return attention(
            q,
            gather(kv.k.tensor, k_ids, kv_len, start=start),
            gather(kv.v.tensor, v_ids, kv_len, start=start),
            [0, 1],
            [0, kv_len],
            causal=self._config.causal,
            window_left=self._config.window_left,
            logits_soft_cap=self._config.logits_soft_cap,
            sm_scale=self._sm_scale,
            sinks=sinks,
        )
