"""The pages that each KV head reads, by bounds of their scores: ``select_pages``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.errors import ConfigError
from jitattn.base.validate import INT32_MAX, check_count, type_name
from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import CallTensors, LaunchCache, new_call
from jitattn.kernels.common.page_lists import lengths_of, page_sources
from jitattn.kernels.common.value_checks import asks_for_checks, checking
from jitattn.kernels.select.launch import KernelCall, KernelCalls, new_params
from jitattn.kernels.select.params import ChoiceParams, PageScoresParams
from jitattn.kernels.select.query_rows import OfBatch, QueryBatch, check_batch, page_size_of
from jitattn.kernels.select.reference import select_pages_by_definition
from jitattn.kernels.select.spec import BOUND_DTYPES, ChoiceSpec, PageScoresSpec, SelectConfig
from jitattn.spec.dtype import DType
from jitattn.spec.layout import Layout
from jitattn.spec.params import FLOAT_CODES
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.tensor_checks import (
    check_device,
    check_last_stride,
    check_rows,
    check_tensor,
    check_writable,
    new_tensor,
)
from jitattn.tensors.token_lists import PageLists

_Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TORCH_DTYPES = tuple(dtype.torch_dtype for dtype in BOUND_DTYPES)
_CTAS_PER_SM = 8
_OUTPUTS = ("out[0]", "out[1]", "out[2]")  # pages, numbers and counts
_SCORES = "scores"


def select_pages(
    q: Tensor,
    bounds: Tensor,
    pages: PageTable,
    seq_lens: Tensor,
    k: int,
    *,
    page_size: int | None = None,
    max_kv_len: int | None = None,
    out: PageLists | None = None,
) -> PageLists:
    """List the k pages of each request and KV head whose keys may have the largest scores.

    A page counts by Quest's upper bound of its scores, ``sum over dims of max(q * least, q *
    largest)``, summed over the query heads of the KV head in float32. The first page and the last
    one are always listed, and all where there are no more than k. Equal bounds go to the earlier
    page; NaN is above all numbers. Two launches on the current stream, to be captured.

    Args:
        q: [batch_size, num_qo_heads, head_dim], the query token of each request; float16, bfloat16
            or float32, the last dimension contiguous.
        bounds: [num_pages, 2, num_kv_heads, head_dim], from ``page_bounds``; contiguous.
        pages: the pages of each request; a table of page ids that K and V share.
        seq_lens: int32 or int64 [batch_size], all tokens of each request; zero and less is none.
        k: entries of a list, at least 2: the first page and the last.
        page_size: tokens of a page; None is what ``page_bounds`` noted on ``bounds``.
        max_kv_len: the most tokens of a request; None is what the table has room for.
        out: what an earlier call of these sizes returned, to be written again.

    Returns:
        ``out``, or new lists: pages and their numbers in the request, int32 [batch_size,
        num_kv_heads, k], in ascending order and -1 behind counts, int32 [batch_size, num_kv_heads].

    Raises:
        TypeError, ValueError: an argument that doesn't fit. On the CPU also a request that is
            longer than its table or ``max_kv_len``, or has a page outside ``bounds``; on the
            device the bound of that page is NaN, and a request that is too long has the page
            2**31 - 1 alone, which attention answers with NaN.
        ConfigError: a head_dim that no kernel has.
    """
    if is_dynamo_compiling():
        from jitattn.kernels.select.torch_op import trace_pages

        traced = q, bounds, pages, seq_lens, k, page_size, max_kv_len, out
        return trace_pages(SelectPagesCall(*traced))
    found = page_size_of("bounds", bounds, page_size)
    given = q, bounds, pages, seq_lens, k, found, max_kv_len, out
    return LAUNCHES.run(new_call(SelectPagesCall, given))


class SelectPagesCall(NamedTuple):
    """The arguments of ``select_pages``, as they were given; the page size as it is known."""

    q: Tensor
    bounds: Tensor
    pages: PageTable
    seq_lens: Tensor
    k: int
    page_size: int | None
    max_kv_len: int | None
    out: PageLists | None


@dataclass(frozen=True, slots=True)
class _Call(OfBatch):
    """The arguments, checked."""

    q: Tensor
    bounds: Tensor
    k: int
    batch: QueryBatch
    out: PageLists | None

    @property
    def max_pages(self) -> int:
        """The most pages of a request."""
        return -(-self.batch.max_kv_len // self.batch.page_size)

    @property
    def num_kv_heads(self) -> int:
        return int(self.bounds.shape[2])

    def new_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for pages, numbers and counts."""
        shape = self.batch.batch_size, self.num_kv_heads, self.k
        return (
            new_tensor("k", shape, torch.int32, self.device),
            new_tensor("k", shape, torch.int32, self.device),
            torch.empty(shape[:2], dtype=torch.int32, device=self.device),
        )

    def new_scores(self) -> Tensor:
        """Return memory for the bound of every page."""
        shape = self.batch.batch_size, self.num_kv_heads, self.max_pages
        return new_tensor("max_kv_len", shape, torch.float32, self.device)


