"""Choices under ``torch.compile``: one graph, and the same as eager calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import jitattn
from tests.support import choices
from tests.support.choices import Batch, Index

BATCH = Batch(q_lens=(1, 2), kv_lens=(70, 33), page_size=8)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("has_out", [False, True])
def test_tokens(has_out: bool, backend: str) -> None:
    cache, _, _ = choices.index_cache(Index(BATCH, 3, 32), "cpu")
    weights, pages, lens = torch.rand(3, 3), BATCH.pages("cpu"), BATCH.lens("cpu")
    queries = BATCH.queries("cpu")
    logits = torch.zeros(3, BATCH.width * 8) if has_out else None
    lists = None
    if has_out:
        slots, counts = torch.zeros(3, 9, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        lists = jitattn.IndexLists(slots, counts)

    def step(x: Tensor) -> tuple[Tensor, jitattn.IndexLists]:
        q = x.to(choices.E4M3)
        found = jitattn.index_logits(q, weights, cache, pages, lens, **queries, out=logits)  # type: ignore[arg-type]
        chosen = jitattn.select_tokens(
            found,
            pages,
            lens,
            9,
            **queries,
            page_size=8,
            out=lists,  # type: ignore[arg-type]
        )
        return found + 0, chosen

    x = torch.randn(3, 3, 32)
    want, wanted = step(x)
    kept = [one.clone() for one in wanted.tensors]
    got, found = torch.compile(step, fullgraph=True, backend=backend)(x)
    assert torch.equal(got, want)
    assert all(map(torch.equal, found.tensors, kept))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("has_out", [False, True])
def test_pages(has_out: bool, backend: str) -> None:
    batch = Batch(kv_lens=(70, 33), q_lens=(1, 1), page_size=8)
    cache = torch.randn(batch.num_pages, 2, 8, 2, 16).bfloat16()
    pages, lens = batch.pages("cpu"), batch.lens("cpu")
    bounds = jitattn.page_bounds(cache, pages, lens)
    query = torch.randn(2, 4, 16)
    lists = jitattn.select_pages(query, bounds, pages, lens, 3) if has_out else None

    def step(q: Tensor) -> jitattn.PageLists:
        jitattn.page_bounds(cache, pages, lens, out=bounds)
        return jitattn.select_pages(2 * q, bounds, pages, lens, 3, page_size=8, out=lists)

    kept = [one.clone() for one in step(query).tensors]
    found = torch.compile(step, fullgraph=True, backend=backend)(query)
    assert all(map(torch.equal, found.tensors, kept))


def test_bounds_of_all_pages_are_found_outside() -> None:
    batch = Batch(kv_lens=(70, 33), q_lens=(1, 1), page_size=8)
    cache = torch.randn(batch.num_pages, 2, 8, 2, 16).bfloat16()
    call = torch.compile(jitattn.page_bounds, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="out is None inside a compiled function"):
        call(cache, batch.pages("cpu"), batch.lens("cpu"))
