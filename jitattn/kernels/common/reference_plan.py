"""Plans of the reference backend: one request after the other, by a definition in float64 torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from jitattn.kernels.common.reference_pages import (
    entries_of,
    first_visible,
    most_tokens,
)
from jitattn.spec.config import MAX_KV_LEN, PagedConfig
from jitattn.tensors.cache_views import Batch
from jitattn.tensors.page_tables import BlockTable, Pages, TokenTable

if TYPE_CHECKING:
    from jitattn.kernels.common.kernel_loader import KernelInfo


class _Cache(Protocol):
    @property
    def pools(self) -> Mapping[str, int]: ...


class _Call(Protocol):
    """What of a call doesn't depend on the planner's kind."""

    @property
    def pages(self) -> Pages: ...

    @property
    def kv(self) -> _Cache: ...

    @property
    def out(self) -> Tensor: ...

    @property
    def lse(self) -> Tensor | None: ...


ConfigT = TypeVar("ConfigT", bound=PagedConfig)
CallT = TypeVar("CallT", bound=_Call)


class ReferencePlan(Generic[ConfigT, CallT]):
    """Plans and runs one request after the other, each by a definition."""

    def __init__(self, config: ConfigT, batch: Batch, *, queries: str) -> None:
        """Plan ``batch``; ``queries`` is what errors call its queries."""
        self._queries = queries
        self.config = config
        self._batch = batch
        self.lens: list[int] = []
        self._starts: list[int] = []
        self._is_invalid: list[bool] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the lengths and offsets; on the CPU, refuse those beyond the table or the maxima.

        Raises:
            ValueError: a length on the CPU that is too long.
        """
        batch = self._batch
        lens = [max(int(n), 0) for n in batch.seq_lens.tolist()]
        starts = list(range(len(lens) + 1))
        if batch.qo_indptr is not None:
            starts = [int(n) for n in batch.qo_indptr.tolist()]
        wrongs = [
            _what_is_wrong(batch, self.config, b, kv_len, max(starts[b + 1] - starts[b], 0))
            for b, kv_len in enumerate(lens)
        ]
        self._raise_on_cpu(wrongs)
        self.lens, self._starts = lens, starts
        self._is_invalid = [bool(wrong) for wrong in wrongs]

    def _raise_on_cpu(self, wrongs: list[str]) -> None:
        if self._batch.seq_lens.device.type == "cpu":
            for wrong in filter(None, wrongs):
                raise ValueError(wrong)

    def _q_len(self, request: int) -> int:
        return max(self._starts[request + 1] - self._starts[request], 0)

    def give_back(self) -> None:
        """Nothing is kept."""

    @torch.no_grad()
    def run(self, call: CallT) -> None:
        """Compute a call that was checked.

        Raises:
            ValueError: q has fewer rows than the requests have query tokens, or, on the CPU, an
                entry or an offset lies outside the cache.
        """
        if call.out.shape[0] < self._starts[-1]:
            raise ValueError(
                f"{self._queries} has {call.out.shape[0]} rows: qo_indptr[-1] is {self._starts[-1]}"
            )
        wrongs = [
            _what_is_read_wrong(call, self.config, b, kv_len, self._q_len(b))
            for b, kv_len in enumerate(self.lens)
        ]
        self._raise_on_cpu(wrongs)
        call.out[self._starts[-1] :] = 0.0
        if call.lse is not None:
            call.lse[self._starts[-1] :] = -math.inf
        for b in range(len(self.lens)):
            rows = slice(self._starts[b], self._starts[b] + self._q_len(b))
            if self._is_invalid[b] or wrongs[b]:
                out = lse = math.nan
            else:
                out, lse = self._attend(call, rows, b)  # type: ignore[assignment]
            call.out[rows] = out
            if call.lse is not None:
                call.lse[rows] = lse

    def replay_of(self, call: CallT) -> None:
        """Nothing is prepared."""
        del call

    def _attend(self, call: CallT, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        """Return out and lse of the rows of a request."""
        raise NotImplementedError


PlanT = TypeVar("PlanT", covariant=True)


class ReferenceKernels(Generic[ConfigT, PlanT]):
    """What plans batches for the reference backend; see ``Kernels`` of planner_base."""

    def __init__(self, config: ConfigT, make_plan: Callable[[ConfigT, Batch], PlanT]) -> None:
        """Make plans by calling ``make_plan``."""
        self._config = config
        self._make_plan = make_plan

    def bind(self, kv: object, v: object = None, blocks: object = None, /) -> tuple[None, None]:
        """Return neither kernels nor tensor maps, whatever the parts of a cache."""
        del kv, v, blocks
        return None, None

    def plan(self, workspace: object, batch: Batch) -> PlanT:
        """Return a plan of ``batch``."""
        del workspace
        return self._make_plan(self._config, batch)

    plan_for_call = plan

    def plan_bytes(self, batch_size: int, max_q_len: int) -> int:
        """Return 0: nothing is on a device."""
        del batch_size, max_q_len
        return 0

    def infos(self) -> list[KernelInfo]:
        """Return nothing: there are no kernels."""
        return []


def _what_is_wrong(batch: Batch, config: PagedConfig, request: int, kv_len: int, q_len: int) -> str:
    """Say which length of a request exceeds what was planned, or nothing."""
    page_size = config.page_size or 1
    limit = min(batch.max_kv_len, most_tokens(batch.pages, request, page_size, MAX_KV_LEN))
    if kv_len > max(limit, 0):
        return f"seq_lens[{request}] is {kv_len}: the table or max_kv_len ends at {max(limit, 0)}"
    if q_len > batch.max_q_len:
        return f"request {request} has {q_len} query tokens: max_q_len is {batch.max_q_len}"
    return ""


def _what_is_read_wrong(
    call: _Call, config: PagedConfig, request: int, kv_len: int, q_len: int
) -> str:
    """Say what lies outside the cache of all that a request reads, or nothing."""
    if kv_len == 0 or q_len == 0:
        return ""
    pages, page_size = call.pages, config.page_size or 1
    pools = call.kv.pools
    limit = most_tokens(pages, request, page_size, next(iter(pools.values())))
    if kv_len > limit:
        return f"request {request} has {kv_len} tokens: pages and kv hold {max(limit, 0)} of them"
    if isinstance(pages, BlockTable | TokenTable) and pages.rows is not None:
        num_rows = (pages.table if isinstance(pages, BlockTable) else pages.slots).shape[0]
        if not 0 <= int(pages.rows[request]) < num_rows:
            return f"rows[{request}] is {int(pages.rows[request])}: the table has {num_rows} rows"
    start = first_visible(kv_len, q_len, config.window_left)
    for which, (name, num_pages) in enumerate(pools.items()):
        entries, size = entries_of(pages, request, start, kv_len, page_size, which)
        end = num_pages * size
        wrong = entries[(entries < 0) | (entries >= end)]
        if wrong.numel() > 0:
            entry = int(wrong[0])
            return f"request {request} has the entry {entry} for {name}: the cache ends at {end}"
    return ""