def _check(call: SelectPagesCall) -> _Call:
    q, bounds = call.q, call.bounds
    check_tensor("q", q, _Q_DTYPES)
    check_tensor("bounds", bounds, _TORCH_DTYPES)
    if q.dim() != 3:
        raise ValueError(
            f"q has shape {list(q.shape)}: expected [batch_size, num_qo_heads, head_dim]"
        )
    if bounds.dim() != 4 or bounds.shape[1] != 2 or bounds.shape[3] != q.shape[2]:
        raise ValueError(
            f"bounds has shape {list(bounds.shape)}: expected [num_pages, 2, num_kv_heads, "
            f"{q.shape[2]}], head_dim as q has"
        )
    if bounds.shape[2] == 0 or q.shape[1] == 0 or q.shape[1] % bounds.shape[2]:
        raise ValueError(
            f"q has {q.shape[1]} heads: expected a multiple of the {bounds.shape[2]} KV heads of "
            "bounds"
        )
    if not bounds.is_contiguous():
        raise ValueError(
            f"bounds has strides {list(bounds.stride())}: expected a contiguous tensor, as "
            "page_bounds returns it"
        )
    check_last_stride("q", q)
    if call.page_size is None:
        raise ValueError("page_size is None: bounds are not what page_bounds returned")
    config = SelectConfig(
        kernel="select_pages", kv_dtype=DType.of(bounds.dtype).value, head_dim=q.shape[2]
    )
    if reasons := config.reasons():
        raise ConfigError(reasons)
    k = check_count("k", call.k, least=2, most=INT32_MAX)
    batch = check_batch(
        call.pages,
        call.seq_lens,
        None,
        max_q_len=None,
        max_kv_len=call.max_kv_len,
        num_tokens=q.shape[0],
        page_size=call.page_size,
        without=(Layout.SEPARATE, Layout.TOKEN),
    )
    check_device("q", q, batch.device)
    check_device("bounds", bounds, batch.device)
    checked = _Call(q, bounds, k, batch, call.out)
    if call.out is not None:
        _check_out(call.out, checked)
    return checked


def _check_out(out: object, call: _Call) -> None:
    if not isinstance(out, PageLists):
        raise TypeError(f"out is a {type_name(out)}: expected PageLists")
    if out.counts is None:
        raise ValueError("out has no counts: how many pages are chosen is written there")
    shape = call.batch.batch_size, call.num_kv_heads, call.k
    check_rows("out.pages", out.pages, shape, torch.int32, call.device)
    names = ("out.pages", "out.numbers", "out.counts")
    for name, tensor in zip(names, out.tensors, strict=True):
        check_writable(name, tensor)
    read = [("q", call.q), ("bounds", call.bounds)]
    read += [("pages", tensor) for tensor in call.batch.pages.tensors]
    refuse_shared_bytes([*zip(names, out.tensors, strict=True)], read)


def _define(call: _Call) -> PageLists:
    lists = call.new_out()
    select_pages_by_definition(call.q, call.bounds, call.k, call.batch, lists)
    if call.out is None:
        return PageLists(*lists)
    for target, found in zip(call.out.tensors, lists, strict=True):
        target.copy_(found)
    return call.out


