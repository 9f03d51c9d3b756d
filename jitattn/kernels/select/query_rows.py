"""The query tokens of a batch and the pages of their requests: what all choices are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, type_name
from jitattn.kernels.common.page_lists import lengths_of, page_sources
from jitattn.kernels.select.params import QueryRows
from jitattn.spec.config import MAX_KV_LEN, MAX_PAGE_SIZE
from jitattn.spec.layout import Layout
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import has_pages, table_names
from jitattn.tensors.tensor_checks import check_device, check_indptr, check_per_request

_PAGE_SIZE = "jitattn_page_size"


class OfBatch:
    """A checked call of a ``batch``."""

    __slots__ = ()

    batch: QueryBatch

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.batch.device


class RequestTokens(NamedTuple):
    """The query tokens of a request: rows ``begin`` to ``begin + q_len``, its last ones."""

    request: int
    begin: int
    q_len: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class QueryBatch:
    """Tables, lengths and offsets that passed their checks."""

    pages: PageTable
    seq_lens: Tensor
    qo_indptr: Tensor | None
    num_tokens: int
    """Rows of q."""
    max_q_len: int
    max_kv_len: int
    page_size: int

    @property
    def batch_size(self) -> int:
        """Requests."""
        return int(self.seq_lens.shape[0])

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.seq_lens.device

    def fill(self, rows: QueryRows) -> None:
        """Write what kernels read of query tokens, but for addresses."""
        rows.seq_lens = lengths_of(self.seq_lens)
        rows.num_tokens = self.num_tokens
        rows.max_q_len, rows.max_kv_len = self.max_q_len, self.max_kv_len
        rows.indptr_stride = 0 if self.qo_indptr is None else self.qo_indptr.stride(0)

    def sources(self) -> dict[str, str]:
        """Return the arguments whose addresses ``pages`` and ``rows`` of parameters have."""
        found = {"rows.seq_lens.values": "seq_lens", **page_sources("pages", self.pages)}
        return found if self.qo_indptr is None else found | {"rows.qo_indptr": "qo_indptr"}

    def on_cpu(self) -> Iterator[RequestTokens]:
        """Yield the query tokens of each request, checked: of tensors on the CPU.

        Raises:
            ValueError: a request is longer than its table or ``max_kv_len``, has more query tokens
                than ``max_q_len``, or the offsets end behind the rows of q.
        """
        lens = [max(int(n), 0) for n in self.seq_lens.tolist()]
        begins = list(range(len(lens) + 1)) if self.qo_indptr is None else self.qo_indptr.tolist()
        if begins[-1] > self.num_tokens:
            raise ValueError(f"qo_indptr[-1] is {begins[-1]}: q has {self.num_tokens} rows")
        for request, kv_len in enumerate(lens):
            q_len = begins[request + 1] - begins[request]
            if q_len > self.max_q_len:
                raise ValueError(
                    f"qo_indptr gives request {request} {q_len} tokens: max_q_len is "
                    f"{self.max_q_len}"
                )
            room = min(self.pages.request_capacity(request, self.page_size), self.max_kv_len)
            if kv_len > room:
                raise ValueError(f"seq_lens[{request}] is {kv_len}: there is room for {room}")
            yield RequestTokens(request, begins[request], q_len, kv_len)

    def known_slots(self, request: int, kv_len: int, num_pages: int) -> Tensor:
        """Return the slots of a request's tokens in a cache of so many pages, int64.

        Raises:
            ValueError: one of them lies outside.
        """
        slots = self.pages.slots_of(request, kv_len, self.page_size)
        wrong = slots[(slots < 0) | (slots >= num_pages * self.page_size)]
        if wrong.numel():
            raise ValueError(
                f"request {request} has a token at slot {int(wrong[0])}: the cache has {num_pages} "
                f"pages of {self.page_size} tokens"
            )
        return slots

    def to_cpu(self) -> QueryBatch:
        """Return a copy on the CPU, which waits for the device."""
        indptr = None if self.qo_indptr is None else self.qo_indptr.cpu()
        return replace(
            self, pages=self.pages.to_cpu(), seq_lens=self.seq_lens.cpu(), qo_indptr=indptr
        )


def check_batch(
    pages: object,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    *,
    max_q_len: int | None,
    max_kv_len: int | None,
    num_tokens: int | None,
    page_size: int,
    without: Sequence[Layout] = (),
) -> QueryBatch:
    """Return the batch of arguments that fit.

    Args:
        pages: a table of a layout with pages, but for those ``without``.
        seq_lens: int32 or int64 [batch_size].
        qo_indptr: int32 [batch_size + 1]; None: one query token a request.
        max_q_len: needed with ``qo_indptr``.
        max_kv_len: None is what the table has room for.
        num_tokens: rows of q; None where there is no q.
        page_size: tokens of a page.
        without: layouts that are of no use.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is wanted.
    """
    if not has_pages(pages) or pages.layout in without:
        names = table_names(without=[Layout.RAGGED, *without])
        given = repr(pages) if has_pages(pages) else f"a {type_name(pages)}"
        raise TypeError(f"pages is {given}: expected a {names}")
    check_per_request("seq_lens", seq_lens, pages.batch_size, pages.device)
    if qo_indptr is None:
        if max_q_len is not None and (most := check_count("max_q_len", max_q_len)) != 1:
            raise ValueError(f"max_q_len is {most}: without qo_indptr a request has one token")
        max_q_len = 1
        if num_tokens not in (None, pages.batch_size):
            raise ValueError(
                f"q has {num_tokens} rows for {pages.batch_size} requests: with other than one "
                "query token a request give qo_indptr"
            )
    else:
        check_indptr("qo_indptr", qo_indptr)
        check_device("qo_indptr", qo_indptr, pages.device)
        if qo_indptr.shape[0] != pages.batch_size + 1:
            raise ValueError(
                f"qo_indptr has {qo_indptr.shape[0]} entries: expected {pages.batch_size + 1}, one "
                "more than requests"
            )
        if max_q_len is None:
            raise ValueError("max_q_len is None: qo_indptr needs the most tokens of a request")
        max_q_len = check_count("max_q_len", max_q_len, most=INT32_MAX)
    capacity = pages.capacity(page_size)
    if max_kv_len is not None:
        capacity = check_count("max_kv_len", max_kv_len, least=0, most=MAX_KV_LEN)
    rows = INT32_MAX if num_tokens is None else num_tokens
    return QueryBatch(pages, seq_lens, qo_indptr, rows, max_q_len, capacity, page_size)


def note_page_size(tensor: Tensor, page_size: int) -> None:
    """Note on scores or bounds of pages how many tokens a page has."""
    setattr(tensor, _PAGE_SIZE, page_size)


def page_size_of(name: str, tensor: object, given: object) -> int | None:
    """Return the tokens of a page as given, or else as noted on a tensor; None of neither.

    Raises:
        TypeError, ValueError: no count, or another one than noted.
    """
    noted: int | None = getattr(tensor, _PAGE_SIZE, None)
    if given is None:
        return noted
    page_size = check_count("page_size", given, most=MAX_PAGE_SIZE)
    if noted not in (None, page_size):
        raise ValueError(f"page_size is {page_size}: {name} is of pages of {noted} tokens")
    return page_size
