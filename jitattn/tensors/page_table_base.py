"""``PageTable``: what every layout of page tables answers; the layouts are in ``page_tables``.

``PlannedTable`` is what plans ask of tables and of lists, which are in ``token_lists``.

A table is a value that holds its tensors. It writes its kernel parameters, says where the tokens of
a request lie (the definition), and checks what its tensors hold. Everything that depends on the
layout is a method here, so that nothing else asks for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from jitattn.spec.config import MAX_KV_LEN
from jitattn.spec.layout import AnyLayout, Layout
from jitattn.spec.params import Divisor, PageList
from jitattn.tensors.shards import Shard
from jitattn.tensors.tensor_checks import refuse_first


class PlannedTable:
    """What plans read: the tokens that requests or query tokens see; attributes are set once.

    Attributes:
        layout: how they are listed.
        tensors: all that it holds, in the order of ``from_tensors``.
    """

    __slots__ = ()

    layout: AnyLayout
    tensors: tuple[Tensor, ...]

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute once: plans have read it."""
        if hasattr(self, name):
            kind = type(self).__name__
            raise AttributeError(
                f"{kind}.{name} can't be replaced: give another {kind} to run(pages=...), or write "
                "into the tensor"
            )
        object.__setattr__(self, name, value)

    @property
    def batch_size(self) -> int:
        """Requests that the table lists."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device

    @property
    def value_stride(self) -> int:
        """Elements from an id of K to that of V; 0 where one id is for both."""
        return 0

    def capacity(self, page_size: int) -> int:
        """Return the most tokens of a request; the host knows it without reading the device."""
        raise NotImplementedError

    def check_heads(self, num_kv_heads: int) -> None:
        """Raise ValueError where KV heads have lists of their own, and of another number."""
        del num_kv_heads

    def fill(self, params: ctypes.Structure) -> None:
        """Write addresses and strides into ``struct PageTable`` of the layout."""
        raise NotImplementedError

    def fill_schedule(self, params: ctypes.Structure) -> None:
        """Write what ``ScheduleParams`` has of offsets or lists, but for their address."""
        del params

    def point_schedule(self, params: ctypes.Structure) -> None:
        """Write the address of offsets or counts into ``ScheduleParams``."""
        del params

    # --- checks on the device, which wait for it

    def check_offsets(self, seq_lens: Tensor, page_size: int) -> Tensor:
        """Raise ValueError for offsets or rows that are wrong: JITATTN_CHECK.

        Returns:
            int64 [batch_size], the most tokens of each request.
        """
        return torch.full_like(seq_lens, self.capacity(page_size), dtype=torch.int64)

    def check_entries(
        self, first: Tensor, lens: Tensor, num_pages: Mapping[str, int], page_size: int
    ) -> None:
        """Raise ValueError for an entry of a visible token outside the cache: JITATTN_CHECK.

        Args:
            first: int64 [batch_size], the first token of each request that is read.
            lens: int64 [batch_size], tokens of each request.
            num_pages: of each tensor of the cache, by its name; those of V come second.
            page_size: tokens of a page.
        """
        raise NotImplementedError


class PageTable(PlannedTable):
    """The tokens of each request, by pages, slots or offsets.

    Attributes:
        layout: how the table lists them.
        tensors: all that the table holds, in the order of ``from_tensors``.
    """

    __slots__ = ()

    layout: Layout
    layouts: ClassVar[tuple[Layout, ...]]
    """The layouts of this class."""
    page_list_fields: ClassVar[tuple[str, ...]]
    """The addresses of ``PageList`` at which ``tensors`` go."""

    # --- facts

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], layout: Layout) -> Self:
        """Return the table of ``tensors``, as the attribute of that name has them."""
        del layout
        return cls(*tensors)

    def entry_tokens(self, page_size: int) -> int:
        """Return the tokens of an entry: those of a page, or one."""
        return page_size if self.layout.lists_pages else 1

    def to_cpu(self) -> PageTable:
        """Return a copy on the CPU, which waits for the device.

        Raises:
            ValueError: its offsets are wrong.
        """
        return type(self).from_tensors([tensor.cpu() for tensor in self.tensors], self.layout)

    # --- kernel parameters

    def page_list(self, page_size: int) -> PageList:
        """Return the table as the kernels of ``kernels.pages`` take it.

        A ``RaggedKV`` has none.
        """
        params = self._page_list()
        params.page_size = Divisor.of(page_size)
        params.are_slots = not self.layout.lists_pages
        return params

    def _page_list(self) -> PageList:
        raise NotImplementedError

    def patch(self, params: PageList) -> None:
        """Write the addresses into the ``page_list`` of a table that lies like this one."""
        for name, tensor in zip(self.page_list_fields, self.tensors, strict=False):
            setattr(params, name, tensor.data_ptr())

    # --- the definition

    def entries(self, request: int, *, which: int = 0) -> Tensor:
        """Return all that the table lists for a request, of K (``which`` 0) or V (1).

        Raises:
            ValueError: the table has no such row.
        """
        raise NotImplementedError

    def locate(self, request: int, token: int, page_size: int, *, which: int = 0) -> int:
        """Return the slot of a token, page * page_size + place; negative where there is none."""
        size = self.entry_tokens(page_size)
        entry = int(self.entries(request, which=which)[token // size])
        return -1 if entry < 0 else entry * size + token % size

    def slots_of(self, request: int, num_tokens: int, page_size: int, *, which: int = 0) -> Tensor:
        """Return the slots of a request's first tokens in K (``which`` 0) or V (1).

        Returns:
            int64 [num_tokens], page * page_size + place; negative where the entry is.

        Raises:
            ValueError: the table lists fewer tokens, or has no such row.
        """
        if num_tokens == 0:  # of padding, which may have any row
            return torch.empty(0, dtype=torch.int64, device=self.device)
        entries, size = self.entries(request, which=which), self.entry_tokens(page_size)
        if num_tokens > entries.shape[0] * size:
            raise ValueError(
                f"seq_lens[{request}] is {num_tokens}: the table lists {entries.shape[0] * size} "
                "tokens"
            )
        tokens = torch.arange(num_tokens, device=entries.device)
        ids = entries[tokens // size].long()
        return torch.where(ids < 0, -1, ids * size + tokens % size)

    def request_capacity(
        self, request: int, page_size: int, *, num_kv_tokens: int = MAX_KV_LEN
    ) -> int:
        """Return the most tokens of one request, of ``num_kv_tokens`` in all, as offsets say."""
        del request, num_kv_tokens
        return self.capacity(page_size)

    def check_row(self, request: int) -> None:
        """Raise ValueError where ``rows`` names a row that the table doesn't have."""

    # --- other layouts

    def narrowed(self, max_kv_len: int, page_size: int) -> PageTable:
        """Return the columns that requests of so many tokens need."""
        del max_kv_len, page_size
        return self

    def columns(
        self, lens: Tensor, page_size: int, *, max_kv_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return page ids of all requests, and how many each may have.

        Args:
            lens: int64 [batch_size]: a request without tokens may have any row.
            page_size: tokens of a page.
            max_kv_len: bounds ``lens``; None: a table without rows waits for the device.

        Returns:
            int32 [batch_size, width], or [batch_size, 2, width] with ids of K and V, anything past
            those of a request; and int64 [batch_size].

        Raises:
            ValueError: on the CPU, a row that the table hasn't.
        """
        raise NotImplementedError

    @classmethod
    def of_page_ids(cls, ids: Tensor, lens: Tensor, page_size: int, layout: Layout) -> PageTable:
        """Return new tables of pages.

        Args:
            ids: int32 [batch_size, width] or [batch_size, 2, width], -1 past the pages of a
                request.
            lens: int64 [batch_size], its tokens.
            page_size: tokens of a page.
            layout: one of ``layouts``.

        Raises:
            ValueError: on the CPU, the layout has no room for a page.
        """
        raise NotImplementedError

    def shard(self, shard: Shard, page_size: int) -> PageTable:
        """Return the table of what a rank keeps, made on the device and without waiting for it.

        Its entries are places at the rank. One whose rank isn't that of its tokens becomes -1.

        Raises:
            ValueError: the layout has no pages.
        """
        raise ValueError(f"table is {self!r}: tokens without pages don't lie over ranks in blocks")

    def rows_of(self, requests: Tensor) -> Tensor:
        """Return the row of each of some requests, for ``with_rows``.

        Raises:
            ValueError: the layout has no rows, so that no two requests share one.
        """
        raise ValueError(
            f"pages is {self!r}: a request is listed once, and its query tokens, which see "
            "different keys, would be requests of their own: give a table with rows"
        )

    def with_rows(self, rows: Tensor) -> PageTable:
        """Return the table of requests that use these rows."""
        return type(self).from_tensors([self.tensors[0], rows], self.layout)

    def check_entries(
        self, first: Tensor, lens: Tensor, num_pages: Mapping[str, int], page_size: int
    ) -> None:
        """Raise ValueError for an entry of a visible token outside the cache: JITATTN_CHECK."""
        size = self.entry_tokens(page_size)
        first, last = first // size, (lens + size - 1) // size
        width = int(last.max()) if last.numel() else 0
        entries = self._entries_of_all(width)
        for which, (name, count) in enumerate(num_pages.items()):
            ids = entries if entries.dim() == 2 else entries[:, which]
            _check_entries(name, ids, first, last, count * page_size // size)

    def _entries_of_all(self, width: int) -> Tensor:
        raise NotImplementedError


def _check_entries(name: str, ids: Tensor, first: Tensor, last: Tensor, end: int) -> None:
    columns = torch.arange(ids.shape[1], device=ids.device)
    is_read = (columns >= first[:, None]) & (columns < last[:, None])
    wrong = is_read & ((ids < 0) | (ids >= end))
    worst = wrong.int().argmax(dim=1, keepdim=True) if ids.shape[1] else first[:, None]
    refuse_first(
        wrong.any(dim=1),
        ids.gather(1, worst)[:, 0] if ids.shape[1] else first,
        f"request {{}} has the entry {{}} for {name}: the cache ends at {end}",
    )
