"""The page manager on a card: scratch, tiers, tables and forks, through kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given

from jitattn import kv
from tests.gpu.device import DEVICE
from tests.support import kv_tables
from tests.support.examples import examples
from tests.support.harness import forbid_waiting
from tests.support.kv_quantised import KV_DTYPES, check_pages_that_move
from tests.support.kv_serving import Pressure, check_tables_written_in_place, check_worked_example


def test_the_worked_example() -> None:
    """Kernels that launch while their predecessor ends write what it has just read."""
    scratch = ((False, 0), (True, 0), (True, 2), (True, 33))
    assert check_worked_example("cuda", scratch, num_decoded=3) == [32, 5, 6, 6]


@pytest.mark.parametrize("seed", range(2))
def test_attention_under_pressure_is_that_of_a_contiguous_cache(seed: int) -> None:
    Pressure("cuda", seed, slots=60, host_slots=20).run(200)


def make(device: str) -> tuple[kv.KVCacheManager, list[kv.KVSequence]]:
    layers = [
        kv.LayerConfig(layer_id=i, num_kv_heads=heads, head_dim=16, window_left=20)
        for i, heads in enumerate((1, 2, 1, 1, 2))
    ]
    manager = kv.KVCacheManager(
        kv.KVCacheConfig(page_size=4, gpu_bytes=1 << 20, layers=layers, reuse_scratch=True),
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
    for layer, mode in itertools.product(range(5), kv.PageIndexMode):
        if mode is kv.PageIndexMode.SHARED:
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
    layers = [kv.LayerConfig(layer_id=0, num_kv_heads=8, head_dim=128)]
    slot_bytes = sum(layers[0].part_bytes(32))
    manager = kv.KVCacheManager(
        kv.KVCacheConfig(
            page_size=32, gpu_bytes=64 * slot_bytes, host_bytes=200 * slot_bytes, layers=layers
        ),
        device="cuda",
    )
    cache = manager.layer_view(0, kv.PageIndexMode.SHARED).kv_cache
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


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_of_four_bits_keep_numbers_and_scales(kv_dtype: str, kv_layout: str) -> None:
    check_pages_that_move(kv_dtype, DEVICE, kv_layout)


def test_a_replay_reads_tables_that_were_written_in_place() -> None:
    check_tables_written_in_place("cuda")


# --- tables by the kernel -------------------------------------------------------------------------


@examples(150)
@given(kv_tables.table_calls())
def test_random_tables_of_layers(example: kv_tables.Tables) -> None:
    kv_tables.check_layer_tables(example, DEVICE)


@pytest.mark.parametrize("layout", ["dense", "transposed"])
def test_tables_of_many_layers_and_blocks(layout: str) -> None:
    kv_tables.check_layer_tables(kv_tables.Tables(70, 300, 260, (61, 2, 1), 5, layout, 1), DEVICE)


def twins(seed: int) -> kv_tables.Twins:
    return kv_tables.Twins(kv_tables.make_manager(DEVICE), kv_tables.make_manager("cpu"), seed)


@pytest.mark.parametrize("seed", range(6))
def test_tables_after_random_operations(seed: int) -> None:
    both = twins(seed)
    both.run(300)
    assert both.counts["scratch"] > 10
    assert set(both.counts) >= {"advance", "resize", "rewind", "suspend", "resume", "close"}


def test_tables_with_scratch() -> None:
    kv_tables.check_scratch(twins(0))


def grown(manager: kv.KVCacheManager, *lengths: int) -> list[kv.KVSequence]:
    seqs = [manager.create_sequence() for _ in lengths]
    for seq, length in zip(seqs, lengths, strict=True):
        assert seq.resume()
        assert seq.resize(length)
    return seqs


def test_calls_that_queue_up_bring_what_was_known_then() -> None:
    """Kernels come long after their calls; pinned memory is not written again until then."""
    managers = [kv_tables.make_manager(device, reuse_scratch=False) for device in (DEVICE, "cpu")]
    ours, theirs = (grown(manager, 20, 3, 60) for manager in managers)
    outs = torch.full((100, 3, 40), 7, dtype=torch.int32, device=DEVICE)
    views = [manager.layer_view(1, kv.PageIndexMode.PER_LAYER) for manager in managers]
    views[0].block_table(ours, out=outs[0])
    wanted = torch.full((100, 3, 40), 7, dtype=torch.int32)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for step in range(100):
        for seqs in (ours, theirs):
            seq = seqs[step % 3]
            assert seq.resize(3 + (step * 7) % 90)
        with forbid_waiting():
            views[0].block_table(ours, out=outs[step])
        views[1].block_table(theirs, out=wanted[step])
    assert torch.equal(outs.cpu(), wanted)


def test_a_captured_graph_reads_tables_that_change() -> None:
    managers = kv_tables.make_manager(DEVICE), kv_tables.make_manager("cpu")
    ours, theirs = (grown(manager, 9, 1, 33) for manager in managers)
    groups = managers[0].layer_groups
    outs = [
        torch.full((len(g.layer_ids), 3, 40), 7, dtype=torch.int32, device=DEVICE) for g in groups
    ]
    seen = [torch.zeros_like(out) for out in outs]
    for group, out in zip(groups, outs, strict=True):
        managers[0].block_tables(ours, group, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy, out in zip(seen, outs, strict=True):
            copy.copy_(out)
    for step in range(60):
        for manager, seqs in zip(managers, (ours, theirs), strict=True):
            room = [seq.capacity - seq.history_len for seq in seqs]
            assert manager.advance(seqs, [[step] * n for n in room], num_inputs=1) == [True] * 3
        for group, out in zip(groups, outs, strict=True):
            managers[0].block_tables(ours, group, out=out)
        graph.replay()
        for group, copy in zip(groups, seen, strict=True):
            wanted = torch.full(copy.shape, 7, dtype=torch.int32)
            managers[1].block_tables(theirs, group, out=wanted)
            assert torch.equal(copy.cpu(), wanted)


def test_a_capture_of_tables_is_refused() -> None:
    manager = kv_tables.make_manager(DEVICE)
    seqs = grown(manager, 9)
    out = torch.full((1, 40), 7, dtype=torch.int32, device=DEVICE)
    view = manager.layer_view(1, kv.PageIndexMode.SHARED)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.add_(1)
        with pytest.raises(kv.KVCacheError, match="before the replay"):
            view.block_table(seqs, out=out)
    graph.replay()
    assert out.unique().tolist() == [8]
    view.block_table(seqs, out=out)
    assert out[0, :3].tolist() == seqs[0].base_page_ids(manager.layer_groups[1]).tolist()
