"""build_block_table, batch_info and convert_pages on a device, eager and captured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE
from tests.support.cases import Case
from tests.support.examples import examples
from tests.support.harness import captured, forbid_waiting
from tests.support.transfers import (
    Slots,
    Tokens,
    check_batch_info,
    check_block_table,
    check_conversions,
    paged_cases,
    slot_tables,
    token_batches,
)


@examples(200)
@given(slot_tables(may_break=True))
def test_random_block_tables(example: Slots) -> None:
    check_block_table(example, DEVICE)


@pytest.mark.parametrize("source", ["tensor", "table", "csr"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 100, 1000])
def test_every_page_size(page_size: int, source: str) -> None:
    sizes = {page_size - 1, page_size, page_size + 1, 3 * page_size, 2 * page_size + 1, 0, -1}
    example = Slots(page_size, tuple(sorted(sizes)), source=source, room=page_size)
    check_block_table(example, DEVICE)
    broken = tuple((b, n - 1) for b, n in enumerate(example.lengths) if n > 0)
    check_block_table(replace(example, broken=broken), DEVICE)


def test_many_requests() -> None:
    rng = random.Random(3)
    lengths = tuple(rng.randint(-1, 200) for _ in range(700))
    check_block_table(Slots(16, lengths, rows=torch.int64, is_mapped=True), DEVICE)


def test_slots_that_lead_nowhere() -> None:
    """Slots outside the map, mapped to nothing, rows outside, tokens past the slots: -1."""
    slots = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 99, 2**31 - 1]], device=DEVICE)
    slot_map = torch.arange(10, device=DEVICE)
    slot_map[5] = -1
    lens = torch.tensor([4, 4, 4, 8, 4, 2**40], device=DEVICE)
    rows = torch.tensor([0, 1, 2, 0, 3, 0], device=DEVICE)
    out = torch.full((6, 4), 77, dtype=torch.int32, device=DEVICE)
    table = jitattn.build_block_table(slots, lens, 2, rows=rows, slot_map=slot_map, out=out)
    want = [[0, 1], [-1, 3], [4, -1], [0, 1], [-1, -1], [0, 1]]
    assert table.table.tolist() == [[*row, -1, -1] for row in want]


def test_tables_are_replayed() -> None:
    slots = torch.zeros((9, 70), dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    lens = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    out = torch.zeros((4, 5), dtype=torch.int32, device=DEVICE)

    def call() -> None:
        jitattn.build_block_table(slots, lens, 16, rows=rows, out=out)

    graph = captured(call)
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randperm(9 * 5, generator=rng).view(9, 5)
        dense = (ids[:, :, None] * 16 + torch.arange(16)).flatten(1)[:, :70]
        slots.copy_(dense)
        rows.copy_(torch.randperm(9, generator=rng)[:4])
        some = torch.randint(-1, 71, (4,), generator=rng)
        lens.copy_(some)
        graph.replay()
        want = ids[rows.cpu()].int()
        want[torch.arange(5) >= (some.clamp(min=0)[:, None] + 15) // 16] = -1
        assert torch.equal(out.cpu(), want)


def test_tables_wait_for_nothing() -> None:
    slots = torch.arange(64, dtype=torch.int32, device=DEVICE).view(2, 32)
    lens = torch.tensor([32, 5], device=DEVICE)
    jitattn.build_block_table(slots, lens, 8)
    with forbid_waiting():
        table = jitattn.build_block_table(slots, lens, 8)
    assert table.table.tolist() == [[0, 1, 2, 3], [4, -1, -1, -1]]


# --- batch_info -----------------------------------------------------------------------------------


@examples(150)
@given(token_batches())
def test_random_batches(example: Tokens) -> None:
    check_batch_info(example, DEVICE)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 3000])
def test_infos_of_many_requests(count: int) -> None:
    rng = random.Random(count)
    kv_lens = tuple(rng.choice((0, 1, 5, 40, -2)) for _ in range(count))
    q_lens = tuple(rng.randint(0, max(n, 0)) for n in kv_lens)
    check_batch_info(Tokens(kv_lens, q_lens, "shared", spare=300), DEVICE)


def test_long_requests() -> None:
    check_batch_info(Tokens((70_000, 3), (66_000, 1), None, spare=1), DEVICE)


def test_more_tokens_than_there_is_room_for() -> None:
    """Tokens past num_tokens are left out; the offsets count them."""
    lens, q_lens = (torch.tensor(x, device=DEVICE) for x in ([9, 2**40, 3], [4, 2**40, 3]))
    info = jitattn.batch_info(lens, q_lens, num_tokens=6)
    assert info.requests.tolist() == [0, 0, 0, 0, 1, 1]
    assert info.positions.tolist() == [5, 6, 7, 8, 0, 1]
    assert info.qo_indptr.tolist() == [0, 4, 2**31 - 1, 2**31 - 1]
    assert info.kv_indptr.tolist() == [0, 9, 2**31 - 1, 2**31 - 1]


def test_slots_past_the_table() -> None:
    pages = jitattn.BlockTable(torch.tensor([[3], [-1]], dtype=torch.int32, device=DEVICE))
    lens = torch.tensor([5, 2], device=DEVICE)
    info = jitattn.batch_info(
        lens, torch.tensor([3, 2], device=DEVICE), num_tokens=5, pages=pages, page_size=4
    )
    assert info.positions.tolist() == [2, 3, 4, 0, 1]
    assert info.slots.tolist() == [14, 15, -1, -1, -1]


def test_infos_are_replayed() -> None:
    lens = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    q_lens = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    table = torch.arange(30, dtype=torch.int32, device=DEVICE).view(6, 5)
    pages = jitattn.BlockTable(table)
    info = jitattn.batch_info(lens, q_lens, num_tokens=40, pages=pages, page_size=16)

    def call() -> None:
        jitattn.batch_info(lens, q_lens, num_tokens=40, pages=pages, page_size=16, out=info)

    graph = captured(call)
    for seed in range(5):
        rng = random.Random(seed)
        kv = [rng.randint(0, 80) for _ in range(6)]
        q = [rng.randint(0, min(n, 6)) for n in kv]
        ids = list(range(30))
        rng.shuffle(ids)
        table.copy_(torch.tensor(ids).view(6, 5))
        lens.copy_(torch.tensor(kv))
        q_lens.copy_(torch.tensor(q))
        graph.replay()
        tokens = [
            (b, n - m + i) for b, (n, m) in enumerate(zip(kv, q, strict=True)) for i in range(m)
        ]
        padding = [-1] * (40 - len(tokens))
        assert info.requests.tolist() == [b for b, _ in tokens] + padding
        assert info.positions.tolist() == [p for _, p in tokens] + padding
        want = [ids[5 * b + p // 16] * 16 + p % 16 for b, p in tokens]
        assert info.slots.tolist() == want + padding


# --- conversions ----------------------------------------------------------------------------------


@examples(60)
@given(paged_cases())
def test_random_conversions(case: Case) -> None:
    check_conversions(case, DEVICE)


def test_conversions_can_be_captured() -> None:
    table = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)
    lens = torch.tensor([16, 3, 9], device=DEVICE)
    arguments = {"page_size": 4, "seq_lens": lens}

    def call() -> tuple[Tensor, ...]:
        csr = jitattn.pages.convert_pages(jitattn.BlockTable(table), "csr", **arguments)
        token = jitattn.pages.convert_pages(csr, "token", max_kv_len=16, **arguments)
        shared = jitattn.pages.convert_pages(token, "shared", **arguments)
        separate = jitattn.pages.convert_pages(token, "separate", **arguments)
        return (*csr.tensors, *token.tensors, *separate.tensors, *shared.tensors)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    lens.copy_(torch.tensor([2, 16, 0]))
    table.copy_(table.flip(0).clone())
    graph.replay()
    for got, want in zip(captured, call(), strict=True):
        assert torch.equal(got, want)
    assert captured[0].tolist() == [0, 1, 5, 5]
    assert captured[-1].tolist() == [[8, -1, -1, -1], [4, 5, 6, 7], [-1] * 4]