class _Launcher:
    """Launches for calls whose tensors lie alike: a kernel that scores, and one that chooses."""

    def __init__(self, call: _Call, given: CallTensors, card: int) -> None:
        self._new_out, self._new_scores = call.new_out, call.new_scores
        self._checks = asks_for_checks()
        self._calls = KernelCalls(given, (*_OUTPUTS, _SCORES))
        self._add_scores(call, card)
        self._add_choice(call, card)

    def _add_scores(self, call: _Call, card: int) -> None:
        batch = call.batch
        dtype = DType.of(call.bounds.dtype)
        spec = PageScoresSpec(kv_dtype=dtype, head_dim=call.q.shape[2])
        call_params = new_params(PageScoresParams)
        params = call_params.struct
        params.pages = batch.pages.page_list(batch.page_size)
        params.seq_lens = lengths_of(batch.seq_lens)
        params.q_token_stride, params.q_head_stride = call.q.stride()[:2]
        params.num_pages = call.bounds.shape[0]
        strides = call.bounds.stride()
        params.bounds_stride, params.bounds_side_stride, params.bounds_head_stride = strides[:3]
        params.q_code = FLOAT_CODES[DType.of(call.q.dtype).value]
        params.num_kv_heads = call.num_kv_heads
        params.group_size = call.q.shape[1] // call.num_kv_heads
        params.max_pages = call.max_pages
        rows = batch.batch_size * call.num_kv_heads
        wanted = max(1, _CTAS_PER_SM * device_kernels.num_sms(card) // max(rows, 1))
        params.chunk_pages = max(32, -(-call.max_pages // wanted))
        params.num_chunks = -(-call.max_pages // params.chunk_pages)
        sources: dict[str, str | tuple[str, int] | None] = {
            **{name: name for name in ("q", "bounds", _SCORES)},
            "seq_lens.values": "seq_lens",
            **page_sources("pages", batch.pages),
        }
        call_params.connect(sources, self._calls.names)
        self._calls.add(KernelCall(spec, card, call_params, rows * params.num_chunks))

    def _add_choice(self, call: _Call, card: int) -> None:
        batch = call.batch
        call_params = new_params(ChoiceParams)
        params = call_params.struct
        batch.fill(params.rows)
        params.pages = batch.pages.page_list(batch.page_size)
        params.scores_stride, params.k = call.max_pages, call.k
        params.num_kv_heads = call.num_kv_heads
        lists = call.num_kv_heads * call.k, call.k
        strides = lists, lists, (call.num_kv_heads, 1)
        if call.out is not None:
            strides = tuple(tensor.stride()[:2] for tensor in call.out.tensors)  # type: ignore[assignment]
        (
            (params.entries_stride, params.entries_head_stride),
            (params.numbers_stride, params.numbers_head_stride),
            (params.counts_stride, params.counts_head_stride),
        ) = strides
        sources = {
            "scores": _SCORES,
            **dict(zip(("entries", "numbers", "counts"), _OUTPUTS, strict=True)),
            **batch.sources(),
        }
        call_params.connect(sources, self._calls.names)
        grid = batch.batch_size * call.num_kv_heads
        self._calls.add(KernelCall(ChoiceSpec(chooses_pages=True), card, call_params, grid))

    def __call__(self, call: SelectPagesCall, tensors: list[Tensor]) -> PageLists:
        """Launch for these, which lie like those it was made with."""
        if self._checks and not device_kernels.is_capturing(call.q.device):
            _verify(call)
        scores = self._new_scores()
        if call.out is not None:
            self._calls.launch(tensors, (scores,))
            return call.out
        new = self._new_out()
        self._calls.launch(tensors, (*new, scores))
        return PageLists(*new)


def _verify(call: SelectPagesCall) -> None:
    """Refuse pages that are nowhere."""
    with checking():
        checked = _check(call)
        batch = checked.batch.to_cpu()
        for request, _, _, kv_len in batch.on_cpu():
            batch.known_slots(request, kv_len, checked.bounds.shape[0])


LAUNCHES = LaunchCache(_check, _define, _Launcher)
