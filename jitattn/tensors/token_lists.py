"""What sparse attention reads: ``IndexLists`` of tokens, ``PageLists`` of pages a KV head.

Both are values that hold their tensors, as page tables are. They come from kernels on the device,
so nothing of what they list is known to the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import type_name
from jitattn.spec.config import MAX_KV_LEN
from jitattn.spec.layout import ListLayout
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.tensor_checks import (
    check_device,
    check_last_stride,
    check_rows,
    check_tensor,
    refuse_first,
)

_INT32 = (torch.int32,)


class TokenLists(PlannedTable):
    """Lists of one width, and how much of each counts; attributes are set once."""

    __slots__ = ()

    layout: ListLayout
    counts: Tensor | None

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> Self:
        """Return the lists of ``tensors``, as the attribute of that name has them."""
        return cls(*tensors)

    @property
    def batch_size(self) -> int:
        """Query tokens, or requests, that have lists."""
        return self.num_lists

    @property
    def width(self) -> int:
        """Entries of a list, k, of which ``counts`` may let fewer count."""
        return self.tensors[0].shape[-1]

    @property
    def num_lists(self) -> int:
        """Query tokens, or requests, that have lists."""
        return self.tensors[0].shape[0]

    def count_of(self, *indices: int) -> int:
        """Return how many entries of a list are looked at; the list by its indices."""
        if self.counts is None:
            return self.width
        return min(max(int(self.counts[indices[: self.counts.dim()]]), 0), self.width)

    def fill(self, params: ctypes.Structure) -> None:
        """Write addresses and strides into ``struct PageTable`` of the layout."""
        entries, counts = self.tensors[0], self.counts
        params.row_stride = entries.stride(0)
        params.head_stride = entries.stride(1) if entries.dim() == 3 else 0
        params.width = self.width
        self._fill_counts(params)
        params.counts = None if counts is None else counts.data_ptr()

    def fill_schedule(self, params: ctypes.Structure) -> None:
        """Write what ``ScheduleParams`` has of lists, but for the address of counts."""
        params.width = self.width
        self._fill_counts(params)

    def point_schedule(self, params: ctypes.Structure) -> None:
        """Write the address of counts into ``ScheduleParams``."""
        params.counts = None if self.counts is None else self.counts.data_ptr()

    def _fill_counts(self, params: ctypes.Structure) -> None:
        counts = self.counts
        has_heads = counts is not None and counts.dim() == 2
        params.num_count_heads = counts.shape[1] if has_heads else 1  # type: ignore[union-attr]
        params.count_stride = 0 if counts is None else counts.stride(0)
        params.count_head_stride = counts.stride(1) if has_heads else 0  # type: ignore[union-attr]

    def check_heads(self, num_kv_heads: int) -> None:
        """Raise ValueError where KV heads have lists or counts of their own: another number."""
        for tensor, rank in ((self.tensors[0], 3), (self.counts, 2)):
            if tensor is not None and tensor.dim() == rank and tensor.shape[1] != num_kv_heads:
                raise ValueError(
                    f"pages is {self!r}, with lists for {tensor.shape[1]} KV heads: the planner "
                    f"has {num_kv_heads}"
                )

    def check_entries(
        self, first: Tensor, lens: Tensor, num_pages: Mapping[str, int], page_size: int
    ) -> None:
        """Raise ValueError for an entry beyond the cache, of those that count: JITATTN_CHECK."""
        del first, lens
        entries, width = self.tensors[0], self.width
        places = torch.arange(width, device=self.device)
        counts = entries.new_full(entries.shape[:-1], width) if self.counts is None else self.counts
        while counts.dim() < entries.dim() - 1:
            counts = counts[:, None]
        if counts.dim() == entries.dim():  # of KV heads that share lists
            counts = counts.amax(dim=1) if counts.shape[1] else counts.new_zeros(counts.shape[0])
        for name, pages in num_pages.items():
            end = pages if self.layout.lists_pages else pages * page_size
            wrong = (entries >= end) & (places < counts[..., None])
            rows, values = wrong.flatten(1), entries.flatten(1)
            if rows.shape[1] == 0:
                continue
            worst = rows.int().argmax(dim=1, keepdim=True)
            refuse_first(
                rows.any(dim=1),
                values.gather(1, worst)[:, 0],
                f"list {{}} has the entry {{}} for {name}: the cache ends at {end}",
            )

    def _shapes(self) -> str:
        counts = "" if self.counts is None else f", counts={list(self.counts.shape)}"
        return f"{list(self.tensors[0].shape)}{counts}"


class IndexLists(TokenLists):
    """The KV tokens that each query token sees, as slots of the pool.

    A token is seen once for each time that it is listed, in no order that counts. There is no
    causal mask and no window: what is listed is seen.

    Attributes:
        slots: int32 [num_tokens, k], which every KV head reads, or [num_tokens, num_kv_heads, k]:
            page * page_size + place in the page. A negative entry is nothing, wherever it stands.
            Any strides but for the last dimension, which is contiguous.
        counts: int32 [num_tokens] or [num_tokens, num_kv_heads], whatever the rank of ``slots``,
            any strides: only so many entries of a list are looked at, those behind may hold
            anything. Less than 0 is 0, more than k is k. None is k.
    """

    __slots__ = ("counts", "slots", "tensors")

    layout = ListLayout.INDICES

    def __init__(self, slots: Tensor, counts: Tensor | None = None) -> None:
        """Hold both; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: a rank, shape, stride or device doesn't fit.
        """
        check_tensor("slots", slots, _INT32)
        if slots.dim() not in (2, 3):
            raise ValueError(
                f"slots has shape {list(slots.shape)}: expected [num_tokens, k], or [num_tokens, "
                "num_kv_heads, k] where KV heads read different tokens"
            )
        check_last_stride("slots", slots)
        if counts is not None:
            _check_counts(counts, slots)
        self.slots = slots
        self.counts = counts
        self.tensors = (slots,) if counts is None else (slots, counts)

    def __repr__(self) -> str:
        """Show the shapes."""
        return f"IndexLists({self._shapes()})"

    def capacity(self, page_size: int) -> int:
        """Return the entries of a list."""
        del page_size
        return self.width

    def fill(self, params: ctypes.Structure) -> None:
        """Write addresses and strides into the parameters."""
        super().fill(params)
        params.slots = self.slots.data_ptr()

    @property
    def num_kv_heads(self) -> int | None:
        """KV heads with lists of their own; None where all read the same."""
        return self.slots.shape[1] if self.slots.dim() == 3 else None

    def entries(self, token: int, *, kv_head: int = 0) -> Tensor:
        """Return the slots that a query token sees through a KV head, int64, repeats included."""
        listed = self.slots[token] if self.slots.dim() == 2 else self.slots[token, kv_head]
        listed = listed[: self.count_of(token, kv_head)].long()
        return listed[listed >= 0]


class PageLists(TokenLists):
    """The pages of a request that each KV head reads.

    A token's position is number * page_size + place in the page, so that lengths, causal rows,
    windows and sinks mean what they mean with tables that list every page.

    Attributes:
        pages: int32 [batch_size, num_kv_heads, k], page ids of the pool. A negative entry is
            nothing, wherever it stands.
        numbers: of the shape of ``pages``, the number of each page in its request, from 0 on and
            ascending. Both have any strides but for the last dimension, which is contiguous.
        counts: int32 [batch_size, num_kv_heads], any strides: only so many entries of a list are
            looked at, those behind may hold anything. Less than 0 is 0, more than k is k. None is
            k.
    """

    __slots__ = ("counts", "numbers", "pages", "tensors")

    layout = ListLayout.PAGE_LISTS

    def __init__(self, pages: Tensor, numbers: Tensor, counts: Tensor | None = None) -> None:
        """Hold them; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: a rank, shape, stride or device doesn't fit, or, on the CPU, numbers of
                pages that are listed don't ascend from 0 on.
        """
        check_tensor("pages", pages, _INT32)
        if pages.dim() != 3:
            raise ValueError(
                f"pages has shape {list(pages.shape)}: expected [batch_size, num_kv_heads, k]"
            )
        check_tensor("numbers", numbers, _INT32)
        if numbers.shape != pages.shape:
            raise ValueError(
                f"numbers has shape {list(numbers.shape)}: expected {list(pages.shape)}, that of "
                "pages"
            )
        check_device("numbers", numbers, pages.device)
        check_last_stride("pages", pages)
        check_last_stride("numbers", numbers)
        if counts is not None:
            check_rows("counts", counts, tuple(pages.shape[:2]), torch.int32, pages.device)
        self.pages = pages
        self.numbers = numbers
        self.counts = counts
        self.tensors = (pages, numbers) if counts is None else (pages, numbers, counts)
        if pages.device.type == "cpu" and not is_dynamo_compiling():
            self._check_numbers()

    def __repr__(self) -> str:
        """Show the shapes."""
        return f"PageLists({self._shapes()})"

    def capacity(self, page_size: int) -> int:
        """Return the most tokens that a request may have, of which lists have some.

        Raises:
            ValueError: a list has more tokens than that.
        """
        if self.width * page_size > MAX_KV_LEN:
            raise ValueError(
                f"pages is {self!r}: {self.width} pages of {page_size} tokens are more than the "
                f"{MAX_KV_LEN} of the longest request"
            )
        return MAX_KV_LEN

    def fill(self, params: ctypes.Structure) -> None:
        """Write addresses and strides into the parameters."""
        super().fill(params)
        params.page_ids = self.pages.data_ptr()
        params.numbers = self.numbers.data_ptr()
        params.number_row_stride, params.number_head_stride = self.numbers.stride()[:2]

    @property
    def num_kv_heads(self) -> int:
        """KV heads, each with lists of its own."""
        return self.pages.shape[1]

    def entries(self, request: int, kv_head: int) -> tuple[Tensor, Tensor]:
        """Return the pages that a KV head reads of a request and their numbers, int64."""
        count = self.count_of(request, kv_head)
        pages, numbers = (t[request, kv_head, :count].long() for t in (self.pages, self.numbers))
        return pages[pages >= 0], numbers[pages >= 0]

    def _check_numbers(self) -> None:
        for request in range(self.batch_size):
            for kv_head in range(self.num_kv_heads):
                last = -1
                for number in self.entries(request, kv_head)[1].tolist():
                    if number <= last:
                        raise ValueError(
                            f"numbers[{request}, {kv_head}] has {number} after {last}: expected "
                            "numbers from 0 on, ascending"
                        )
                    last = number


LIST_CLASSES: dict[ListLayout, type[TokenLists]] = {
    ListLayout.INDICES: IndexLists,
    ListLayout.PAGE_LISTS: PageLists,
}


def lists_from_tensors(tensors: Sequence[Tensor], layout: ListLayout) -> TokenLists:
    """Return the lists that a torch operator gets as tensors and a layout."""
    return LIST_CLASSES[layout].from_tensors(tensors)


def check_lists(pages: object, layout: ListLayout, name: str = "pages") -> None:
    """Raise TypeError unless ``pages`` are lists of a layout."""
    wanted = LIST_CLASSES[layout]
    if not isinstance(pages, wanted):
        raise TypeError(
            f"{name} is a {type_name(pages)}: expected a {wanted.__name__} with "
            f"page_table={layout.value!r}"
        )


def _check_counts(counts: Tensor, slots: Tensor) -> None:
    """Raise unless ``counts`` has a number for each query token, or for each of its KV heads."""
    check_tensor("counts", counts, _INT32)
    shape, wanted = list(counts.shape), list(slots.shape[:-1])
    # Of slots that all heads read, only the table's users know how many heads there are.
    if shape not in (wanted, wanted[:1]) and (slots.dim() == 3 or shape[:-1] != wanted):
        raise ValueError(
            f"counts has shape {shape}: expected [{wanted[0]}] or [{wanted[0]}, "
            f"{wanted[1] if slots.dim() == 3 else 'num_kv_heads'}]"
        )
    check_device("counts", counts, slots.device)
