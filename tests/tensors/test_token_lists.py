"""IndexLists and PageLists: what they hold, what counts of them, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import IndexLists, PageLists


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)


def test_tokens_that_every_head_reads() -> None:
    slots = torch.tensor([[5, -1, 5, 3], [7, 8, 9, 2]], dtype=torch.int32)
    lists = IndexLists(slots)
    assert lists.slots is slots and lists.counts is None and lists.tensors == (slots,)
    assert (lists.num_lists, lists.width, lists.num_kv_heads) == (2, 4, None)
    assert lists.entries(0).tolist() == [5, 5, 3]
    assert "IndexLists([2, 4])" in repr(lists)


def test_tokens_of_a_head() -> None:
    lists = IndexLists(ints(2, 3, 4), torch.tensor([[1, 0, 9], [-3, 4, 2]], dtype=torch.int32))
    assert lists.num_kv_heads == 3
    listed = [lists.entries(t, kv_head=h).tolist() for t in range(2) for h in range(3)]
    assert listed == [[0], [], [8, 9, 10, 11], [], [16, 17, 18, 19], [20, 21]]
    assert "counts=[2, 3]" in repr(lists)


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4)])
@pytest.mark.parametrize("counts", [(2,), (2, 3)])
def test_counts_of_a_token_or_of_its_heads(shape: tuple[int, ...], counts: tuple[int, ...]) -> None:
    lists = IndexLists(ints(*shape), torch.full(counts, 2, dtype=torch.int32))
    assert all(len(lists.entries(t, kv_head=h)) == 2 for t in range(2) for h in range(3))


def test_pages_of_a_head() -> None:
    pages = torch.tensor([[[4, -1, 2], [9, 9, 9]]], dtype=torch.int32)
    numbers = torch.tensor([[[0, -7, 5], [3, 4, 0]]], dtype=torch.int32)
    lists = PageLists(pages, numbers, torch.tensor([[3, 2]], dtype=torch.int32))
    assert (lists.batch_size, lists.num_kv_heads, lists.width, lists.num_lists) == (1, 2, 3, 1)
    assert [x.tolist() for x in lists.entries(0, 0)] == [[4, 2], [0, 5]]
    assert [x.tolist() for x in lists.entries(0, 1)] == [[9, 9], [3, 4]]
    assert len(lists.tensors) == 3 and len(PageLists(pages[:, :1], numbers[:, :1]).tensors) == 2
    assert "PageLists([1, 2, 3], counts=[1, 2])" in repr(lists)


def test_any_stride_but_the_last() -> None:
    wide = ints(4, 3, 9)
    assert IndexLists(wide[::2, :, 2:6]).entries(1, kv_head=2).tolist() == [74, 75, 76, 77]
    counts = ints(2, 2, 3)[:, 0]
    assert IndexLists(wide[::2], counts).entries(0, kv_head=2).tolist() == [18, 19]
    IndexLists(wide[:, 0, 3:4].as_strided((4, 1), (27, 5)))  # one entry: its stride means nothing


@pytest.mark.parametrize("name", ["slots", "counts", "tensors"])
def test_attributes_are_set_once(name: str) -> None:
    lists = IndexLists(ints(2, 4), ints(2))
    with pytest.raises(AttributeError, match=f"IndexLists.{name} can't be replaced"):
        setattr(lists, name, ints(2, 4))


def test_from_their_tensors() -> None:
    lists = IndexLists(ints(2, 4), ints(2))
    assert IndexLists.from_tensors(lists.tensors).tensors == lists.tensors
    assert jitattn.IndexLists is jitattn.pages.IndexLists
    assert jitattn.PageLists is jitattn.pages.PageLists


META = {"device": "meta", "dtype": torch.int32}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "slots of int64": (lambda: IndexLists(ints(2, 4).long()), "slots has dtype int64"),
    "a list": (lambda: IndexLists([[1]]), "slots is a list"),  # type: ignore[arg-type]
    "one dimension": (lambda: IndexLists(ints(4)), r"slots has shape \[4\]"),
    "four dimensions": (lambda: IndexLists(ints(1, 1, 1, 4)), "slots has shape"),
    "strided slots": (lambda: IndexLists(ints(2, 8)[:, ::2]), "slots has strides"),
    "slots on meta": (lambda: IndexLists(torch.empty(2, 4, **META)), "slots is on meta"),  # type: ignore[call-overload]
    "counts of int64": (lambda: IndexLists(ints(2, 4), ints(2).long()), "counts has dtype int64"),
    "a number": (lambda: IndexLists(ints(2, 4), 3), "counts is a int"),  # type: ignore[arg-type]
    "other tokens": (lambda: IndexLists(ints(2, 4), ints(3)), r"counts .* \[2\] or \[2, num_kv"),
    "of entries": (lambda: IndexLists(ints(2, 4), ints(2, 4, 1)), "counts has shape"),
    "other heads": (lambda: IndexLists(ints(2, 3, 4), ints(2, 2)), r"counts .* or \[2, 3\]"),
    "pages of rank 2": (lambda: PageLists(ints(2, 4), ints(2, 4)), "pages has shape"),
    "pages of int64": (lambda: PageLists(ints(1, 2, 4).long(), ints(1, 2, 4)), "pages has dtype"),
    "no numbers": (lambda: PageLists(ints(1, 2, 4), None), "numbers is a NoneType"),  # type: ignore[arg-type]
    "fewer numbers": (lambda: PageLists(ints(1, 2, 4), ints(1, 2, 3)), "numbers has shape"),
    "strided pages": (lambda: PageLists(ints(1, 2, 8)[..., ::2], ints(1, 2, 4)), "pages has str"),
    "strided numbers": (lambda: PageLists(ints(1, 2, 4), ints(1, 4, 2).mT), "numbers has strides"),
    "counts of requests": (lambda: PageLists(ints(1, 2, 4), ints(1, 2, 4), ints(1)), "counts has"),
    "numbers that fall": (
        lambda: PageLists(ints(1, 1, 3), torch.tensor([[[0, 4, 4]]], dtype=torch.int32)),
        r"numbers\[0, 0\] has 4 after 4",
    ),
    "a negative number": (lambda: PageLists(ints(1, 1, 1), ints(1, 1, 1) - 1), "numbers from 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make()
