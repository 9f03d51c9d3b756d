"""Launches of the functions around attention: checked once, then only patched.

A function keeps its last calls by how their tensors lay. Another call whose tensors lie alike
passes the same checks, so that only addresses are written before the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from jitattn.base import knobs
from jitattn.spec.params import Divisor, Lengths, PageList
from jitattn.tensors.cache_views import recogniser
from jitattn.tensors.page_tables import BlockTable, CsrPages, TokenTable

Call = TypeVar("Call")
PagedTable = BlockTable | TokenTable | CsrPages
"""The tables that list pages or slots."""

# Calls that a thread keeps of a function: the layers of a model lie in few ways.
_MAX_RECENT = 16


class Recent(threading.local, Generic[Call]):
    """The last calls of a function in this thread, since a launch is for one thread at a time."""

    def __init__(self) -> None:
        """Know none."""
        self._calls: list[tuple[object, int, Callable[..., bool], Call]] = []

    def find(self, facts: object, tensors: Sequence[Tensor]) -> Call | None:
        """Return a call of equal ``facts`` whose tensors lay like these."""
        count = len(tensors)
        for known, known_count, lie_alike, call in self._calls:
            if known == facts and count == known_count and lie_alike(*tensors):
                return call
        facts, distinct = _distinct(facts, tensors)
        return self.find(facts, distinct) if len(distinct) < count else None

    def add(self, facts: object, tensors: Sequence[Tensor], call: Call) -> Call:
        """Keep a call that passed its checks, and return it."""
        facts, distinct = _distinct(facts, tensors)
        self._calls.insert(0, (facts, len(distinct), recogniser(distinct), call))
        del self._calls[_MAX_RECENT:]
        return call


def _distinct(facts: object, tensors: Sequence[Tensor]) -> tuple[object, Sequence[Tensor]]:
    """Return the tensors without repetitions, which are a fact: a recogniser takes none."""
    if len(set(map(id, tensors))) == len(tensors):
        return facts, tensors
    order = {id(tensor): i for i, tensor in enumerate(tensors)}
    pattern = tuple(order[id(tensor)] for tensor in tensors)
    return (facts, pattern), [tensors[i] for i in sorted(order.values())]


def lengths_of(lengths: Tensor) -> Lengths:
    """Return the parameters of a vector of lengths."""
    params = Lengths(None, lengths.stride(0), lengths.dtype is torch.int64, lengths.shape[0])
    params.values = lengths.data_ptr()
    return params


def page_list_of(pages: PagedTable, page_size: int) -> PageList:
    """Return the parameters of a page table."""
    if isinstance(pages, CsrPages):
        params = PageList(
            indptr=pages.kv_indptr.data_ptr(),
            indptr_stride=pages.kv_indptr.stride(0),
            entry_stride=pages.kv_indices.stride(0),
            num_entries=pages.kv_indices.shape[0],
        )
    else:
        params = slot_rows_of(
            pages.table if isinstance(pages, BlockTable) else pages.slots, pages.rows
        )
    params.page_size = Divisor.of(page_size)
    params.are_slots = isinstance(pages, TokenTable)
    point_at(params, pages)
    return params


def slot_rows_of(table: Tensor, rows: Tensor | None) -> PageList:
    """Return the parameters of a table with a row for each request, or those that ``rows`` says."""
    return PageList(
        entries=table.data_ptr(),
        rows=None if rows is None else rows.data_ptr(),
        row_stride=table.stride(0),
        value_stride=table.stride(1) if table.dim() == 3 else 0,
        entry_stride=table.stride(-1),
        rows_stride=0 if rows is None else rows.stride(0),
        num_rows=table.shape[0],
        num_entries=table.shape[-1],
        entries_are_int64=table.dtype is torch.int64,
        rows_are_int64=rows is not None and rows.dtype is torch.int64,
    )


def point_at(params: Any, pages: PagedTable) -> None:
    """Write the addresses of a table that lies like the one ``params``, a ``PageList``, are of."""
    first, *more = pages.tensors
    if isinstance(pages, CsrPages):
        params.indptr, params.entries = first.data_ptr(), more[0].data_ptr()
    else:
        params.entries = first.data_ptr()
        if more:
            params.rows = more[0].data_ptr()


def asks_for_checks() -> bool:
    """Whether JITATTN_CHECK is set: then calls that aren't captured look at what tensors hold."""
    return knobs.load().check


@contextmanager
def checking() -> Iterator[None]:
    """Say that what is refused here was looked at because of JITATTN_CHECK."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"JITATTN_CHECK: {error}") from None


def on_cpu(pages: PagedTable) -> PagedTable:
    """Return a copy of a table on the CPU, which waits for the device.

    Raises:
        ValueError: its offsets are wrong.
    """
    first, *more = (tensor.cpu() for tensor in pages.tensors)
    if isinstance(pages, CsrPages):
        return CsrPages(first, more[0])
    return type(pages)(first, rows=more[0] if more else None)
