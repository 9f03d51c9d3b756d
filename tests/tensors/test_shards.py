"""Which tokens a rank keeps, where, and what becomes of page tables."""

from __future__ import annotations

import itertools

import pytest
import torch

import jitattn
from jitattn.tensors.shards import Shard

SHARDS = [
    [Shard(size, rank, block) for rank in range(size)]
    for size, block in itertools.product((1, 2, 3), (1, 2, 16))
]


def kept(shard: Shard, count: int) -> list[int]:
    """Return which of ``count`` tokens a rank keeps, in order."""
    return [t for t in range(count) if t // shard.block % shard.num_ranks == shard.rank]


@pytest.mark.parametrize("shards", SHARDS, ids=lambda shards: repr(shards[0]))
def test_shards_take_turns(shards: list[Shard]) -> None:
    lens = torch.arange(-3, 100, dtype=torch.int32)
    for shard in shards:
        found = shard.lens(lens)
        assert found.dtype == torch.int32
        assert found.tolist() == [len(kept(shard, n)) for n in lens.tolist()]
    for n in range(100):
        assert shards[0].most(n) == max(len(kept(shard, n)) for shard in shards)


@pytest.mark.parametrize("shards", SHARDS, ids=lambda shards: repr(shards[0]))
def test_each_token_has_one_place(shards: list[Shard]) -> None:
    slots = torch.arange(-2, 100)
    for shard in shards:
        places = shard.places(slots).tolist()
        own = kept(shard, 100)
        assert [place for place in places if place >= 0] == list(range(len(own)))
        assert [
            slot for slot, place in zip(slots.tolist(), places, strict=True) if place >= 0
        ] == own
        columns = shard.columns(100, torch.device("cpu")).tolist()
        assert [column for column in columns if column < 100] == own


def dealt(num_requests: int, width: int, num_ranks: int, interleave: int) -> torch.Tensor:
    """Return a table in which each page is one of its rank."""
    rng = torch.Generator().manual_seed(7)
    blocks = -(-width // interleave)
    rounds = torch.randperm(num_requests * blocks, generator=rng).view(num_requests, blocks)
    first = (rounds * num_ranks + torch.arange(blocks) % num_ranks) * interleave
    pages = (first[:, :, None] + torch.arange(interleave)).flatten(1)
    return pages[:, :width].int()


@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("layout", ["shared", "separate", "token", "csr", "rows"])
def test_tables_of_shards(layout: str, num_ranks: int, interleave: int) -> None:
    page_size, width, num_requests = 4, 11, 3
    table = dealt(num_requests, width, num_ranks, interleave)
    slots = (table[:, :, None] * page_size + torch.arange(page_size)).flatten(1).int()
    rows = torch.tensor([2, 0, 1])
    whole = {
        "shared": lambda: jitattn.BlockTable(table),
        "separate": lambda: jitattn.BlockTable(torch.stack((table, table), dim=1)),
        "token": lambda: jitattn.TokenTable(slots),
        "csr": lambda: jitattn.CsrPages(
            torch.arange(0, 34, 11, dtype=torch.int32), table.flatten()
        ),
        "rows": lambda: jitattn.BlockTable(table[[1, 2, 0]], rows=rows),
    }[layout]()
    for rank in range(num_ranks):
        shard = Shard(num_ranks, rank, interleave * page_size)
        local = whole.shard(shard, page_size)
        for request in range(num_requests):
            own = slots[request, kept(shard, width * page_size)].long()
            found = local.slots_of(request, own.shape[0], page_size, which=1)
            assert torch.equal(found, shard.places(own))
            assert bool((found >= 0).all())


def test_a_page_of_another_rank_is_none() -> None:
    pages = jitattn.BlockTable(torch.tensor([[1, 0, 4, -1]], dtype=torch.int32))
    assert pages.shard(Shard(2, 0, 16), 16).tensors[0].tolist() == [[-1, 2]]
    assert pages.shard(Shard(2, 1, 16), 16).tensors[0].tolist() == [[-1, -1]]


def test_what_has_no_shard_or_rows() -> None:
    offsets = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="table is RaggedKV"):
        jitattn.RaggedKV(offsets).shard(Shard(2, 0, 16), 16)
    with pytest.raises(ValueError, match=r"pages is CsrPages.*give a table with rows"):
        jitattn.CsrPages(offsets, offsets).rows_of(torch.zeros(1, dtype=torch.int64))


def test_empty_tables() -> None:
    for table in (torch.zeros(0, 3), torch.zeros(2, 0), torch.zeros(0, 0)):
        found = jitattn.BlockTable(table.int()).shard(Shard(2, 1, 16), 16)
        assert found.batch_size == table.shape[0]
    empty = torch.zeros(0, dtype=torch.int32)
    pages = jitattn.CsrPages(torch.zeros(1, dtype=torch.int32), empty)
    assert pages.shard(Shard(2, 1, 16), 16).batch_size == 0
