"""The kernels that choose tokens and pages, run on the CPU with the real host code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jitattn
from tests.emulator.select import EmulatedCard, card, random_card
from tests.support import choices
from tests.support.choices import Batch, Choice, Index, Pages
from tests.support.examples import examples

__all__ = ["card", "random_card"]  # fixtures

MIXED = Batch(q_lens=(3, 0, 1, 6), kv_lens=(130, 7, 64, 4), behind=2, page_size=16)
SEPARATE = Batch(
    table="separate", page_size=3, is_int64=True, q_lens=(1, 2, 3), kv_lens=(70, 0, 133)
)
LONG = Batch(table="csr", q_lens=(1, 2), kv_lens=(1500, 300), page_size=64)


def test_logits(card: EmulatedCard) -> None:
    choices.check_index(Index(MIXED, 5, 128, "token"), "cpu")
    card.seed = 7  # of the order of lanes, and of copies that land as late as they may
    choices.check_index(Index(MIXED, 5, 128, "page"), "cpu")
    assert {name.partition("_d128")[0] for name in card.launched} == {"jitattn_index_logits"}


@pytest.mark.parametrize("shift", [0, 4])
def test_logits_of_many_heads(card: EmulatedCard, shift: int) -> None:
    """Two tiles of heads; more keys than a CTA holds the places of."""
    if shift == 0:
        choices.check_index(Index(SEPARATE, 100), "cpu")
    choices.check_index(Index(SEPARATE, 5, 128, "page", shift), "cpu")
    choices.check_index(Index(LONG, 5, 128, "page", shift, has_out=shift > 0), "cpu")
    choices.check_index(Index(replace(MIXED, table="token"), 5, has_out=False), "cpu")


def test_logits_of_few_ctas(card: EmulatedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of many tiles, whose stages and places are used again and again."""
    monkeypatch.setattr("jitattn.kernels.select.index_logits._CTAS_PER_SM", 1)
    one_each = replace(LONG, q_lens=(1, 1), kv_lens=(1500, 1100))
    for seed, (batch, num_heads) in enumerate([(one_each, 5), (LONG, 5), (one_each, 70)]):
        card.seed = seed
        choices.check_index(Index(batch, num_heads, 32, "page"), "cpu")


def test_requests_of_many_rows(card: EmulatedCard) -> None:
    """More requests than a warp has lanes, by which a row's request is found."""
    for q_lens in ((1, 0, 2) * 23, (3, 1) * 16, (0,) * 40 + (2,)):
        kv_lens = tuple(3 + i % 4 for i, _ in enumerate(q_lens))
        batch = Batch(q_lens=q_lens, kv_lens=kv_lens, behind=1, page_size=4)
        choices.check_index(Index(batch, 3, 32, "page"), "cpu")
        choices.check_choice(Choice(batch, 2, choices.VALUES[0], 0, False), "cpu")
    assert len(card.launched) == 6


@pytest.mark.usefixtures("random_card")
class TestChoices:
    @examples(60)
    @given(st.data())
    def test_tokens(self, data: st.DataObject) -> None:
        batch = data.draw(
            choices.batches(max_len=700, max_q_len=3, tables=("shared", "csr", "token"))
        )
        k = data.draw(st.integers(1, 9) | st.sampled_from((60, 64, 65, 100, 500, 800)))
        values = data.draw(st.sampled_from(choices.VALUES))
        shift = data.draw(st.integers(0, 3))
        choices.check_choice(Choice(batch, k, values, shift, data.draw(st.booleans())), "cpu")

    @examples(20)
    @given(st.data())
    def test_pages(self, data: st.DataObject) -> None:
        batch = data.draw(choices.one_each(max_len=300))
        k = data.draw(st.sampled_from((2, 3, 5, 64, 200)))
        choices.check_pages(Pages(batch, k=k), "cpu", has_out=data.draw(st.booleans()))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
    def test_bounds(self, dtype: torch.dtype) -> None:
        batch = Batch(kv_lens=(70, 0, 33, 5), q_lens=(1,) * 4, page_size=8)
        for is_pair, layout in ((False, "NHD"), (True, "HND")):
            pages = Pages(batch, dtype=dtype, kv_layout=layout, is_pair=is_pair)
            choices.check_bounds(pages, "cpu")


