"""A batch whose tokens lie on several ranks: ``ContextPlan`` and ``ContextMLAPlan``.

A call gathers the queries of all ranks, attends them to this rank's tokens, returns each rank its
heads by all-to-all, and merges what came by lse, in the order of ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import check_flag
from jitattn.kernels.attention.api import AttentionPlanner, Plan
from jitattn.kernels.merge.api import merge_into
from jitattn.kernels.mla.api import MLACache, MLAPlan, MLAPlanner
from jitattn.kernels.mla.check import BoundMLACache
from jitattn.parallel.agreement import agree
from jitattn.parallel.exchange import Exchange
from jitattn.parallel.rows import GlobalBatch, LocalBatch
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.layout import LISTS
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import check_page_table
from jitattn.tensors.quantization import KVCache
from jitattn.tensors.shards import Shard
from jitattn.tensors.tensor_checks import check_rows, check_tensor, check_writable

MAX_Q_LEN = 16
"""The most causal query tokens of a request: each reads the keys anew."""

_SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LSE_BYTES, _TAIL_BYTES = 4, 16


class _Part(NamedTuple):
    """What a rank finds over its tokens, and where it lies to travel.

    Attributes:
        sent: uint8 [num_ranks, num_tokens, heads of a rank, bytes of a row].
        out: [num_tokens, heads of all ranks, dim], in `sent` where there is one token.
        lse: float32 [num_tokens, heads of all ranks], likewise.
    """

    sent: Tensor
    out: Tensor
    lse: Tensor


def _states_of(rows: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return outs and lse of rows of bytes, as views."""
    lse_at = dim * dtype.itemsize // _LSE_BYTES
    return rows.view(dtype)[..., :dim], rows.view(torch.float32)[..., lse_at]


