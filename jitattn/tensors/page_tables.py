"""The layouts of page tables, a class each, and the tables of a page manager.

A new layout is a class here, a member of ``spec.layout.Layout``, a struct of its parameters and
that struct in templates/parts/page_table.cuh.jinja.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Self, TypeGuard

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, shown, type_name
from jitattn.spec.config import MAX_KV_LEN
from jitattn.spec.layout import Layout
from jitattn.spec.params import PageList
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.shards import Shard
from jitattn.tensors.tensor_checks import (
    INTEGERS,
    check_device,
    check_indptr,
    check_tensor,
    check_vector,
    refuse_falling,
    refuse_first,
)


class _RowTable(PageTable):
    """Entries in rows, and which row each request has."""

    __slots__ = ()

    rows: Tensor | None
    page_list_fields = ("entries", "rows")

    @property
    def _table(self) -> Tensor:
        return self.tensors[0]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], layout: Layout) -> Self:
        del layout
        return cls(tensors[0], rows=tensors[1] if len(tensors) > 1 else None)  # type: ignore[call-arg]

    @property
    def batch_size(self) -> int:
        return (self._table if self.rows is None else self.rows).shape[0]

    def capacity(self, page_size: int) -> int:
        return min(self._table.shape[-1] * self.entry_tokens(page_size), MAX_KV_LEN)

    def fill(self, params: ctypes.Structure) -> None:
        table, rows = self._table, self.rows
        params.table = table.data_ptr()
        params.row_stride = table.stride(0)
        params.column_stride = table.stride(-1)
        params.rows = None if rows is None else rows.data_ptr()
        params.rows_stride = 0 if rows is None else rows.stride(0)
        params.rows_are_int64 = rows is not None and rows.dtype is torch.int64

    def _page_list(self) -> PageList:
        table, rows = self._table, self.rows
        return PageList(
            entries=table.data_ptr(),
            rows=None if rows is None else rows.data_ptr(),
            row_stride=table.stride(0),
            value_stride=self.value_stride,
            entry_stride=table.stride(-1),
            rows_stride=0 if rows is None else rows.stride(0),
            num_rows=table.shape[0],
            num_entries=table.shape[-1],
            entries_are_int64=table.dtype is torch.int64,
            rows_are_int64=rows is not None and rows.dtype is torch.int64,
        )

    def entries(self, request: int, *, which: int = 0) -> Tensor:
        self.check_row(request)
        row = self._table[request if self.rows is None else int(self.rows[request])]
        return row if row.dim() == 1 else row[which]

    def check_row(self, request: int) -> None:
        row = request if self.rows is None else int(self.rows[request])
        if not 0 <= row < self._table.shape[0]:
            raise ValueError(f"rows[{request}] is {row}: the table has {self._table.shape[0]} rows")

    def narrowed(self, max_kv_len: int, page_size: int) -> PageTable:
        width = -(-max_kv_len // self.entry_tokens(page_size))
        rows = () if self.rows is None else (self.rows,)
        return type(self).from_tensors([self._table[..., :width], *rows], self.layout)

    def columns(
        self, lens: Tensor, page_size: int, *, max_kv_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        del page_size, max_kv_len  # a row is as wide as another
        if self.rows is not None and lens.device.type == "cpu":
            for request in lens.nonzero().flatten().tolist():
                self.check_row(request)
        width = self._table.shape[-1]
        return self._entries_of_all(width), torch.full_like(lens, width)

    def shard(self, shard: Shard, page_size: int) -> PageTable:
        shard = shard.of_entries(self.entry_tokens(page_size))
        table, device = self._table, self.device
        width = table.shape[-1]
        columns = shard.columns(width, device)
        last = torch.full((1,), -1, dtype=table.dtype, device=device)
        padded = torch.cat((table, last.expand(*table.shape[:-1], 1)), dim=-1)
        requests = torch.arange(self.batch_size, device=device)
        rows = self.rows_of(requests).clamp(0, max(table.shape[0] - 1, 0))
        entries = padded.index_select(-1, columns)[rows]
        return type(self).from_tensors([shard.places(entries)], self.layout)

    def rows_of(self, requests: Tensor) -> Tensor:
        return requests if self.rows is None else self.rows.long()[requests]

    def check_offsets(self, seq_lens: Tensor, page_size: int) -> Tensor:
        num_rows = self._table.shape[0]
        if self.rows is not None:
            outside = (self.rows < 0) | (self.rows >= num_rows)
            refuse_first(
                outside & (seq_lens > 0),
                self.rows,
                f"rows[{{}}] is {{}}: the table has {num_rows} rows",
            )
        return super().check_offsets(seq_lens, page_size)

    def _entries_of_all(self, width: int) -> Tensor:
        del width  # all there are
        if self.rows is None:
            return self._table
        # A padding request may have any row: nothing of it is looked at.
        return self._table[self.rows.long().clamp(0, max(self._table.shape[0] - 1, 0))]


class BlockTable(_RowTable):
    """Page ids of each request, a row per request; the rank of the table is its layout.

    Attributes:
        table: int32 [num_rows, width], one page id for K and V (layout "shared"), or int32
            [num_rows, 2, width], row 0 K ids and row 1 V ids (layout "separate"). Any strides.
            Entries past a request's last page are never read.
        rows: int32 or int64 [batch_size], the row of each request, or None when request b uses
            row b.
    """

    __slots__ = ("layout", "rows", "table", "tensors")

    layouts = (Layout.SHARED, Layout.SEPARATE)

    def __init__(self, table: Tensor, *, rows: Tensor | None = None) -> None:
        """Hold ``table`` and ``rows``; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: the rank, the second dimension of a 3-D table, or a device doesn't fit.
        """
        check_tensor("table", table, (torch.int32,))
        if table.dim() not in (2, 3):
            raise ValueError(
                f"table has shape {list(table.shape)}: expected [rows, width] (one page id for K "
                "and V) or [rows, 2, width] (K ids, V ids)"
            )
        if table.dim() == 3 and table.shape[1] != 2:
            raise ValueError(
                f"table has shape {list(table.shape)}: the second dimension of a 3-D table is 2, "
                "row 0 K ids and row 1 V ids"
            )
        if rows is not None:
            check_vector("rows", rows, device=table.device)
        self.table = table
        self.rows = rows
        self.tensors = (table,) if rows is None else (table, rows)
        self.layout = Layout.SHARED if table.dim() == 2 else Layout.SEPARATE

    def __repr__(self) -> str:
        """Show the layout and the shapes."""
        rows = "" if self.rows is None else f", rows={list(self.rows.shape)}"
        return f"BlockTable({self.layout.value}, table={list(self.table.shape)}{rows})"

    @property
    def value_stride(self) -> int:
        """Elements from an id of K to that of V; 0 where one id is for both."""
        return self.table.stride(1) if self.table.dim() == 3 else 0

    def fill(self, params: ctypes.Structure) -> None:
        """Write addresses and strides into the parameters."""
        super().fill(params)
        if self.table.dim() == 3:
            params.kv_stride = self.table.stride(1)

    @classmethod
    def of_page_ids(cls, ids: Tensor, lens: Tensor, page_size: int, layout: Layout) -> PageTable:
        """Hold the ids themselves, or twice those that K and V share."""
        del lens, page_size
        is_twice = layout is Layout.SEPARATE and ids.dim() == 2
        return BlockTable(torch.stack((ids, ids), dim=1) if is_twice else ids)


class ViewTable(BlockTable):
    """A block table whose ids count in caches of one view: those of a page manager.

    Attributes:
        view: what a cache has that the table is for, as ``view_of`` finds it; None is any.
    """

    __slots__ = ("view",)

    def __init__(self, table: Tensor, *, rows: Tensor | None = None, view: object = None) -> None:
        """Hold them; nothing is copied."""
        super().__init__(table, rows=rows)
        self.view = view


class TokenTable(_RowTable):
    """The slot of every token: a request-to-token pool. Layout "token".

    Attributes:
        slots: int32 [num_rows, width], page_id * page_size + place in the page. Any strides.
            Entries past a request's last token are never read.
        rows: int32 or int64 [batch_size], the row of each request, or None when request b uses
            row b.
    """

    __slots__ = ("rows", "slots", "tensors")

    layout = Layout.TOKEN
    layouts = (Layout.TOKEN,)

    def __init__(self, slots: Tensor, *, rows: Tensor | None = None) -> None:
        """Hold ``slots`` and ``rows``; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: the rank or a device doesn't fit.
        """
        self._check_slots(slots)
        if rows is not None:
            check_vector("rows", rows, device=slots.device)
        self.slots = slots
        self.rows = rows
        self.tensors = (slots,) if rows is None else (slots, rows)

    @staticmethod
    def _check_slots(slots: Tensor) -> None:
        check_tensor("slots", slots, (torch.int32,))
        if slots.dim() != 2:
            raise ValueError(f"slots has shape {list(slots.shape)}: expected [rows, tokens]")

    def __repr__(self) -> str:
        """Show the shapes."""
        rows = "" if self.rows is None else f", rows={list(self.rows.shape)}"
        return f"TokenTable(slots={list(self.slots.shape)}{rows})"

    @classmethod
    def of_page_ids(cls, ids: Tensor, lens: Tensor, page_size: int, layout: Layout) -> PageTable:
        """Hold the slots of all tokens of the pages; -1 past a request, or beyond int32."""
        del layout
        if ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= 2**31 // page_size:
            raise ValueError(
                f"pages lists page {int(ids.max())}: slots of pages of {page_size} tokens are int32"
            )
        slots = slots_of_pages(ids, page_size)
        tokens = torch.arange(slots.shape[1], device=ids.device)
        return TokenTable(slots.where(tokens < lens[:, None], -1))


class SlotRows(TokenTable):
    """Slots of any integer type: those that a block table is made of."""

    __slots__ = ()

    @staticmethod
    def _check_slots(slots: Tensor) -> None:
        check_tensor("slots", slots, INTEGERS)
        if slots.dim() != 2:
            raise ValueError(f"slots has shape {list(slots.shape)}: expected [num_rows, width]")


class _OffsetTable(PageTable):
    """Entries of all requests one after the other, and where those of each begin."""

    __slots__ = ()

    kv_indptr: Tensor

    @property
    def batch_size(self) -> int:
        return self.kv_indptr.shape[0] - 1

    def fill(self, params: ctypes.Structure) -> None:
        params.kv_indptr = self.kv_indptr.data_ptr()
        params.indptr_stride = self.kv_indptr.stride(0)

    def point_schedule(self, params: ctypes.Structure) -> None:
        params.kv_indptr = self.kv_indptr.data_ptr()

    def fill_schedule(self, params: ctypes.Structure) -> None:
        params.kv_indptr_stride = self.kv_indptr.stride()[0]
        params.num_entries = INT32_MAX

    def _range(self, request: int) -> tuple[int, int]:
        begin, end = (int(n) for n in self.kv_indptr[request : request + 2])
        return begin, end

    def check_offsets(self, seq_lens: Tensor, page_size: int) -> Tensor:
        del seq_lens
        refuse_falling("kv_indptr", self.kv_indptr)
        return self.kv_indptr.long().diff() * self.entry_tokens(page_size)


class CsrPages(_OffsetTable):
    """The pages of all requests, one request after the other. Layout "csr".

    Attributes:
        kv_indptr: int32 [batch_size + 1], where the pages of each request begin; entry b + 1
            bounds what request b may read.
        kv_indices: int32 [at least kv_indptr[-1]], page ids for K and V.
    """

    __slots__ = ("kv_indices", "kv_indptr", "tensors")

    layout = Layout.CSR
    layouts = (Layout.CSR,)
    page_list_fields = ("indptr", "entries")

    def __init__(self, kv_indptr: Tensor, kv_indices: Tensor) -> None:
        """Hold both; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: a rank or device doesn't fit, or, on the CPU, ``kv_indptr`` is not a
                rising row of offsets from 0 into ``kv_indices``.
        """
        check_indptr("kv_indptr", kv_indptr)
        check_tensor("kv_indices", kv_indices, (torch.int32,))
        if kv_indices.dim() != 1:
            raise ValueError(f"kv_indices has shape {list(kv_indices.shape)}: expected [num_pages]")
        check_device("kv_indices", kv_indices, kv_indptr.device)
        if kv_indptr.device.type == "cpu" and int(kv_indptr[-1]) > kv_indices.shape[0]:
            raise ValueError(
                f"kv_indptr[-1] is {int(kv_indptr[-1])}: kv_indices has {kv_indices.shape[0]} "
                "entries"
            )
        self.kv_indptr = kv_indptr
        self.kv_indices = kv_indices
        self.tensors = (kv_indptr, kv_indices)

    def __repr__(self) -> str:
        """Show the shapes."""
        return f"CsrPages({list(self.kv_indptr.shape)}, {list(self.kv_indices.shape)})"

    def capacity(self, page_size: int) -> int:
        """Return the most tokens of a request: all pages there are."""
        return min(int(self.kv_indices.shape[0]) * page_size, MAX_KV_LEN)

    def fill(self, params: ctypes.Structure) -> None:
        """Write addresses and strides into the parameters."""
        super().fill(params)
        params.kv_indices = self.kv_indices.data_ptr()
        params.indices_stride = self.kv_indices.stride(0)
        params.num_entries = self.kv_indices.shape[0]

    def fill_schedule(self, params: ctypes.Structure) -> None:
        """Write the stride of offsets, and how many pages they may reach."""
        super().fill_schedule(params)
        params.num_entries = self.kv_indices.shape[0]

    def _page_list(self) -> PageList:
        return PageList(
            indptr=self.kv_indptr.data_ptr(),
            entries=self.kv_indices.data_ptr(),
            indptr_stride=self.kv_indptr.stride(0),
            entry_stride=self.kv_indices.stride(0),
            num_entries=self.kv_indices.shape[0],
        )

    def entries(self, request: int, *, which: int = 0) -> Tensor:
        """Return the page ids of a request."""
        del which
        begin, end = self._range(request)
        return self.kv_indices[begin:end]

    def request_capacity(
        self, request: int, page_size: int, *, num_kv_tokens: int = MAX_KV_LEN
    ) -> int:
        """Return the tokens of the pages of a request."""
        del num_kv_tokens
        begin, end = self._range(request)
        return (min(end, self.kv_indices.shape[0]) - begin) * page_size

    def columns(
        self, lens: Tensor, page_size: int, *, max_kv_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return as many columns as the longest request has pages, and the pages of each."""
        num_ids = self.kv_indices.shape[0]
        if max_kv_len is None:
            longest = int(lens.max()) if lens.numel() else 0
            # No request has more pages than there are.
            max_kv_len = min(longest, num_ids * page_size)
        width = -(-max(max_kv_len, 0) // page_size)
        ends = self.kv_indptr[1:].long().clamp(max=num_ids)
        counts = (ends - self.kv_indptr[:-1].long()).clamp(min=0, max=width)
        return self._entries_of_all(width), counts

    def shard(self, shard: Shard, page_size: int) -> PageTable:
        """List the pages of a rank, with room for all of them."""
        shard = shard.of_entries(self.entry_tokens(page_size))
        begins, device = self.kv_indptr.long(), self.device
        indptr = torch.zeros_like(self.kv_indptr)
        indptr[1:] = shard.lens(begins.diff()).cumsum(0)
        num_ids = self.kv_indices.shape[0]
        entries = torch.arange(num_ids, device=device)
        requests = torch.searchsorted(begins[1:].contiguous(), entries, right=True)
        columns = shard.places(entries - begins[requests])
        is_listed = (columns >= 0) & (entries < begins[-1])
        indices = torch.full((num_ids + 1,), -1, dtype=torch.int32, device=device)
        # What isn't listed goes to one place more than there are.
        places = (indptr.long()[requests] + columns).where(is_listed, num_ids)
        indices[places] = shard.places(self.kv_indices)
        return CsrPages(indptr, indices[:-1])

    def check_offsets(self, seq_lens: Tensor, page_size: int) -> Tensor:
        """Refuse offsets that fall or exceed the pages there are."""
        limits = super().check_offsets(seq_lens, page_size)
        ends, num_ids = self.kv_indptr[1:].long(), self.kv_indices.shape[0]
        refuse_first(
            ends > num_ids,
            ends,
            f"kv_indptr of request {{}} ends at {{}}: kv_indices has {num_ids} entries",
        )
        return limits

    def _entries_of_all(self, width: int) -> Tensor:
        columns = torch.arange(width, device=self.device)
        places = self.kv_indptr[:-1].long()[:, None] + columns
        num_ids = self.kv_indices.shape[0]
        if num_ids == 0:
            return torch.full_like(places, -1, dtype=torch.int32)
        return self.kv_indices[places.clamp(0, num_ids - 1)]

    @classmethod
    def of_page_ids(cls, ids: Tensor, lens: Tensor, page_size: int, layout: Layout) -> PageTable:
        """List the ids without gaps between requests, with room for all columns."""
        del lens, page_size, layout
        is_live = ids >= 0
        # Live columns come first in a row, but for holes, which keep their place.
        columns = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        counts = (is_live * columns).amax(dim=1) if ids.shape[1] else ids.new_zeros(ids.shape[0])
        indptr = torch.zeros(ids.shape[0] + 1, dtype=torch.int32, device=ids.device)
        indptr[1:] = counts.cumsum(0)
        places = indptr[:-1, None].long() + torch.arange(ids.shape[1], device=ids.device)
        is_listed = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        indices = torch.full((ids.numel() + 1,), -1, dtype=torch.int32, device=ids.device)
        # What isn't listed goes to one place more than there are.
        indices[places.where(is_listed, ids.numel())] = ids
        indices[-1:].fill_(-1)  # an assignment of the number would copy it: no capture allows that
        return CsrPages(indptr, indices[:-1])


class RaggedKV(_OffsetTable):
    """K and V without pages: the tokens of all requests, one after the other. Layout "ragged".

    Attributes:
        kv_indptr: int32 [batch_size + 1], where the tokens of each request begin in K and V;
            entry b + 1 bounds what request b may read.
    """

    __slots__ = ("kv_indptr", "tensors")

    layout = Layout.RAGGED
    layouts = (Layout.RAGGED,)
    page_list_fields = ()

    def __init__(self, kv_indptr: Tensor) -> None:
        """Hold ``kv_indptr``; nothing is copied.

        Raises:
            TypeError: no tensor, or another dtype.
            ValueError: the rank doesn't fit, or, on the CPU, it is no rising row of offsets from 0.
        """
        check_indptr("kv_indptr", kv_indptr)
        self.kv_indptr = kv_indptr
        self.tensors = (kv_indptr,)

    def __repr__(self) -> str:
        """Show the shape."""
        return f"RaggedKV({list(self.kv_indptr.shape)})"

    def capacity(self, page_size: int) -> int:
        """Return the most tokens of a request: only the device knows the offsets."""
        del page_size
        return MAX_KV_LEN

    def entries(self, request: int, *, which: int = 0) -> Tensor:
        """Return the tokens of a request, which are entries themselves."""
        del which
        return torch.arange(*self._range(request), device=self.device)

    def request_capacity(
        self, request: int, page_size: int, *, num_kv_tokens: int = MAX_KV_LEN
    ) -> int:
        """Return the tokens that the offsets give to a request, of ``num_kv_tokens``."""
        del page_size
        begin, end = self._range(request)
        return min(end, num_kv_tokens) - begin

    def check_entries(
        self, first: Tensor, lens: Tensor, num_pages: Mapping[str, int], page_size: int
    ) -> None:
        """Refuse a request that ends beyond K and V."""
        del first, page_size
        ends = self.kv_indptr[:-1].long() + lens
        refuse_first(
            ends > num_pages[next(iter(num_pages))],
            ends,
            f"request {{}} ends at token {{}} of {' and '.join(num_pages)}",
        )


_CLASSES: tuple[type[PageTable], ...] = (BlockTable, CsrPages, TokenTable, RaggedKV)
_OF_LAYOUT = {layout: kind for kind in _CLASSES for layout in kind.layouts}


def table_class(layout: Layout) -> type[PageTable]:
    """Return the class of a layout."""
    return _OF_LAYOUT[layout]


def table_names(*, without: Sequence[Layout] = ()) -> str:
    """Return the names of the classes but for those of some layouts: "a, b or c"."""
    *names, last = (kind.__name__ for kind in _CLASSES if kind.layouts[0] not in without)
    return f"{', '.join(names)} or {last}"


def is_page_table(value: object) -> TypeGuard[PageTable]:
    """Return whether ``value`` is a table of any layout."""
    return isinstance(value, PageTable)


def check_page_table(pages: object, name: str = "pages") -> None:
    """Raise TypeError unless ``pages`` is a table of any layout."""
    if not isinstance(pages, PageTable):
        raise TypeError(f"{name} is a {type_name(pages)}: expected a {table_names()}")


def has_pages(value: object) -> TypeGuard[PageTable]:
    """Return whether ``value`` is a table of any layout with pages."""
    return isinstance(value, PageTable) and value.layout.has_pages


def table_from_tensors(tensors: Sequence[Tensor], layout: str | None) -> PageTable | None:
    """Return the table that a torch operator gets as tensors and a layout; None of no tensors.

    Raises:
        ValueError: no layout.
    """
    if not tensors:
        return None
    if layout is not None and layout in set(Layout):
        found = Layout(layout)
        return table_class(found).from_tensors(tensors, found)
    *names, last = (repr(known.value) for known in Layout)
    raise ValueError(
        f"page_table is {shown(layout)}: expected {', '.join(names)} or {last}, the layout of pages"
    )


def slots_of_pages(ids: Tensor, page_size: int) -> Tensor:
    """Return int32 [batch_size, width * page_size]; -1 where a page is none, or beyond int32."""
    places = torch.arange(page_size, dtype=torch.int32, device=ids.device)
    is_page = (ids >= 0) & (ids <= 2**31 // page_size - 1)  # a bound in int32
    slots = ids[:, :, None] * page_size + places
    return slots.where(is_page[:, :, None], -1).flatten(1)


def slot_table(slots: object, rows: object) -> PageTable:
    """Return the table of slots given as a tensor and ``rows``, or as a table that lists some.

    Raises:
        TypeError, ValueError: another object, a shape, or a device that doesn't fit.
    """
    if isinstance(slots, TokenTable | CsrPages):
        if rows is not None:
            raise ValueError(
                f"rows are given, but slots is {slots!r}, which says where requests lie"
            )
        return slots
    return SlotRows(slots, rows=rows)  # type: ignore[arg-type]


def check_view(pages: object, view: object) -> None:
    """Raise ValueError where a table counts pages otherwise than the cache of ``view``."""
    wanted = getattr(pages, "view", None)
    if wanted is not None and view is not None and wanted != view:
        raise ValueError(f"pages is a table for {wanted}: the cache is of {view}")
