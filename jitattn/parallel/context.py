"""``ContextParallel``: the tokens of each request lie over several devices.

Ranks take turns: the first ``interleave`` pages of a request are rank 0's, the next rank 1's, and
so on. Each rank has all KV heads of its tokens and its own part of the query heads.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, overload

from torch import Tensor

from jitattn.base.errors import ConfigError
from jitattn.base.validate import check_count, type_name
from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.common.planner_base import query_limit
from jitattn.kernels.mla.api import MLAPlanner
from jitattn.parallel.agreement import agree
from jitattn.parallel.exchange import Exchange
from jitattn.parallel.plan import ContextMLAPlan, ContextPlan, reasons_against
from jitattn.parallel.rows import GlobalBatch
from jitattn.spec.config import MAX_KV_LEN, MAX_PAGE_SIZE
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import BlockTable, SlotRows, check_page_table
from jitattn.tensors.shards import Shard
from jitattn.tensors.tensor_checks import INTEGERS, check_per_request, check_tensor, check_vector
from jitattn.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Arguments of a planner that may differ between ranks: no number and no message depends on them.
_OWN = ("early_kv", "kv_layout", "num_sms", "page_table")


class ContextParallel:
    """Ranks that share the KV tokens of each request. For one thread at a time.

    Every rank of the group makes one, as it would call any collective.

    Args:
        group: of torch.distributed; None is all processes. NCCL for tensors on cards; with gloo
            alone they travel through the CPU, and no graph can be captured.
        interleave: pages of a request that a rank keeps before it is the next one's turn.
        page_size: tokens of a page, that of the planners.
        timeout: how long ranks wait for each other to compare plans, where the group has no
            backend for the CPU; None is 10 minutes, as NCCL's. Elsewhere the group's counts.

    Attributes:
        rank: this process in the group.
        num_ranks: processes of the group.
        interleave: as given.
        page_size: as given.
        round_len: tokens after which it is the same rank's turn again.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        interleave: int = 1,
        page_size: int = 16,
        timeout: timedelta | None = None,
    ) -> None:
        """Join the group.

        Raises:
            ConfigError: torch.distributed is not initialised, or the group doesn't fit.
            TypeError, ValueError: another argument doesn't.
        """
        self.interleave = check_count("interleave", interleave, most=MAX_KV_LEN)
        self.page_size = check_count("page_size", page_size, most=MAX_PAGE_SIZE)
        self._exchange = Exchange(group, timeout)
        self.rank, self.num_ranks = self._exchange.rank, self._exchange.num_ranks
        block = self.interleave * self.page_size
        self._shard = Shard(num_ranks=self.num_ranks, rank=self.rank, block=block)
        self.round_len = self._shard.round_len

    def __repr__(self) -> str:
        """Show rank and blocks."""
        return (
            f"ContextParallel(rank {self.rank} of {self.num_ranks}, interleave={self.interleave}, "
            f"page_size={self.page_size})"
        )

    def local_lens(self, seq_lens: Tensor) -> Tensor:
        """Return how many tokens of each request this rank keeps, 0 where it has none.

        Args:
            seq_lens: int32 or int64 [batch_size], tokens of each request on all ranks.

        Returns:
            The same shape and dtype, on the device and without waiting for it.

        Raises:
            TypeError, ValueError: ``seq_lens`` doesn't fit.
        """
        check_vector("seq_lens", seq_lens, device=None)
        return self._shard.lens(seq_lens)

    def local_slots(self, slots: Tensor) -> Tensor:
        """Return where this rank keeps tokens, on the device and without waiting for it.

        Args:
            slots: int32 or int64, of any rank but 2: slots of single tokens over all ranks, page *
                page_size + place, as ``append_kv`` and ``preprocess_qkv`` take them; negative is
                none. Of rank 2, [rows, width], the slots of a ``TokenTable``.

        Returns:
            The slots at this rank. Of single tokens the same shape, -1 for those that other ranks
            keep, so that writing them skips these. Of a table [rows, fewer], this rank's tokens one
            after the other.

        Raises:
            TypeError: no tensor, or another dtype.
        """
        check_tensor("slots", slots, INTEGERS)
        if slots.dim() == 2:
            return SlotRows(slots).shard(self._shard, self.page_size).tensors[0]
        return self._shard.places(slots)

    @overload
    def local_table(self, table: Tensor) -> Tensor: ...
    @overload
    def local_table(self, table: PageTable) -> PageTable: ...
    def local_table(self, table: PageTable | Tensor) -> PageTable | Tensor:
        """Return the pages that this rank keeps, one after the other, as it numbers them.

        A page p of all ranks is page p // (num_ranks * interleave) * interleave + p % interleave of
        rank p // interleave % num_ranks. Page j of a request has to be one of rank j // interleave
        % num_ranks; an entry that isn't becomes -1, which no request can have.

        Args:
            table: of the pages of all ranks, any layout but ragged; or a tensor as ``BlockTable``
                takes it.

        Returns:
            A new table of the same layout, or a tensor, made on the device and without waiting for
            it: int32 [batch_size, at most as many pages as a rank has], -1 past the last.

        Raises:
            TypeError, ValueError: no table, or one without pages.
        """
        if isinstance(table, Tensor):
            return BlockTable(table).shard(self._shard, self.page_size).tensors[0]
        check_page_table(table, "table")
        return table.shard(self._shard, self.page_size)

    @overload
    def plan(
        self,
        planner: AttentionPlanner,
        local_pages: PageTable,
        seq_lens: Tensor,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> ContextPlan: ...
    @overload
    def plan(
        self,
        planner: MLAPlanner,
        local_pages: PageTable,
        seq_lens: Tensor,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> ContextMLAPlan: ...
    def plan(
        self,
        planner: AttentionPlanner | MLAPlanner,
        local_pages: PageTable,
        seq_lens: Tensor,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> ContextPlan | ContextMLAPlan:
        """Plan a batch on every rank, and compare the plans, once per step.

        Every rank calls it. The comparison is one small message on the host; nothing waits for the
        device.

        Args:
            planner: this rank's, with the query heads of all ranks and all KV heads. Without
                sinks, which ``run`` takes here, without window, custom mask and variant.
            local_pages: the pages of each request at this rank, as ``local_table`` returns them.
            seq_lens: int32 or int64 [batch_size], KV tokens of each request on all ranks, this
                step's included, and the same on every rank.
            qo_indptr: as of ``AttentionPlanner.plan``, of all ranks.
            max_q_len: likewise; at most 16 with ``causal``. Each query token is a request of its
                own there, so that keys are read once for each. Without ``causal`` any number.
            max_kv_len: likewise, on all ranks.

        Raises:
            ConfigError: on every rank, with the names of all that differs between ranks; or the
                planner has something that tokens on several ranks don't allow.
            TypeError, ValueError: an argument that doesn't fit the planner.
            ParallelError: on every other rank, when one refused; a rank is gone, or didn't come in
                time.
        """
        plan: ContextPlan | ContextMLAPlan | None = None
        error: Exception | None = None
        facts = {"interleave": str(self.interleave), "page_size": str(self.page_size)}
        try:
            facts |= _facts(planner)
            batch = self._checked_batch(planner, local_pages, seq_lens, qo_indptr, max_q_len)
            facts |= {
                "batch_size": str(seq_lens.shape[0]),
                "max_q_len": str(batch.max_q_len),
                "qo_indptr": "none" if qo_indptr is None else "given",
            }
            kind = ContextMLAPlan if isinstance(planner, MLAPlanner) else ContextPlan
            most = None if max_kv_len is None else self._shard.most(_length(max_kv_len))
            plan = kind(planner, self._exchange, self._shard, local_pages, batch, most)
        except Exception as raised:  # the others are told, whatever it is
            error = raised
        agree(self._exchange, facts, error)
        assert plan is not None
        return plan

    def _checked_batch(
        self,
        planner: AttentionPlanner | MLAPlanner,
        local_pages: PageTable,
        seq_lens: Tensor,
        qo_indptr: Tensor | None,
        max_q_len: int | None,
    ) -> GlobalBatch:
        reasons = reasons_against(planner.config, self.num_ranks, self.page_size)
        reasons += self._exchange.reasons_against(planner.device)
        if reasons:
            raise ConfigError(reasons)
        check_page_table(local_pages, "local_pages")
        check_per_request("seq_lens", seq_lens, local_pages.batch_size, planner.device)
        limit = query_limit(seq_lens.shape[0], planner.device, qo_indptr, max_q_len)
        return GlobalBatch(seq_lens, qo_indptr, limit)


def _facts(planner: object) -> dict[str, str]:
    """Return what numbers and messages depend on, of a planner.

    Raises:
        TypeError: no planner.
    """
    if not isinstance(planner, AttentionPlanner | MLAPlanner):
        raise TypeError(
            f"planner is a {type_name(planner)}: expected an AttentionPlanner or an MLAPlanner"
        )
    config = planner.config
    facts = {
        "jitattn": __version__,
        "planner": type(planner).__name__,
        "backend": planner.backend,
    }
    names = (field.name for field in fields(config) if field.name not in _OWN)
    return facts | {name: str(getattr(config, name)) for name in names}


def _length(max_kv_len: object) -> int:
    return min(check_count("max_kv_len", max_kv_len, least=0), MAX_KV_LEN)
