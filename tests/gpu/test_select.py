"""index_logits, select_tokens, page_bounds and select_pages on a device, eager and captured."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jitattn
from tests.gpu.device import DEVICE
from tests.support import choices
from tests.support.choices import Batch, Choice, Index, Pages
from tests.support.examples import examples
from tests.support.harness import captured, forbid_waiting

LONG = Batch(kv_lens=(131_072, 1, 0, 70_001, 8192, 8193), q_lens=(1,) * 6, page_size=64)
SIZES = ((64, 128), (32, 128), (5, 128), (100, 128), (16, 64))


@examples(100)
@given(st.data())
def test_random_logits(data: st.DataObject) -> None:
    batch = data.draw(choices.batches(max_len=3000))
    sizes = data.draw(st.sampled_from(SIZES))
    layout = data.draw(st.sampled_from(("page", "token")))
    shift = data.draw(st.sampled_from((0, 4, 16)))
    has_out = data.draw(st.booleans())
    choices.check_index(Index(batch, *sizes, layout, shift, has_out=has_out), DEVICE)


@pytest.mark.parametrize("sizes", SIZES)
def test_long_requests(sizes: tuple[int, int]) -> None:
    batch = replace(LONG, kv_lens=(40_000, 1, 0, 9001), q_lens=(1, 3, 0, 2), behind=1)
    choices.check_index(Index(batch, *sizes), DEVICE)


@examples(400)
@given(st.data())
def test_random_tokens(data: st.DataObject) -> None:
    max_len = data.draw(st.sampled_from((300, 20_000)))
    batch = data.draw(choices.batches(max_len=max_len, tables=("shared", "csr", "token")))
    k = data.draw(st.integers(1, 9) | st.sampled_from((64, 2048, 4096, 5000, 9000)))
    values = data.draw(st.sampled_from(choices.VALUES))
    shift = data.draw(st.integers(0, 3))
    choices.check_choice(Choice(batch, k, values, shift, data.draw(st.booleans())), DEVICE)


@pytest.mark.parametrize("values", choices.VALUES)
@pytest.mark.parametrize("k", [1, 64, 2048, 4096, 4097])
def test_tokens_of_long_requests(k: int, values: str) -> None:
    choices.check_choice(Choice(LONG, k, values), DEVICE)


@examples(150)
@given(st.data())
def test_random_pages(data: st.DataObject) -> None:
    batch = data.draw(choices.one_each(max_len=data.draw(st.sampled_from((300, 20_000)))))
    head_dim = data.draw(st.sampled_from((64, 128, 256)))
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float16)))
    k = data.draw(st.sampled_from((2, 3, 16, 200)))
    pages = Pages(batch, 2, data.draw(st.integers(1, 5)), head_dim, dtype, k=k)
    choices.check_pages(pages, DEVICE, has_out=data.draw(st.booleans()))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8],
)
@pytest.mark.parametrize(("page_size", "table"), [(1, "csr"), (8, "shared"), (128, "shared")])
def test_bounds(dtype: torch.dtype, page_size: int, table: str) -> None:
    batch = Batch(kv_lens=(700, 0, 333, 5, 129), q_lens=(1,) * 5, page_size=page_size, table=table)
    for is_pair, layout in itertools.product((False, True), ("NHD", "HND")):
        pages = Pages(batch, 8, 1, 128, dtype, layout, is_pair, steps=(1, 130))
        choices.check_bounds(pages, DEVICE)


def test_a_step_is_captured() -> None:
    """Indexer and choice in one graph, which waits for nothing and follows lengths and values."""
    batch = Batch(kv_lens=(9000, 300), q_lens=(1, 1), page_size=64)
    cache, _, _ = choices.index_cache(Index(batch, 64), DEVICE)
    pages, lens = batch.pages(DEVICE), batch.lens(DEVICE)
    q = torch.randn(2, 64, 128, device=DEVICE).to(torch.float8_e4m3fn)
    weights = torch.rand(2, 64, device=DEVICE)
    width = batch.width * 64
    logits = torch.empty(2, width, device=DEVICE)
    lists = jitattn.IndexLists(
        torch.empty(2, 2048, dtype=torch.int32, device=DEVICE),
        torch.empty(2, dtype=torch.int32, device=DEVICE),
    )

    def step() -> None:
        jitattn.index_logits(q, weights, cache, pages, lens, out=logits)
        jitattn.select_tokens(logits, pages, lens, 2048, out=lists)

    step()
    with forbid_waiting():
        step()
    graph = captured(step)
    for kv_lens in ((9000, 300), (1, 0), (2048, 299)):
        lens.copy_(torch.tensor(kv_lens))
        weights.uniform_()
        logits.fill_(math.nan)
        graph.replay()
        found = logits.clone(), lists.slots.clone(), lists.counts.clone()  # type: ignore[union-attr]
        step()
        for one, other in zip(found, (logits, *lists.tensors), strict=True):
            assert torch.equal(one, other)
        assert found[2].tolist() == [min(n, 2048) for n in kv_lens]


def test_pages_are_captured() -> None:
    batch = Batch(kv_lens=(900, 300), q_lens=(1, 1), page_size=16)
    pages, lens = batch.pages(DEVICE), batch.lens(DEVICE)
    cache = torch.randn(batch.num_pages, 2, 16, 2, 64, device=DEVICE).bfloat16()
    q = torch.randn(2, 8, 64, device=DEVICE).bfloat16()
    bounds = jitattn.page_bounds(cache, pages, lens)
    lists = jitattn.select_pages(q, bounds, pages, lens, 8)

    def step() -> None:
        jitattn.page_bounds(cache, pages, lens, out=bounds)
        jitattn.select_pages(q, bounds, pages, lens, 8, out=lists)

    step()
    with forbid_waiting():
        step()
    graph = captured(step)
    cache.normal_()
    q.normal_()
    graph.replay()
    found = [one.clone() for one in lists.tensors]
    step()
    for one, other in zip(found, lists.tensors, strict=True):
        assert torch.equal(one, other)
