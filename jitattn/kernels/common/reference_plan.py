"""Plans of the reference backend: one request after the other, by a definition in float64 torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from jitattn.spec.config import PagedConfig
from jitattn.tensors.page_table_base import PageTable, PlannedTable
from jitattn.tensors.tensor_checks import check_indptr
from jitattn.tensors.tensor_layouts import Batch
from jitattn.tensors.token_lists import IndexLists, TokenLists

if TYPE_CHECKING:
    from jitattn.kernels.common.kernel_loader import KernelInfo


class _Cache(Protocol):
    @property
    def pools(self) -> Mapping[str, int]: ...


class _Call(Protocol):
    """What of a call doesn't depend on the planner's kind."""

    @property
    def pages(self) -> PlannedTable: ...

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
            ValueError: on the CPU, a length that is too long, or offsets that don't rise from 0.
        """
        batch = self._batch
        if batch.qo_indptr is not None:
            check_indptr("qo_indptr", batch.qo_indptr)
        lens = self._read_lens()
        starts = list(range(len(lens) + 1))
        if batch.qo_indptr is not None:
            starts = [int(n) for n in batch.qo_indptr.tolist()]
        wrongs = [
            self._what_is_planned_wrong(b, kv_len, max(starts[b + 1] - starts[b], 0))
            for b, kv_len in enumerate(lens)
        ]
        self._raise_on_cpu(wrongs)
        self.lens, self._starts = lens, starts
        self._is_invalid = [bool(wrong) for wrong in wrongs]

    def _read_lens(self) -> list[int]:
        lens = self._batch.seq_lens
        assert lens is not None  # but for lists
        return [max(int(n), 0) for n in lens.tolist()]

    def _what_is_planned_wrong(self, request: int, kv_len: int, q_len: int) -> str:
        """Say which length of a request exceeds what was planned, or nothing."""
        batch, page_size = self._batch, self.config.page_size or 1
        table = cast(PageTable, batch.pages)
        limit = max(min(batch.max_kv_len, table.request_capacity(request, page_size)), 0)
        if kv_len > limit:
            return f"seq_lens[{request}] is {kv_len}: the table or max_kv_len ends at {limit}"
        if q_len > batch.max_q_len:
            return f"request {request} has {q_len} query tokens: max_q_len is {batch.max_q_len}"
        return ""

    def _what_is_read_wrong(self, call: CallT, request: int) -> str:
        """Say what lies outside the cache of all that a request reads, or nothing."""
        kv_len, q_len = self.lens[request], self._q_len(request)
        pages = cast(PageTable, call.pages)
        return what_is_read_wrong(pages, call.kv.pools, self.config, request, kv_len, q_len)

    def _raise_on_cpu(self, wrongs: list[str]) -> None:
        if self._batch.pages.device.type == "cpu":
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
        wrongs = [self._what_is_read_wrong(call, b) for b in range(len(self.lens))]
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


class ListReferencePlan(ReferencePlan[ConfigT, CallT]):
    """The same of lists: what is listed beyond the cache is not read, and makes NaN of its rows."""

    def _read_lens(self) -> list[int]:
        """Return lengths, or the entries of lists that have none; both count those of the plan."""
        lists = cast(TokenLists, self._batch.pages)
        self.counts = [_longest(lists, b) for b in range(lists.batch_size)]
        return self.counts if self._batch.seq_lens is None else super()._read_lens()

    def _what_is_planned_wrong(self, request: int, kv_len: int, q_len: int) -> str:
        batch = self._batch
        if kv_len > batch.max_kv_len:
            return f"seq_lens[{request}] is {kv_len}: max_kv_len is {batch.max_kv_len}"
        if q_len > batch.max_q_len:
            return f"request {request} has {q_len} query tokens: max_q_len is {batch.max_q_len}"
        return ""

    def _what_is_read_wrong(self, call: CallT, request: int) -> str:
        lists = cast(TokenLists, call.pages)
        if _longest(lists, request) > self.counts[request] and self.lens[request] > 0:
            return f"list {request} has more entries than that of the plan"
        return ""

    def _raise_on_cpu(self, wrongs: list[str]) -> None:
        if not any("entries" in wrong for wrong in wrongs):
            super()._raise_on_cpu(wrongs)


def _longest(lists: TokenLists, index: int) -> int:
    heads = 1 if lists.counts is None or lists.counts.dim() == 1 else lists.counts.shape[1]
    return max((lists.count_of(index, head) for head in range(heads)), default=0)


def listed_slots(pages: PlannedTable, token: int, kv_head: int, num_slots: int) -> Tensor | None:
    """Return the slots of a list of tokens; None where one is beyond ``num_slots``."""
    slots = cast(IndexLists, pages).entries(token, kv_head=kv_head)
    return None if bool((slots >= num_slots).any()) else slots


def tokens_of_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Copy tokens [num_slots, ...] out of a cache [num_pages, page_size, ...]."""
    page_size = cache.shape[1]
    return chosen(cache, (slots // page_size, slots % page_size))


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

    def of(self, config: ConfigT) -> ReferenceKernels[ConfigT, PlanT]:
        """Return the same of another configuration."""
        return ReferenceKernels(config, self._make_plan)

    def infos(self) -> list[KernelInfo]:
        """Return nothing: there are no kernels."""
        return []


def what_is_read_wrong(
    pages: PageTable,
    pools: Mapping[str, int],
    config: PagedConfig,
    request: int,
    kv_len: int,
    q_len: int,
) -> str:
    """Say what lies outside the cache of all that a request reads, or nothing.

    Args:
        pages: the table that is read.
        pools: names of the caches, and how many pages each has.
        config: of the planner.
        request: a row of ``pages``.
        kv_len: its tokens.
        q_len: its queries.
    """
    if kv_len == 0 or q_len == 0:
        return ""
    page_size = config.page_size or 1
    num_kv_tokens = next(iter(pools.values()))
    limit = pages.request_capacity(request, page_size, num_kv_tokens=num_kv_tokens)
    if kv_len > limit:
        return f"request {request} has {kv_len} tokens: pages and kv hold {max(limit, 0)} of them"
    try:
        pages.check_row(request)
    except ValueError as error:
        return str(error)
    size = pages.entry_tokens(page_size)
    start = first_visible(kv_len, q_len, config.window_left)
    for which, (name, num_pages) in enumerate(pools.items()):
        entries = pages.entries(request, which=which)[start // size : -(-kv_len // size)]
        end = num_pages * page_size // size
        wrong = entries[(entries < 0) | (entries >= end)]
        if wrong.numel() > 0:
            entry = int(wrong[0])
            return f"request {request} has the entry {entry} for {name}: the cache ends at {end}"
    return ""


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


def gather_tokens(
    cache: Tensor, pages: PageTable, request: int, kv_len: int, start: int, *, which: int
) -> Tensor:
    """Copy the tokens of a request out of K (``which`` 0) or V (1)."""
    slots = pages.slots_of(request, kv_len, cache.shape[1], which=which)
    return _gather_slots(cache, slots, start)


def _gather_slots(cache: Tensor, slots: Tensor, start: int) -> Tensor:
    """Copy tokens; those before ``start`` are NaN, or the largest number of a type without."""
    page_size = cache.shape[1]
    nothing = math.nan if cache.dtype.is_floating_point else torch.iinfo(cache.dtype).max
    tokens = cache.new_full((slots.shape[0], *cache.shape[2:]), nothing)
    live = slots[start:]
    tokens[start:] = chosen(cache, (live // page_size, live % page_size))
    return tokens