class _ContextPlanBase:
    """What attention and latent attention have in common."""

    __slots__ = (
        "_exchange",
        "_heads",
        "_local",
        "_num_rows",
        "_pages",
        "_plan",
        "_planner",
        "_total",
    )

    def __init__(
        self,
        planner: AttentionPlanner | MLAPlanner,
        exchange: Exchange,
        shard: Shard,
        pages: PageTable,
        batch: GlobalBatch,
        max_kv_len: int | None,
    ) -> None:
        """Made by ``ContextParallel.plan``."""
        config = planner.config
        if config.causal and batch.max_q_len > MAX_Q_LEN:
            raise ValueError(
                f"max_q_len is {batch.max_q_len}: at most {MAX_Q_LEN} causal query tokens a "
                "request, since keys are read for each; attend a chunk of a prompt to earlier "
                "tokens with causal=False, to itself without ContextParallel, and merge_states both"
            )
        self._planner = planner
        self._exchange = exchange
        self._heads = config.num_qo_heads // exchange.num_ranks
        self._pages = pages
        self._total = batch.qo_indptr
        # Rows of q; with offsets they are the caller's choice, and ranks have to choose alike.
        self._num_rows = batch.seq_lens.shape[0] if batch.qo_indptr is None else None
        self._local = local = LocalBatch(batch, pages, shard, config.causal)
        self._plan: Any = planner.plan(
            local.pages,
            local.seq_lens,
            local.qo_indptr,
            max_q_len=local.max_q_len,
            max_kv_len=max_kv_len,
        )

    def refresh(self) -> None:
        """Recompute the schedule from the tensors the plan was given, on the current stream.

        Ranks do not wait for each other. Who captures this or ``run`` keeps the plan as long as the
        graph.

        Raises:
            ValueError: on the CPU, lengths that ``plan`` refuses.
        """
        self._local.refresh()
        self._plan.refresh()

    def _local_pages(self, pages: PageTable | None) -> PageTable | None:
        if pages is None:
            return self._local.pages_of(self._pages) if self._local.has_rows else None
        check_page_table(pages)
        return self._local.pages_of(pages)

    def _check_queries(self, name: str, q: Tensor, dim: int, num_tokens: int | None = None) -> None:
        dtype = self._planner.tensor_dtypes.q
        check_tensor(name, q, (dtype,))
        if num_tokens is None and self._total is None:
            num_tokens = self._num_rows
        if num_tokens is None:
            num_tokens = q.shape[0] if q.dim() else 0
        check_rows(name, q, (num_tokens, self._heads, dim), dtype, self._planner.device)

    def _agree_on_rows(self, num_tokens: int) -> None:
        """Compare rows of q before a plan's first run: messages of other sizes end processes."""
        if self._total is not None and num_tokens != self._num_rows:
            agree(self._exchange, {"the number of rows of q": str(num_tokens)}, None)
            self._num_rows = num_tokens

    def _gathered(self, q: Tensor) -> Tensor:
        """Return the queries of all heads, those of rank 0 first."""
        return self._exchange.gather(q).transpose(0, 1).flatten(1, 2)

    def _outputs(
        self, num_tokens: int, out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Check the tensors to write, or make them."""
        planner = self._planner
        shape = (num_tokens, self._heads, planner.out_row_shape[1])
        found = []
        for name, given, size, dtype in (
            ("out", out, shape, planner.tensor_dtypes.out),
            ("lse", lse, shape[:2], torch.float32),
        ):
            if given is not None:
                check_rows(name, given, size, dtype, planner.device)
                check_writable(name, given)
            found.append(
                torch.empty(size, dtype=dtype, device=planner.device) if given is None else given
            )
        return found[0], found[1]

    def _new_part(self, num_tokens: int) -> _Part:
        """Return memory for what this rank finds over its tokens."""
        planner, num_ranks, heads = self._planner, self._exchange.num_ranks, self._heads
        dim, dtype = planner.out_row_shape[1], planner.tensor_dtypes.out
        # An out and its lse lie in one row, whose begin is aligned: one message, and no copy before
        # the merge.
        row = dim * dtype.itemsize + _TAIL_BYTES
        sent = torch.empty(
            (num_ranks, num_tokens, heads, row), dtype=torch.uint8, device=planner.device
        )
        if num_tokens == 1:  # heads follow each other
            rows = sent.view(1, num_ranks * heads, row)
            return _Part(sent, *_states_of(rows, dim, dtype))
        shape = (num_tokens, num_ranks * heads, dim)
        out = torch.empty(shape, dtype=dtype, device=planner.device)
        return _Part(sent, out, torch.empty(shape[:2], dtype=torch.float32, device=planner.device))

    def _merge(self, part: _Part, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        """Give each rank its heads of what this one found, and merge what came back.

        Args:
            part: over this rank's tokens.
            out: [num_tokens, heads of this rank, dim]; written.
            lse: float32 [num_tokens, heads of this rank]; written.
            sinks: [heads of this rank], a state of its own without keys.
        """
        sent, dim, dtype = part.sent, part.out.shape[-1], part.out.dtype
        num_ranks, num_tokens, heads, row = sent.shape
        if num_tokens > 1:
            outs, lses = _states_of(sent, dim, dtype)
            outs.copy_(part.out.view(num_tokens, num_ranks, heads, dim).transpose(0, 1))
            lses.copy_(part.lse.view(num_tokens, num_ranks, heads).transpose(0, 1))
        came = sent.new_empty((num_ranks + (sinks is not None), num_tokens, heads, row))
        self._exchange.swap(sent, came[:num_ranks])
        outs, lses = _states_of(came, dim, dtype)
        if sinks is not None:
            outs[-1].zero_()
            lses[-1] = self._sink_lses(sinks, num_tokens)
        merge_into(outs, lses, out, lse)

    def _sink_lses(self, sinks: Tensor, num_tokens: int) -> Tensor:
        """Return a sink for each row of q that a request has, -inf for the others."""
        logits = sinks.float().expand(num_tokens, -1)
        if self._total is None:
            return logits
        rows = torch.arange(num_tokens, device=sinks.device)
        return logits.where((rows < self._total[-1])[:, None], -math.inf)


class ContextPlan(_ContextPlanBase):
    """A batch of an ``AttentionPlanner`` on several ranks. For one thread at a time."""

    __slots__ = ()

    _planner: AttentionPlanner
    _plan: Plan

    def run(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        *,
        pages: PageTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend this rank's query heads to the tokens of all ranks, on the current stream.

        Every rank calls it, layer by layer. Allocates what travels.

        Args:
            q: [num_tokens, num_qo_heads / num_ranks, head_dim], q_dtype: the heads of this rank,
                which are rank * num_qo_heads / num_ranks and following; as many rows on each rank.
            kv: this rank's tokens: from the planner's ``bind``, or a cache.
            pages: a table to read instead of the plan's, of the same layout and size.
            out: [num_tokens, num_qo_heads / num_ranks, head_dim_vo], out_dtype; allocated when
                None.
            lse: float32 [num_tokens, num_qo_heads / num_ranks]; filled when given.
            return_lse: return lse as well, allocated when None.
            sinks: [num_qo_heads / num_ranks], any float dtype: logits of this rank's heads that
                enter the denominator once, however many ranks there are.

        Returns:
            out, or (out, lse) with ``return_lse``, over the tokens of all ranks; as of
            ``Plan.run``. The same bits for the same tokens, however long ranks took.

        Raises:
            TypeError, ValueError: an argument that doesn't fit, on this rank; the others get a
                ParallelError when they have waited for as long as their group does.
            ConfigError: on every rank, rows of q differ between ranks in the first call.
            ParallelError: a rank failed or is gone.
        """
        check_flag("return_lse", return_lse)
        self._check_queries("q", q, self._planner.config.head_dim)
        if sinks is not None:
            check_tensor("sinks", sinks, _SINK_DTYPES)
            check_rows("sinks", sinks, (self._heads,), sinks.dtype, self._planner.device)
        out, lse = self._outputs(q.shape[0], out, lse)
        self._agree_on_rows(q.shape[0])
        part = self._new_part(q.shape[0])
        pages = self._local_pages(pages)
        self._plan.run(self._gathered(q), kv, pages=pages, out=part.out, lse=part.lse)
        self._merge(part, out, lse, sinks)
        return (out, lse) if return_lse else out


class ContextMLAPlan(_ContextPlanBase):
    """A batch of an ``MLAPlanner`` on several ranks. For one thread at a time."""

    __slots__ = ()

    _planner: MLAPlanner
    _plan: MLAPlan

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: BoundMLACache | MLACache,
        *,
        pages: PageTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend this rank's heads to the latents of all ranks, on the current stream.

        Every rank calls it, layer by layer. Allocates what travels.

        Args:
            q_nope: [num_tokens, num_heads / num_ranks, kv_lora_rank], q_dtype: the heads of this
                rank, which are rank * num_heads / num_ranks and following; as many rows on each.
            q_pe: [num_tokens, num_heads / num_ranks, qk_rope_head_dim], likewise.
            kv: this rank's latents: from the planner's ``bind``, or a cache.
            pages: a table to read instead of the plan's, of the same layout and size.
            out: [num_tokens, num_heads / num_ranks, kv_lora_rank], out_dtype; allocated when None.
            lse: float32 [num_tokens, num_heads / num_ranks]; filled when given.
            return_lse: return lse as well, allocated when None.

        Returns:
            out, or (out, lse) with ``return_lse``, over the tokens of all ranks; as of
            ``MLAPlan.run``. The same bits for the same tokens, however long ranks took.

        Raises:
            TypeError, ValueError: an argument that doesn't fit, on this rank; the others get a
                ParallelError when they have waited for as long as their group does.
            ConfigError: on every rank, rows of q differ between ranks in the first call.
            ParallelError: a rank failed or is gone.
        """
        check_flag("return_lse", return_lse)
        rank = self._planner.config.kv_lora_rank
        self._check_queries("q_nope", q_nope, rank)
        self._check_queries("q_pe", q_pe, self._planner.config.qk_rope_head_dim, q_nope.shape[0])
        out, lse = self._outputs(q_nope.shape[0], out, lse)
        self._agree_on_rows(q_nope.shape[0])
        q = self._gathered(torch.cat((q_nope, q_pe), dim=-1))
        part = self._new_part(q.shape[0])
        pages = self._local_pages(pages)
        self._plan.run(q[..., :rank], q[..., rank:], kv, pages=pages, out=part.out, lse=part.lse)
        self._merge(part, out, lse, None)
        return (out, lse) if return_lse else out


def reasons_against(config: PlannerConfig | MLAConfig, num_ranks: int, page_size: int) -> list[str]:
    """Why tokens of a planner can't lie on several ranks."""
    reasons = []
    if config.page_size != page_size:
        reasons.append(
            f"planner has page_size={config.page_size}: ContextParallel has page_size={page_size}"
        )
    if config.num_qo_heads % num_ranks:
        reasons.append(
            f"planner has {config.num_qo_heads} query heads: {num_ranks} ranks can't have equally "
            "many of them"
        )
    if config.page_table in LISTS:
        reasons.append(
            f"page_table={config.page_table} is refused: lists name tokens or pages of one pool"
        )
    if config.window_left >= 0:
        reasons.append(
            f"window_left={config.window_left} is refused: how many of a rank's tokens a window "
            "reaches depends on the length; a window fits one rank, so keep its layers whole"
        )
    if config.variant is not None:
        reasons.append("variant is refused: a kernel knows positions among a rank's tokens alone")
    if getattr(config, "use_custom_mask", False):
        reasons.append("use_custom_mask=True is refused: a mask is over the last keys of a request")
    if getattr(config, "use_sinks", False):
        reasons.append(
            "use_sinks=True is refused: every rank would count the sink; make the planner without "
            "and give sinks to run, which adds them once"
        )
    if getattr(config, "has_fp8_queries", False):
        reasons.append(
            f"q_dtype={config.q_dtype} is refused: queries travel in 16 bits; dequantise them"
        )
    out_dtype = config.kernel_out_dtype
    if out_dtype not in ("float16", "bfloat16", "float32"):
        reasons.append(f"out_dtype={out_dtype} is refused: merge_states doesn't take it")
    return reasons
