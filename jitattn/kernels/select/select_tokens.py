"""The largest logits of each query token, as the slots that attention reads: ``select_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import INT32_MAX, check_count, type_name
from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import CallTensors, LaunchCache, new_call
from jitattn.kernels.common.value_checks import asks_for_checks, checking
from jitattn.kernels.select.launch import KernelCall, KernelCalls, new_params
from jitattn.kernels.select.params import ChoiceParams
from jitattn.kernels.select.query_rows import OfBatch, QueryBatch, check_batch, page_size_of
from jitattn.kernels.select.reference import select_tokens_by_definition
from jitattn.kernels.select.spec import ChoiceSpec
from jitattn.spec.config import MAX_KV_LEN
from jitattn.spec.layout import Layout
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import is_page_table
from jitattn.tensors.tensor_checks import (
    check_device,
    check_last_stride,
    check_rows,
    check_tensor,
    check_writable,
    new_tensor,
)
from jitattn.tensors.token_lists import IndexLists

_VECTOR_BYTES = 16


def select_tokens(
    logits: Tensor,
    pages: PageTable,
    seq_lens: Tensor,
    k: int,
    qo_indptr: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    page_size: int | None = None,
    out: IndexLists | None = None,
) -> IndexLists:
    """List the k tokens with the largest logits of each query token, exactly.

    Slots are in ascending order of position, and all tokens are listed where a query token sees no
    more than k. Equal logits, 0 and -0 among them, go to the earlier token; NaN is above all
    numbers; a token whose logit is -inf is not seen. One launch on the current stream, to be
    captured, that waits for nothing and needs no memory besides its output.

    Args:
        logits: float32 [num_tokens, max_kv_len], one row for each query token, by position; rows
            contiguous, at any stride. What a query token doesn't see may hold anything.
        pages: the pages of each request, or its slots; one slot a token, so no separate ids.
        seq_lens: int32 or int64 [batch_size], all tokens of each request; zero and less is none.
        k: entries of a list, at least 1.
        qo_indptr: int32 [batch_size + 1], where the query tokens of each request begin in
            ``logits``; None: one each. They are the last ones of their requests.
        max_q_len: the most query tokens of a request; needed with ``qo_indptr``.
        page_size: tokens of a page. None is what ``index_logits`` noted on ``logits``; of other
            logits, the quotient of their width and a table's, which has to be whole.
        out: what an earlier call of these sizes returned, to be written again.

    Returns:
        ``out``, or new lists: slots int32 [num_tokens, k], -1 behind counts int32 [num_tokens].
        Rows behind qo_indptr[-1] have none.

    Raises:
        TypeError, ValueError: an argument that doesn't fit. On the CPU also a request that is
            longer than its table or ``logits``, that has more query tokens than ``max_q_len``, or
            a chosen token without a page; on the device its entry, or the only one of its list, is
            2**31 - 1, which attention answers with NaN.
    """
    if is_dynamo_compiling():
        from jitattn.kernels.select.torch_op import trace_tokens

        traced = logits, pages, seq_lens, k, qo_indptr, max_q_len, page_size, out
        return trace_tokens(SelectTokensCall(*traced))
    found = _page_size(logits, pages, page_size)
    given = logits, pages, seq_lens, k, qo_indptr, max_q_len, found, out
    return LAUNCHES.run(new_call(SelectTokensCall, given))


def _page_size(logits: object, pages: object, page_size: object) -> int:
    found = page_size_of("logits", logits, page_size)
    if found is not None:
        return found
    if not is_page_table(pages) or not pages.layout.lists_pages:
        return 1  # slots are entries of the table, or the table is refused
    width = logits.shape[-1] if isinstance(logits, Tensor) and logits.dim() else 0
    columns = 0 if pages.layout.has_offsets else pages.capacity(1)
    if not columns or width % columns or width < columns:
        raise ValueError(
            "page_size is None: logits are not from index_logits, and their width is no multiple "
            "of a table's: give the tokens of a page"
        )
    return width // columns


class SelectTokensCall(NamedTuple):
    """The arguments of ``select_tokens``, as they were given; the page size as it is known."""

    logits: Tensor
    pages: PageTable
    seq_lens: Tensor
    k: int
    qo_indptr: Tensor | None
    max_q_len: int | None
    page_size: int | None
    out: IndexLists | None


@dataclass(frozen=True, slots=True)
class _Call(OfBatch):
    """The arguments, checked."""

    logits: Tensor
    k: int
    batch: QueryBatch
    out: IndexLists | None

    def new_out(self) -> tuple[Tensor, Tensor]:
        """Return memory for slots and counts."""
        return (
            new_tensor("k", (self.batch.num_tokens, self.k), torch.int32, self.device),
            torch.empty(self.batch.num_tokens, dtype=torch.int32, device=self.device),
        )


def _check(call: SelectTokensCall) -> _Call:
    logits = call.logits
    check_tensor("logits", logits, (torch.float32,))
    if logits.dim() != 2 or logits.shape[1] > MAX_KV_LEN:
        raise ValueError(
            f"logits has shape {list(logits.shape)}: expected [num_tokens, max_kv_len], at most "
            f"{MAX_KV_LEN} wide"
        )
    check_last_stride("logits", logits)
    k = check_count("k", call.k, most=INT32_MAX)
    assert call.page_size is not None
    batch = check_batch(
        call.pages,
        call.seq_lens,
        call.qo_indptr,
        max_q_len=call.max_q_len,
        max_kv_len=logits.shape[1],
        num_tokens=logits.shape[0],
        page_size=call.page_size,
        without=[Layout.SEPARATE] if _is_separate(call.pages) else [],
    )
    check_device("logits", logits, batch.device)
    if call.out is not None:
        _check_out(call.out, k, batch)
        read = [("logits", logits), *(("pages", tensor) for tensor in call.pages.tensors)]
        written = [(f"out[{i}]", tensor) for i, tensor in enumerate(call.out.tensors)]
        refuse_shared_bytes(written, read)
    return _Call(logits, k, batch, call.out)


def _is_separate(pages: object) -> bool:
    return is_page_table(pages) and pages.layout is Layout.SEPARATE


def _check_out(out: object, k: int, batch: QueryBatch) -> None:
    if not isinstance(out, IndexLists):
        raise TypeError(f"out is a {type_name(out)}: expected IndexLists")
    if out.counts is None:
        raise ValueError("out has no counts: how many tokens are chosen is written there")
    check_rows("out.slots", out.slots, (batch.num_tokens, k), torch.int32, batch.device)
    check_rows("out.counts", out.counts, (batch.num_tokens,), torch.int32, batch.device)
    check_writable("out.slots", out.slots)
    check_writable("out.counts", out.counts)


def _define(call: _Call) -> IndexLists:
    slots, counts = call.new_out() if call.out is None else call.out.tensors
    select_tokens_by_definition(call.logits, call.k, call.batch, slots, counts)
    return IndexLists(slots, counts) if call.out is None else call.out


class _Launcher:
    """Launches for calls whose tensors lie alike."""

    def __init__(self, call: _Call, given: CallTensors, card: int) -> None:
        batch, logits = call.batch, call.logits
        self._params = new_params(ChoiceParams)
        params = self._params.struct
        batch.fill(params.rows)
        params.pages = batch.pages.page_list(batch.page_size)
        params.scores_stride, params.k = logits.stride(0), call.k
        params.entries_stride, params.counts_stride = call.k, 1
        if call.out is not None:
            slots, counts = call.out.tensors
            params.entries_stride, params.counts_stride = slots.stride(0), counts.stride(0)
        self._row_bytes = logits.stride(0) * logits.element_size() if logits.shape[0] > 1 else 0
        self._new_out, self._checks = call.new_out, asks_for_checks()
        self._calls = KernelCalls(given, ("out[0]", "out[1]"))
        names = self._calls.names
        self._logits_at = names.index("logits")
        sources = {"scores": "logits", "entries": "out[0]", "counts": "out[1]", **batch.sources()}
        self._params.connect(sources, names)
        spec = ChoiceSpec(chooses_pages=False)
        self._calls.add(KernelCall(spec, card, self._params, batch.num_tokens, self._align))

    def _align(self, pointers: Sequence[int]) -> None:
        bits = pointers[self._logits_at] | self._row_bytes
        self._params.struct.is_aligned = bits % _VECTOR_BYTES == 0

    def __call__(self, call: SelectTokensCall, tensors: list[Tensor]) -> IndexLists:
        """Launch for these, which lie like those it was made with."""
        if self._checks and not device_kernels.is_capturing(call.logits.device):
            _verify(call)
        if call.out is not None:
            self._calls.launch(tensors, ())
            return call.out
        new = self._new_out()
        self._calls.launch(tensors, new)
        return IndexLists(*new)


def _verify(call: SelectTokensCall) -> None:
    """Refuse what would be 2**31 - 1."""
    with checking():
        checked = _check(call)
        slots, counts = (tensor.cpu() for tensor in checked.new_out())
        batch = checked.batch.to_cpu()
        select_tokens_by_definition(checked.logits.cpu(), checked.k, batch, slots, counts)


LAUNCHES = LaunchCache(_check, _define, _Launcher)