@pytest.mark.usefixtures("random_card")
def test_what_is_nowhere() -> None:
    """A request that is too long, or has no page, is answered so that attention says NaN."""
    nowhere = 2**31 - 1
    table = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)
    lens = torch.tensor([8, 9], dtype=torch.int32)
    logits = torch.arange(16, dtype=torch.float32).view(2, 8)
    pages = jitattn.BlockTable(table)
    lists = jitattn.select_tokens(logits, pages, lens, 2)
    assert lists.slots.tolist() == [[nowhere, nowhere], [nowhere, -1]]
    assert lists.counts is not None and lists.counts.tolist() == [2, 1]
    bounds = torch.ones(3, 2, 1, 64, dtype=torch.float16)
    found = jitattn.select_pages(torch.ones(2, 1, 64), bounds, pages, lens, 2, page_size=4)
    assert found.pages.tolist() == [[[0, nowhere]], [[nowhere, -1]]]


def test_logits_that_are_nowhere(card: EmulatedCard) -> None:
    table = torch.tensor([[0, 7, 1], [1, 2, 0]], dtype=torch.int32)
    q = torch.ones(2, 5, 128).to(torch.float8_e4m3fn)
    cache = torch.zeros(3, 4, 132, dtype=torch.uint8)
    lens = torch.tensor([12, 13], dtype=torch.int32)
    arguments = q, torch.ones(2, 5), cache, jitattn.BlockTable(table), lens
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    logits = jitattn.index_logits(*arguments, offsets, max_q_len=4, max_kv_len=12)
    assert logits[0].isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert logits[1].isnan().all()


@pytest.mark.usefixtures("random_card")
def test_launches_of_other_addresses() -> None:
    """A call like an earlier one is not checked again: alignment and memory in common are."""
    memory = torch.randn(2, 48)
    pages = jitattn.BlockTable(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    lens = torch.tensor([16, 9], dtype=torch.int32)
    for shift in (0, 1, 3, 0, 4):
        logits = memory[:, shift : shift + 16]
        found = jitattn.select_tokens(logits, pages, lens, 5)
        want = [choices.largest(logits[i, :n].tolist(), 5) for i, n in enumerate((16, 9))]
        assert found.slots.tolist() == [want[0], [16 + i for i in want[1]]]
    slots, counts = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    jitattn.select_tokens(memory[:, :16], pages, lens, 5, out=jitattn.IndexLists(slots, counts))
    shared = memory.view(torch.int32)[0, 8:18].view(2, 5)
    with pytest.raises(ValueError, match=r"out\[0\] shares memory with logits"):
        jitattn.select_tokens(
            memory[:, :16], pages, lens, 5, out=jitattn.IndexLists(shared, counts)
        )


def test_a_cache_of_an_odd_address(card: EmulatedCard) -> None:
    memory = torch.zeros(3 * 4 * 132 + 8, dtype=torch.uint8)
    table = jitattn.BlockTable(torch.tensor([[0, 1, 2]], dtype=torch.int32))
    q, lens = torch.ones(4, 5, 128).to(choices.E4M3), torch.tensor([9])
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    for shift in (0, 4, 8, 2):
        cache = memory[shift : shift + 3 * 4 * 132].view(3, 4, 132)
        arguments = q, torch.ones(4, 5), cache, table, lens, offsets
        if shift == 2:
            with pytest.raises(ValueError, match="multiples of 4 bytes"):
                jitattn.index_logits(*arguments, max_q_len=4)
        else:
            assert (
                jitattn.index_logits(*arguments, max_q_len=4)[3].tolist()
                == [0.0] * 9 + [-torch.inf] * 3
            )
    assert len(card.launched) == 3


@pytest.mark.usefixtures("random_card")
def test_what_tensors_hold_is_checked_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_CHECK", "1")
    good, bad = (
        jitattn.BlockTable(torch.tensor([[0, 1], [2, last]], dtype=torch.int32)) for last in (3, -1)
    )
    lens = torch.tensor([8, 8], dtype=torch.int32)
    logits, query = torch.randn(2, 8), torch.ones(2, 1, 64)
    keys = torch.randn(4, 2, 4, 1, 64).bfloat16()
    bounds = jitattn.page_bounds(keys, good, lens)
    assert jitattn.select_tokens(logits, good, lens, 8).counts is not None
    jitattn.select_pages(query, bounds, good, lens, 2)
    with pytest.raises(ValueError, match="JITATTN_CHECK: request 1 has a token that its table"):
        jitattn.select_tokens(logits, bad, lens, 8)
    with pytest.raises(ValueError, match="JITATTN_CHECK: request 1 has a token at slot -1"):
        jitattn.page_bounds(keys, bad, lens)
    with pytest.raises(ValueError, match="JITATTN_CHECK: request 1 has a token at slot -1"):
        jitattn.select_pages(query, bounds, bad, lens, 2)
    with pytest.raises(ValueError, match=r"JITATTN_CHECK: seq_lens\[0\] is 9: there is room"):
        jitattn.select_tokens(logits, good, lens + 1, 8)
