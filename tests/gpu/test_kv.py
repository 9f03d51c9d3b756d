"""The page manager on a card: scratch, tiers, tables and forks, through kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig, PageIndexMode
from tests.kv_serving import Pressure, check_tables_written_in_place, check_worked_example


def test_the_worked_example() -> None:
    """Kernels that launch while their predecessor ends write what it has just read."""
    scratch = ((False, 0), (True, 0), (True, 2), (True, 33))
    assert check_worked_example("cuda", scratch, num_decoded=3) == [32, 5, 6, 6]


@pytest.mark.parametrize("seed", range(2))
def test_attention_under_pressure_is_that_of_a_contiguous_cache(seed: int) -> None:
    Pressure("cuda", seed, slots=60, host_slots=20).run(200)


def make(device: str) -> tuple[KVCacheManager, list[KVSequence]]:
    layers = [
        LayerConfig(layer_id=i, num_kv_heads=heads, head_dim=16, window_left=20)
        for i, heads in enumerate((1, 2, 1, 1, 2))
    ]
    manager = KVCacheManager(
        KVCacheConfig(page_size=4, gpu_bytes=1 << 20, layers=layers, reuse_scratch=True),
        device=device,
    )
    seqs = [manager.create_sequence() for _ in range(3)]
    for seq, length in zip(seqs, (90, 7, 33), strict=True):
        assert seq.resume()
        assert seq.resize(length)
    return manager, seqs


def test_tables_are_those_of_the_host() -> None:
    (on_card, seqs), (on_host, others) = make("cuda"), make("cpu")
    found = on_card.block_tables(seqs, 0)
    assert found.is_cuda
    assert torch.equal(found.cpu(), on_host.block_tables(others, 0))
    for layer, mode in itertools.product(range(5), PageIndexMode):
        if mode is PageIndexMode.SHARED:
            continue
        out = torch.full((6, 40), 7, dtype=torch.int32, device="cuda")
        rows = torch.tensor([4, 0, 2], device="cuda")
        view = on_card.layer_view(layer, mode)
        table = view.block_table(seqs, rows=rows, out=out)
        assert table.table is out
        wanted = on_host.layer_view(layer, mode).block_table(others).table
        assert torch.equal(out[[4, 0, 2], : wanted.shape[1]].cpu(), wanted)
        assert (out[[1, 3, 5]] == 7).all()


def test_pages_return_from_the_host_in_the_order_of_the_stream() -> None:
    """Kernels are slow here: copies that don't wait for them bring the bytes of before."""
    layers = [LayerConfig(layer_id=0, num_kv_heads=8, head_dim=128)]
    slot_bytes = sum(layers[0].part_bytes(32))
    manager = KVCacheManager(
        KVCacheConfig(
            page_size=32, gpu_bytes=64 * slot_bytes, host_bytes=200 * slot_bytes, layers=layers
        ),
        device="cuda",
    )
    cache = manager.layer_view(0, PageIndexMode.SHARED).kv_cache
    assert isinstance(cache, torch.Tensor)
    seqs = [manager.create_sequence() for _ in range(3)]
    for turn in range(6):
        for i, seq in enumerate(seqs):
            assert seq.resume()
            assert seq.resize(60 * 32, seq.history_len)
            ids = torch.from_numpy(seq.base_page_ids(0)).long().cuda()
            if turn:
                assert bool((cache[ids] == 10 * (turn - 1) + i).all())
            torch.cuda._sleep(20_000_000)
            cache[ids] = float(10 * turn + i)
            seq.suspend()
    stats = manager.stats()
    assert min(stats.offloaded_pages, stats.reloaded_pages) > 500


def test_a_replay_reads_tables_that_were_written_in_place() -> None:
    check_tables_written_in_place("cuda")
