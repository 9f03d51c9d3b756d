"""The page manager: lengths, slots, sharing, eviction, tables. Contents: test_manager_model.py."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import jitattn
import jitattn.kv
from jitattn.kv import (
    KVCacheConfig,
    KVCacheError,
    KVCacheManager,
    KVSequence,
    LayerConfig,
    PageIndexMode,
    Scratch,
)
from jitattn.kv.layout import scratch_range, stale_end
from jitattn.kv.slot_allocator import SlotAllocator

PER_LAYER, SHARED = PageIndexMode.PER_LAYER, PageIndexMode.SHARED


def layers(*windows: int, num_kv_heads: int = 1, head_dim: int = 16) -> list[LayerConfig]:
    return [
        LayerConfig(layer_id=i, num_kv_heads=num_kv_heads, head_dim=head_dim, window_left=window)
        for i, window in enumerate(windows)
    ]


def slot_bytes(configs: list[LayerConfig], page_size: int) -> int:
    return sum(sum(layer.part_bytes(page_size)) for layer in configs)


def make(
    configs: list[LayerConfig],
    *,
    page_size: int = 4,
    slots: int = 64,
    host_slots: int = 0,
    device: str | None = None,
    **options: object,
) -> KVCacheManager:
    """A manager with so many slots, where all groups take from one set."""
    groups = {layer.window_left for layer in configs}
    size = slot_bytes(configs, page_size) // len(groups)
    config = KVCacheConfig(
        page_size=page_size, gpu_bytes=slots * size, host_bytes=host_slots * size, layers=configs,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return KVCacheManager(config, device=device)


def start(manager: KVCacheManager, tokens: object, **options: object) -> KVSequence:
    """An active sequence that has computed and committed ``tokens``."""
    listed = list(tokens)  # type: ignore[call-overload]
    seq = manager.create_sequence(listed, **options)  # type: ignore[arg-type]
    assert seq.resume()
    assert seq.resize(len(listed))
    seq.commit(listed[seq.num_committed_tokens :])
    return seq


def used(manager: KVCacheManager) -> list[int]:
    return [pool.used for pool in manager.stats().pools]


# --- what it is made of


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, jitattn.kv; assert 'torch' not in sys.modules"
    root = str(Path(jitattn.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root})


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from jitattn.kv import KVCacheConfig, KVCacheManager, LayerConfig\n"
        "m = KVCacheManager(KVCacheConfig(page_size=4, gpu_bytes=1 << 20, "
        "layers=[LayerConfig(layer_id=0, num_kv_heads=1, head_dim=16)]))\n"
        "s = m.create_sequence(); s.resume(); assert s.resize(9); s.commit(range(9)); s.close()\n"
        "assert 'torch' not in sys.modules"
    )
    root = str(Path(jitattn.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root})


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("num_kv_heads", 0, ValueError),
        ("head_dim", 1.5, TypeError),
        ("window_left", -2, ValueError),
        ("dtype", "float64", ValueError),
        ("dtype", 3, TypeError),
        ("head_dim_vo", 0, ValueError),
        ("layer_id", -1, ValueError),
    ],
)
def test_layers_that_are_refused(field: str, value: object, error: type) -> None:
    given: dict[str, object] = {"layer_id": 0, "num_kv_heads": 1, "head_dim": 16, field: value}
    with pytest.raises(error, match=field if field != "layer_id" else "layer"):
        LayerConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("page_size", 0, ValueError),
        ("gpu_bytes", 0, ValueError),
        ("host_bytes", -1, ValueError),
        ("layers", [], ValueError),
        ("layers", [3], TypeError),
        ("layers", layers(1) + layers(2), ValueError),
        ("max_rewind_len", -1, ValueError),
        ("reuse_scratch", 1, TypeError),
        ("kv_layout", "HDN", ValueError),
        ("typical_len", 0, ValueError),
    ],
)
def test_configurations_that_are_refused(field: str, value: object, error: type) -> None:
    given: dict[str, object] = {"page_size": 4, "gpu_bytes": 4096, "layers": layers(-1)}
    with pytest.raises(error, match=field):
        KVCacheConfig(**{**given, field: value})  # type: ignore[arg-type]


def test_a_manager_needs_a_slot_of_each_kind() -> None:
    with pytest.raises(ValueError, match="gpu_bytes is 100: too little"):
        KVCacheManager(KVCacheConfig(page_size=4, gpu_bytes=100, layers=layers(-1)))


def test_layers_with_one_retention_rule_are_a_group() -> None:
    manager = make(layers(7, -1, 7, 3, -1))
    assert [(g.layer_ids, g.window_left) for g in manager.layer_groups] == [
        ((0, 2), 7), ((1, 4), -1), ((3,), 3),
    ]  # fmt: skip
    # Two layers and two layers share slots; one layer has others.
    assert len(manager.stats().pools) == 2


def test_unequal_shapes_share_slots_by_size() -> None:
    """4 heads of 32 and 8 of 16 are one pool; a smaller layer is another pool of the same slot."""
    configs = [
        LayerConfig(layer_id=0, num_kv_heads=4, head_dim=32, window_left=7),
        LayerConfig(layer_id=1, num_kv_heads=8, head_dim=16, window_left=7),
        LayerConfig(layer_id=2, num_kv_heads=1, head_dim=16, window_left=7, dtype="float8_e5m2"),
    ]
    manager = make(configs, device="cpu")
    big, small = manager.regions(0)
    assert big.layer_ids, small.layer_ids == ((0, 1), (2,))
    assert (big.page_bytes, big.begins) == (2 * 4 * 4 * 32 * 2, (0, 2048))
    assert small.part_bytes == ((64, 64),)
    assert big.memory.shape == (64, 4096)
    assert manager.stats().pools[0].slot_bytes == 4096 + 128
    # Scratch is as long as the pool with fewest layers asks.
    assert manager._layout.num_scratch_slots(0, 5) == 5


def test_bytes_are_split_by_what_a_typical_sequence_takes() -> None:
    configs = layers(7, -1, -1)
    config = KVCacheConfig(
        page_size=4, gpu_bytes=100 * slot_bytes(configs, 4), layers=configs, typical_len=40
    )
    windowed, full = KVCacheManager(config).stats().pools
    # 40 tokens and one more: blocks 8 to 10 of one layer, 0 to 10 of two.
    left = config.gpu_bytes - windowed.slot_bytes - full.slot_bytes  # each has one at least
    assert windowed.total == 1 + left * 3 // (3 + 22) // windowed.slot_bytes
    assert full.total == 1 + left * 22 // (3 + 22) // full.slot_bytes


# --- slots (C45)


def test_a_slot_is_freed_once() -> None:
    slots = SlotAllocator(8)
    taken = [slots.take() for _ in range(6)]
    for wrong in ([3, 5, 3], [7], [-1], [8], [taken[0], 7]):
        with pytest.raises(KVCacheError):
            slots.free(wrong)
        assert slots.num_free == 2
    slots.free([3, 5])
    with pytest.raises(KVCacheError, match="slot 5 of 8 is not taken"):
        slots.free([5])
    slots.free(set(taken) - {3, 5})
    assert {slots.take() for _ in range(8)} == set(range(8))
    with pytest.raises(KVCacheError, match="all 8 slots are taken"):
        slots.take()


def test_slots_against_a_set() -> None:
    rng = random.Random(0)
    slots, oracle = SlotAllocator(8), set()
    for _ in range(100_000):
        what = rng.randrange(-1, 9)
        if rng.random() < 0.5 and len(oracle) < 8:
            slot = slots.take()
            assert slot not in oracle
            oracle.add(slot)
        elif what in oracle:
            slots.free([what])
            oracle.remove(what)
        else:
            with pytest.raises(KVCacheError):
                slots.free([what])
        assert slots.num_free + len(oracle) == 8


def test_a_page_of_two_is_freed_by_the_last() -> None:
    manager = make(layers(-1), slots=8)
    one = start(manager, range(8))
    two = one.fork()
    assert used(manager) == [2]
    one.close()
    assert used(manager) == [2]
    with pytest.raises(KVCacheError, match="sequence 0 is closed"):
        one.close()
    two.close()
    assert used(manager) == [0]
    seq = start(manager, range(100, 132))
    assert sorted(seq.base_page_ids(0)) == list(range(8))


# --- lengths


def test_lengths_of_a_sequence() -> None:
    manager = make(layers(-1))
    seq = manager.create_sequence()
    assert repr(seq) == "KVSequence(0, suspended, committed=0, history=0, capacity=0)"
    assert not seq.is_active
    assert seq.resume()
    assert seq.resize(10)
    assert (seq.num_committed_tokens, seq.history_len, seq.capacity) == (0, 0, 10)
    assert len(seq.base_page_ids(0)) == 3
    seq.commit([1, 2, 3])
    assert (seq.num_committed_tokens, seq.history_len, seq.capacity) == (3, 3, 10)
    assert seq.resize(None, 7)
    assert (seq.num_committed_tokens, seq.history_len, seq.capacity) == (3, 7, 10)
    seq.commit(np.array([4]))
    assert (seq.num_committed_tokens, seq.history_len) == (4, 7)
    seq.rewind(3)
    assert (seq.capacity, len(seq.base_page_ids(0)), used(manager)) == (7, 2, [2])
    seq.close()
    assert repr(seq) == "KVSequence(0, closed)"
    assert seq.is_closed


def misuses(seq: KVSequence, manager: KVCacheManager) -> dict[str, Callable[[], object]]:
    return {
        "has a history of 6 tokens, which can't shrink to 5": lambda: seq.resize(10, 5),
        "a capacity of 5 tokens is less than the history of 6": lambda: seq.resize(5),
        "a capacity of 10 tokens is less than the history of 11": lambda: seq.resize(10, 11),
        "can't commit 7 tokens after 4: its capacity is 10": lambda: seq.commit(range(7)),
        "can't rewind 5 tokens: 4 of its 10 come after the history": lambda: seq.rewind(5),
        "is active already": lambda: seq.resume(),
        "has not pinned group 0": lambda: seq.unpin(0),
        "can't advance by 7 tokens after 4": lambda: manager.advance([seq], [list(range(7))]),
        "twice": lambda: manager.advance([seq, seq], [1, 2]),
    }


@pytest.mark.parametrize("message", misuses(None, None))  # type: ignore[arg-type]
def test_misuse_names_sequence_and_numbers(message: str) -> None:
    manager = make(layers(-1))
    seq = start(manager, range(4))
    assert seq.resize(10, 6)
    before = repr(seq), seq.base_page_ids(0).tolist()
    with pytest.raises(KVCacheError, match=message) as raised:
        misuses(seq, manager)[message]()
    assert "sequence" in str(raised.value)
    assert (repr(seq), seq.base_page_ids(0).tolist()) == before


def test_what_a_closed_or_suspended_sequence_refuses() -> None:
    manager, other = make(layers(-1)), make(layers(-1))
    seq = start(manager, range(4))
    for what in (
        lambda: other.advance([seq], [1]),
        lambda: other.layer_view(0, SHARED).block_table([seq]),
    ):
        with pytest.raises(KVCacheError, match="sequence 0 is of another manager"):
            what()
    seq.suspend()
    for what in (
        seq.suspend, lambda: seq.resize(5), lambda: seq.commit([1]), lambda: seq.rewind(0),
        lambda: seq.pin(0), lambda: manager.advance([seq], [1]),
        lambda: manager.block_tables([seq], 0),
    ):  # fmt: skip
        with pytest.raises(KVCacheError, match="suspended"):
            what()
    seq.close()
    for what in (
        seq.close, seq.suspend, seq.resume, seq.fork, seq.stop_committing, lambda: seq.capacity,
        lambda: seq.base_page_ids(0), lambda: seq.scratch(0), lambda: manager.advance([seq], [1]),
        lambda: seq.supports_index_mode(SHARED),
    ):  # fmt: skip
        with pytest.raises(KVCacheError, match="sequence 0 is closed"):
            what()


def test_arguments_that_are_refused() -> None:
    manager = make(layers(-1))
    seq = start(manager, range(4))
    view = manager.layer_view(0, SHARED)
    for what, error in (
        (lambda: seq.resize(2.5), TypeError),
        (lambda: seq.resize(-1), ValueError),
        (lambda: seq.rewind(-1), ValueError),
        (lambda: seq.commit([0.5]), TypeError),
        (lambda: seq.commit([[1]]), ValueError),
        (lambda: seq.base_page_ids(1), ValueError),
        (lambda: seq.pin(True), ValueError),
        (lambda: manager.create_sequence(priority=101), ValueError),
        (lambda: manager.create_sequence(priority="high"), TypeError),
        (lambda: manager.create_sequence(reuse_scratch=True), ValueError),
        (lambda: manager.create_sequence(reuse_scratch=1), TypeError),
        (lambda: manager.create_sequence(reuse_scope=b"x"), TypeError),
        (lambda: manager.create_sequence(["a"]), TypeError),
        (lambda: manager.advance([seq], [1, 2]), ValueError),
        (lambda: manager.advance([seq], [1], num_inputs=0), ValueError),
        (lambda: manager.advance([seq], [[[1]]]), ValueError),
        (lambda: manager.advance([3], [1]), TypeError),
        (lambda: manager.layer_view(7, SHARED), ValueError),
        (lambda: manager.layer_view(0, "both"), ValueError),
        (lambda: manager.block_tables([seq], 2), ValueError),
        (lambda: view.block_table([seq], rows=[0, 1]), ValueError),
        (lambda: view.block_table([seq, seq.fork()], rows=[1, 1]), ValueError),
        (lambda: view.block_table([seq], out=torch.empty(1, 2)), TypeError),
        (lambda: view.block_table([seq], out=torch.empty(0, 9, dtype=torch.int32)), ValueError),
        (lambda: view.block_table([seq], out=torch.empty(1, 0, dtype=torch.int32)), ValueError),
        (lambda: KVCacheManager(3), TypeError),
    ):
        with pytest.raises(error):
            what()
    with pytest.raises(KVCacheError, match="no storage"):
        _ = view.kv_cache
    with pytest.raises(KVCacheError, match="no storage"):
        manager.regions(0)


def test_a_manager_closes_last_and_once() -> None:
    manager = make(layers(-1))
    seq = start(manager, range(4))
    with pytest.raises(KVCacheError, match=r"sequences \[0\] are open"):
        manager.close()
    seq.pin(0)
    seq.close()
    with pytest.raises(KVCacheError, match="pinned"):
        manager.close()
    seq.unpin(0)
    manager.close()
    for what in (manager.close, manager.stats, manager.create_sequence, manager.clear_reusable):
        with pytest.raises(KVCacheError, match="the manager is closed"):
            what()


def test_without_room_nothing_changes() -> None:
    manager = make(layers(-1, 5), slots=9)
    one, two = start(manager, range(10)), start(manager, range(50, 56))
    before = repr(one), one.base_page_ids(0).tolist(), one.base_page_ids(1).tolist()
    stats = manager.stats()
    assert stats.pools[0].used == 3 + 2 + 2 + 2
    assert not one.resize(13)
    assert manager.advance([one, two], [[], []]) == [True, True]
    assert (one.capacity, two.capacity) == (11, 7)
    assert not one.resize(40, 10)
    assert (one.base_page_ids(0).tolist(), one.base_page_ids(1).tolist()) == before[1:]
    two.close()
    assert one.resize(13)


def test_resizing_is_one_operation() -> None:
    """New pages may be those that leave the window in the same call."""
    manager = make(layers(3), slots=3)
    seq = start(manager, range(12))
    assert used(manager) == [1]
    assert seq.resize(20)
    assert used(manager) == [3]
    assert not seq.resize(28)
    assert seq.resize(28, 20)
    ids = seq.base_page_ids(0)
    assert (ids >= 0).tolist() == [False] * 4 + [True] * 3


# --- windows


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 31])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_that_no_query_sees_are_given_back(window: int, page_size: int) -> None:
    manager = make(layers(window, -1), page_size=page_size, slots=100)
    seq = start(manager, range(7))
    for history in range(7, 40):
        first = max(0, history - window)  # the first key that a query at `history` sees
        ids = seq.base_page_ids(0)
        assert [i >= 0 for i in ids] == [(b + 1) * page_size > first for b in range(len(ids))]
        assert (seq.base_page_ids(1) >= 0).all()
        assert manager.advance([seq], [history] if seq.capacity > history else [[]]) == [True]
        if seq.history_len == history:
            assert manager.advance([seq], [history]) == [True]


def test_numbers_of_the_notes() -> None:
    assert stale_end(1024, 127, 32) == 28
    assert scratch_range(0, 1024, 127, 32, 0) == (0, 28)
    assert {scratch_range(0, 1024, 127, 32, n) for n in range(2, 34)} == {(0, 27)}
    assert scratch_range(0, 1000, 127, 32, 0)[1] == 27
    assert scratch_range(0, 256, 31, 32, 0) == (0, 7)
    assert scratch_range(0, 256, 63, 32, 0) == (0, 6)
    assert scratch_range(0, 256, 255, 32, 0) == (0, 0)
    assert scratch_range(256, 352, 63, 32, 0) == (8, 9)
    assert scratch_range(5, 10, 0, 4, 0) == (2, 2)


# --- many at a time


def test_advancing_many_is_advancing_each() -> None:
    rng = random.Random(3)
    together, alone = make(layers(-1, 6), slots=400), make(layers(-1, 6), slots=400)
    lengths = [rng.randrange(1, 20) for _ in range(12)]
    pairs = [
        (start(together, range(i, i + n)), start(alone, range(i, i + n)))
        for i, n in enumerate(lengths)
    ]
    for step in range(30):
        news = [[rng.randrange(9) for _ in range(rng.randrange(3) if step else 0)] for _ in pairs]
        assert all(together.advance([a for a, _ in pairs], news, num_inputs=2))
        for (_, b), new in zip(pairs, news, strict=True):
            b.commit(new)
            assert b.resize(max(b.capacity, b.history_len + 2))
        for a, b in pairs:
            assert repr(a).split(",", 1)[1] == repr(b).split(",", 1)[1]
            for group in (0, 1):
                assert ((a.base_page_ids(group) >= 0) == (b.base_page_ids(group) >= 0)).all()
    assert used(together) == used(alone)


def test_advance_takes_arrays_and_lists() -> None:
    manager = make(layers(-1))
    seqs = [start(manager, range(n)) for n in (3, 9)]
    assert manager.advance(seqs, [[], []], num_inputs=4) == [True, True]
    assert manager.advance(seqs, np.array([5, 6]), num_inputs=4) == [True, True]
    assert manager.advance(seqs, torch.tensor([[5, 6], [7, 8]]), num_inputs=4) == [True, True]
    assert manager.advance(seqs, [[1], [2, 3]], num_inputs=4) == [True, True]
    assert [seq.num_committed_tokens for seq in seqs] == [7, 14]
    assert [seq.capacity for seq in seqs] == [11, 18]
    seqs[0].stop_committing()
    assert manager.advance(seqs, [5, 6]) == [True, True]
    assert [seq.num_committed_tokens for seq in seqs] == [7, 15]
    assert [seq.history_len for seq in seqs] == [8, 15]


def test_advancing_without_room_leaves_the_others() -> None:
    manager = make(layers(-1), slots=3)
    one, two = start(manager, range(4)), start(manager, range(9, 13))
    assert manager.advance([one, two], [[], []]) == [True, False]
    assert (one.capacity, two.capacity) == (5, 4)


# --- what was computed before


def found(manager: KVCacheManager, tokens: object, **options: object) -> int:
    seq = manager.create_sequence(tokens, **options)  # type: ignore[arg-type]
    count = seq.num_committed_tokens
    seq.close()
    return count


def test_every_length_of_a_prefix_is_found() -> None:
    for windows in ((-1,), (5,), (-1, 5, 0)):
        manager = make(layers(*windows), slots=300)
        start(manager, range(30)).close()
        for n in range(31):
            assert found(manager, range(n)) == n
            assert found(manager, [*range(n), 99, 99]) == n
        assert found(manager, range(40)) == 30
        assert found(manager, range(30), reuse_scope="tenant") == 0
        assert found(manager, range(1, 30)) == 0


def test_a_part_of_a_block_is_found_once_committing_stops() -> None:
    manager = make(layers(-1))
    seq = start(manager, range(10))
    assert found(manager, range(10)) == 8
    seq.stop_committing()
    seq.stop_committing()
    assert found(manager, range(10)) == 10
    with pytest.raises(KVCacheError, match="sequence 0 has stopped committing at 10 tokens"):
        seq.commit([1])
    # A longer block takes the place of a shorter one.
    start(manager, range(12))
    assert found(manager, [*range(11), 50]) == 11


def test_the_same_tokens_computed_twice_are_kept_once() -> None:
    manager = make(layers(-1))
    one, two = manager.create_sequence(), manager.create_sequence()
    for seq in (one, two):
        assert seq.resume()
        assert seq.resize(9)
    assert used(manager) == [6]
    for seq in (one, two):
        seq.commit(range(9))
    assert one.base_page_ids(0).tolist()[:2] == two.base_page_ids(0).tolist()[:2]
    assert used(manager) == [4]


def test_reuse_shares_full_pages_and_copies_the_last() -> None:
    manager = make(layers(-1), device="cpu")
    one = start(manager, range(10))
    one.close()
    two = manager.create_sequence(range(10))
    assert two.num_committed_tokens == two.history_len == two.capacity == 10
    assert two.base_page_ids(0).tolist() == [-1, -1, -1]
    assert two.resume()
    shared = two.base_page_ids(0).tolist()
    cache = manager.layer_view(0, SHARED).kv_cache
    assert isinstance(cache, torch.Tensor)
    cache[shared[2]] = 3.0
    assert two.resize(11)
    own = two.base_page_ids(0).tolist()
    assert own[:2] == shared[:2]
    assert own[2] != shared[2]
    assert torch.equal(cache[own[2]], cache[shared[2]])
    stats = manager.stats()
    assert (stats.copied_pages, stats.prompt_tokens, stats.reused_tokens) == (1, 20, 10)


def test_clearing_forgets_what_open_sequences_commit_too() -> None:
    manager = make(layers(-1))
    seq = start(manager, range(8))
    start(manager, range(50, 60)).close()
    manager.clear_reusable()
    assert manager.stats().pools[0].reusable == 0
    assert found(manager, range(8)) == found(manager, range(50, 60)) == 0
    assert seq.resize(16)
    seq.commit(range(8, 16))
    assert found(manager, range(16)) == 0
    seq.close()
    assert manager.stats().pools[0].free == 64
    start(manager, range(8))
    assert found(manager, range(8)) == 8


# --- who goes


def test_lower_priority_goes_first_then_what_was_used_longest_ago() -> None:
    manager = make(layers(-1), slots=8)
    for begin, priority in ((100, 35), (200, 0), (300, 100), (400, 35)):
        start(manager, range(begin, begin + 8), priority=priority).close()
    assert manager.stats().pools[0].reusable == 8
    order = []
    lost: set[int] = set()
    seq = manager.create_sequence()
    assert seq.resume()
    for n in range(1, 9):
        assert seq.resize(4 * n)
        now = {
            b for b in (100, 200, 300, 400) if len(manager._blocks.tree.match(
                np.arange(b, b + 8), "").nodes) < 2
        }  # fmt: skip
        order += sorted(now - lost)
        lost = now
    assert order == [200, 100, 400, 300]
    assert manager.stats().dropped_pages == 8
    assert not seq.resize(36)


def test_a_prefix_outlasts_what_follows_it() -> None:
    manager = make(layers(-1), slots=4)
    start(manager, range(16)).close()
    seq = manager.create_sequence()
    assert seq.resume()
    for n in range(1, 5):
        assert seq.resize(4 * n)
        assert len(manager._blocks.tree.match(np.arange(16), "").nodes) == 4 - n


def test_suspended_pages_go_to_the_host_and_come_back() -> None:
    manager = make(layers(-1), slots=4, host_slots=3, device="cpu")
    cache = manager.layer_view(0, SHARED).kv_cache
    assert isinstance(cache, torch.Tensor)
    one = start(manager, range(12))
    before = cache[one.base_page_ids(0).tolist()] = torch.rand(3, *cache.shape[1:]).bfloat16()
    one.suspend()
    two = manager.create_sequence()
    assert two.resume()
    assert two.resize(16)
    cache[:] = torch.nan
    pool = manager.stats().pools[0]
    assert (pool.used, pool.held, pool.host_held) == (4, 0, 3)
    assert not one.resume()
    two.close()
    assert one.resume()
    assert torch.equal(cache[one.base_page_ids(0).tolist()], before)
    stats = manager.stats()
    assert (stats.offloaded_pages, stats.reloaded_pages) == (3, 3)


def test_suspended_pages_stay_where_there_is_no_host() -> None:
    manager = make(layers(-1), slots=4)
    one = start(manager, range(12))
    one.suspend()
    two = manager.create_sequence()
    assert two.resume()
    assert not two.resize(8)
    assert two.resize(4)
    assert manager.stats().pools[0].held == 3
    assert one.resume()


def test_what_nobody_has_goes_to_the_host_too() -> None:
    manager = make(layers(-1), slots=2, host_slots=1)
    start(manager, range(8)).close()
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(8)
    # The second block went to the host first, and was dropped for the first.
    assert found(manager, range(8)) == 4
    assert manager.stats().pools[0].host_reusable == 1
    assert manager.stats().dropped_pages == 1


def test_the_host_keeps_what_is_worth_more() -> None:
    manager = make(layers(-1), slots=2, host_slots=1)
    start(manager, range(4), priority=100).close()
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(8)  # the block goes to the host
    seq.close()
    assert found(manager, range(4)) == 4
    start(manager, range(50, 54), priority=0).close()
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(8)
    assert (found(manager, range(4)), found(manager, range(50, 54))) == (4, 0)
    # One that is held goes there whatever that costs.
    seq.close()
    held = start(manager, range(70, 74), priority=0)
    held.suspend()
    other = manager.create_sequence()
    assert other.resume()
    assert other.resize(8)
    assert found(manager, range(4)) == 0
    assert manager.stats().pools[0].host_held == 1


def test_pinned_pages_stay() -> None:
    manager = make(layers(3), slots=4, device="cpu")
    seq = start(manager, range(8))
    before = seq.base_page_ids(0)[1:].tolist()
    assert seq.pin(0).tolist() == before
    with pytest.raises(KVCacheError, match="has pinned group 0 already"):
        seq.pin(0)
    assert seq.resize(16)
    seq.commit(range(8, 16))
    assert used(manager) == [1 + 1]
    seq.close()
    assert used(manager) == [1]
    other = manager.create_sequence()
    assert other.resume()
    assert other.resize(12)
    assert not other.resize(16)
    assert before[0] not in other.base_page_ids(0).tolist()
    seq.unpin(0)
    assert other.resize(16)


# --- forks


def test_forks_share_pages_and_copy_the_last_one_once() -> None:
    manager = make(layers(-1), device="cpu")
    parent = start(manager, range(10))
    children = [parent.fork() for _ in range(3)]
    assert used(manager) == [3]
    assert all(child.is_active and child.capacity == 10 for child in children)
    seqs = [parent, *children]
    assert manager.advance(seqs, [[]] * 4) == [True] * 4
    ids = np.array([seq.base_page_ids(0) for seq in seqs])
    assert (ids[:, :2] == ids[0, :2]).all()
    assert len(set(ids[:, 2].tolist())) == 4
    assert manager.stats().copied_pages == 3  # the parent goes on in place
    assert used(manager) == [2 + 4]


def test_a_fork_that_only_catches_up_copies_before_it_writes() -> None:
    manager = make(layers(-1))
    parent = start(manager, range(3))
    assert parent.resize(6, 6)
    child = parent.fork()
    shared = child.base_page_ids(0).tolist()
    assert manager.advance([child], [3]) == [True]
    assert (child.num_committed_tokens, child.history_len, child.capacity) == (4, 6, 7)
    assert child.base_page_ids(0)[1] != shared[1]
    assert child.base_page_ids(0)[0] == shared[0]


def test_a_fork_of_a_running_step_has_its_history_alone() -> None:
    manager = make(layers(-1))
    parent = start(manager, range(6))
    assert parent.resize(17)
    child = parent.fork()
    assert (child.history_len, child.capacity, len(child.base_page_ids(0))) == (6, 6, 2)
    parent.suspend()
    other = parent.fork()
    assert not other.is_active
    parent.close()
    assert other.resume()


# --- scratch


def test_scratch_slots_of_prompts_windows_and_layers() -> None:
    """C47: addresses of one layer are distinct, other slots are private, and few slots do."""
    for prompt in (1, 31, 32, 127, 128, 129, 160, 1024):
        for window in (0, 31, 32, 127):
            for num_layers in (1, 2, 5, 33):
                check_scratch(prompt, window, num_layers, [prompt])
    check_scratch(1024, 127, 32, [512, 1024])


def check_scratch(prompt: int, window: int, num_layers: int, chunks: list[int]) -> None:
    manager = make(layers(*[window] * num_layers), page_size=32, slots=40, reuse_scratch=True)
    seq = manager.create_sequence()
    assert seq.resume()
    for end in chunks:
        begin = seq.history_len
        assert seq.resize(end)
        start_, stop = scratch_range(begin, end, window, 32, 0)
        scratch = seq.scratch(0)
        assert (scratch is None) == (start_ == stop)
        slots = () if scratch is None else scratch.slot_ids
        assert len(slots) == -(-(stop - start_) // num_layers)
        normal = [i for i in seq.base_page_ids(0).tolist() if i >= 0]
        assert used(manager) == [len(slots) + len(normal)]
        assert not set(slots) & set(normal)
        tables = manager.block_tables([seq], 0)[:, 0].numpy()
        first = max(0, begin - window) // 32
        assert (tables[:, first : -(-end // 32)] >= 0).all()
        private: set[int] = set()
        for layer, table in enumerate(tables.tolist()):
            pages = [page for page in table if page >= 0]
            assert len(set(pages)) == len(pages)  # no two blocks of a layer in one place
            assert {page // num_layers for page in pages} <= {*slots, *normal}
            own = {page for page in pages if page // num_layers in normal}
            assert own == {slot * num_layers + layer for slot in normal}
            assert not own & private
            private |= own
        seq.commit(range(begin, end))
        assert seq.scratch(0) is None
        left = seq.base_page_ids(0)
        assert [i >= 0 for i in left] == [b >= max(0, end - window) // 32 for b in range(len(left))]
    assert all(pool.peak <= 40 for pool in manager.stats().pools)


def test_scratch_of_several_groups() -> None:
    manager = make(layers(63, 255), page_size=32, slots=32, reuse_scratch=True)
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(256)
    scratch = seq.scratch(0)
    assert scratch is not None
    assert (scratch.start, scratch.stop, len(scratch.slot_ids)) == (0, 6, 6)
    assert seq.scratch(1) is None
    assert seq.resize(352, 256)
    scratch = seq.scratch(0)
    assert scratch is not None
    assert (scratch.start, scratch.stop, len(scratch.slot_ids)) == (8, 9, 1)
    seq.suspend()
    assert seq.scratch(0) is None
    assert seq.resume()
    scratch = seq.scratch(0)
    assert scratch is not None
    assert (scratch.start, scratch.stop, len(scratch.slot_ids)) == (8, 9, 1)
    seq.close()
    assert used(manager) == [0]


def test_steady_chunks_of_a_prompt() -> None:
    """32 layers, chunks of 512: 1 + 4 slots, then 1 + 8; without scratch 20."""
    for reuse, first, later in ((True, 5, 9), (False, 16, 20)):
        manager = make(layers(*[127] * 32), page_size=32, slots=32, reuse_scratch=reuse)
        seq = manager.create_sequence()
        assert seq.resume()
        for i in range(4):
            assert seq.resize(512 * (i + 1), 512 * i)
            assert used(manager) == [later if i else first]


def test_what_can_be_reused_after_scratch() -> None:
    for chunk, lengths in ((1024, [1023, 1024]), (256, [255, 256, 511, 512, 767, 768, 1023, 1024])):
        manager = make(layers(*[127] * 32), page_size=32, slots=64, reuse_scratch=True)
        seq = manager.create_sequence()
        assert seq.resume()
        for end in range(chunk, 1025, chunk):
            assert seq.resize(end)
            seq.commit(range(end - chunk, end))
        seq.close()
        full = [n for n in range(1025) if found(manager, range(n)) == n and n]
        assert full == lengths
        # What can't be reused is cut to what can.
        assert found(manager, range(600)) == max(n for n in [0, *lengths] if n <= 600)
        # A sequence of its own without scratch makes every length reusable.
        without = start(manager, range(2000, 3024), reuse_scratch=False)
        without.close()
        assert found(manager, range(2000, 2500)) == 500


def test_a_reuse_after_scratch_commits_what_is_not_scratch() -> None:
    manager = make(layers(*[127] * 32), page_size=32, slots=64, reuse_scratch=True)
    start(manager, range(1024)).close()
    again = manager.create_sequence(range(1024))
    assert again.num_committed_tokens == 1024
    assert again.resume()
    ids = again.base_page_ids(0)
    assert (ids[:28] == -1).all()
    assert (ids[28:] >= 0).all()
    part = manager.create_sequence(range(896))
    assert part.num_committed_tokens == 0


def scratch_sequence(max_rewind_len: int = 0) -> tuple[KVCacheManager, KVSequence]:
    manager = make(
        layers(7, 7), slots=20, reuse_scratch=True, max_rewind_len=max_rewind_len, device="cpu"
    )
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(40)
    return manager, seq


def test_lengths_that_scratch_refuses() -> None:
    manager, seq = scratch_sequence()
    assert seq.scratch(0) == Scratch(0, 8, seq.scratch(0).slot_ids)  # type: ignore[union-attr]
    for what in (
        lambda: seq.resize(60), lambda: seq.resize(60, 30), lambda: seq.commit(range(30)),
        lambda: seq.rewind(2), lambda: seq.resize(None, 20),
        lambda: manager.advance([seq], [list(range(30))]),
    ):  # fmt: skip
        with pytest.raises(KVCacheError, match="blocks 0 to 7 of group 0 are scratch"):
            what()
        assert (seq.capacity, seq.history_len, used(manager)) == (40, 0, [4 + 2])
    assert not seq.supports_index_mode(SHARED)
    assert seq.supports_index_mode(PER_LAYER)
    with pytest.raises(KVCacheError, match="SHARED tables can't list"):
        manager.layer_view(0, SHARED).block_table([seq])
    seq.commit(range(40))
    assert seq.supports_index_mode(SHARED)
    assert manager.layer_view(0, SHARED).block_table([seq]).table.shape == (1, 10)
    assert manager.supports_index_mode(SHARED) is None
    assert manager.supports_index_mode(PER_LAYER) is True
    assert make(layers(7)).supports_index_mode(SHARED) is True


def test_rewinding_a_step_with_scratch() -> None:
    _, seq = scratch_sequence(max_rewind_len=6)
    scratch = seq.scratch(0)
    assert scratch is not None
    assert (scratch.start, scratch.stop) == (0, 6)
    with pytest.raises(KVCacheError, match="max_rewind_len is 6"):
        seq.rewind(10)
    seq.rewind(6)
    assert seq.scratch(0) == scratch  # where the kernels have written
    seq.commit(range(34))
    assert seq.scratch(0) is None
    assert (seq.base_page_ids(0)[6:] >= 0).all()


def test_scratch_is_a_sequence_s_own_choice() -> None:
    manager = make(layers(7, 7), slots=20, reuse_scratch=True)
    seq = manager.create_sequence(reuse_scratch=False)
    assert seq.resume()
    assert seq.resize(40)
    assert seq.scratch(0) is None
    assert seq.supports_index_mode(SHARED)
    assert used(manager) == [10]


def test_pages_that_may_have_been_written_do_not_become_scratch() -> None:
    manager = make(layers(7, 7), slots=20, reuse_scratch=True)
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(10)
    before = seq.base_page_ids(0).tolist()
    assert seq.resize(40)
    assert seq.base_page_ids(0).tolist()[:3] == before
    scratch = seq.scratch(0)
    assert scratch is not None
    assert (scratch.start, scratch.stop) == (3, 8)


# --- tables and caches


def test_tables_are_the_formula() -> None:
    """Unequal layers: two pools of one group, whose layers take turns each in its own way."""
    configs = [
        LayerConfig(layer_id=i, num_kv_heads=heads, head_dim=16, window_left=window)
        for i, (heads, window) in enumerate([(1, 7), (2, 7), (1, 7), (1, -1), (2, 7), (1, 7)])
    ]
    manager = KVCacheManager(
        KVCacheConfig(
            page_size=4, gpu_bytes=1 << 20, layers=configs, reuse_scratch=True, typical_len=40
        )
    )
    seqs = [manager.create_sequence(), start(manager, range(90, 99)), manager.create_sequence()]
    for seq in (seqs[0], seqs[2]):
        assert seq.resume()
    assert seqs[0].resize(61)
    group = manager.layer_groups[0]
    assert group.layer_ids == (0, 1, 2, 4, 5)
    tables = manager.block_tables(seqs, group).numpy()
    assert tables.shape == (5, 3, 16)
    pools: dict[int, list[int]] = {1: [0, 2, 5], 2: [1, 4]}
    for index, layer_id in enumerate(group.layer_ids):
        peers = pools[configs[layer_id].num_kv_heads]
        offset, count = peers.index(layer_id), len(peers)
        for row, seq in enumerate(seqs):
            expected = [-1] * 16
            for block, slot in enumerate(seq.base_page_ids(group).tolist()):
                scratch = seq.scratch(group)
                if scratch is not None and scratch.start <= block < scratch.stop:
                    j = block - scratch.start
                    expected[block] = (
                        scratch.slot_ids[j // count] * count + (j % count + offset) % count
                    )
                elif slot >= 0:
                    expected[block] = slot * count + offset
            assert tables[index, row].tolist() == expected
        view = manager.layer_view(layer_id, PER_LAYER)
        assert view.block_table(seqs).table.tolist() == tables[index].tolist()
        assert repr(view) == f"LayerView({layer_id}, per_layer)"


def test_tables_of_windows_that_stand_apart() -> None:
    manager = make(layers(7, 7, 7))
    seqs = [start(manager, range(n, 2 * n)) for n in (60, 5, 33)]
    out = torch.full((3, 4, 20), 77, dtype=torch.int32)
    for tables in (manager.block_tables(seqs, 0, out=out), manager.block_tables(seqs, 0)):
        for layer in range(3):
            for row, seq in enumerate(seqs):
                ids = seq.base_page_ids(0)
                wanted = np.where(ids < 0, -1, 3 * ids + layer).tolist()
                assert tables[layer, row].tolist() == wanted + [-1] * (
                    tables.shape[2] - len(wanted)
                )
    assert (out[:, 3] == 77).all()
    assert manager.block_tables([], 0).shape == (3, 0, 1)


def test_tables_are_written_in_place() -> None:
    manager = make(layers(-1, -1))
    seqs = [start(manager, range(n, 2 * n)) for n in (5, 9)]
    out = torch.full((5, 6), 77, dtype=torch.int32)
    view = manager.layer_view(1, SHARED)
    table = view.block_table(seqs, rows=torch.tensor([4, 1]), out=out)
    assert table.table is out
    assert table.rows is not None
    assert table.rows.tolist() == [4, 1]
    assert out[4].tolist() == [*seqs[0].base_page_ids(0), -1, -1, -1, -1]
    assert out[1].tolist() == [*seqs[1].base_page_ids(0), -1, -1, -1]
    assert (out[[0, 2, 3]] == 77).all()
    small = view.block_table(seqs, rows=[2, 0]).table
    assert small.shape == (3, 3)
    assert small[1].tolist() == [-1, -1, -1]
    many = torch.full((2, 3, 4), 77, dtype=torch.int32)
    assert manager.block_tables(seqs, 0, out=many) is many
    assert (many[:, 2] == 77).all()
    assert many[1, 1].tolist() == [*(2 * seqs[1].base_page_ids(0) + 1), -1]
    wide = torch.full((2, 60), 77, dtype=torch.int32)
    view.block_table(seqs, out=wide)
    assert (wide[:, 3:] == -1).all()
    assert view.block_table([]).table.shape == (0, 1)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", list(PageIndexMode))
@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16"},
        {"dtype": torch.float8_e4m3fn},
        {"dtype": "int8"},
        {"dtype": "nvfp4", "head_dim": 32},
        {"dtype": "int4", "head_dim": 32},
        {"dtype": "int4_g32", "head_dim": 96},
        {"dtype": "float16", "head_dim_vo": 32},
    ],
    ids=lambda given: str(given["dtype"]),
)
def test_views_are_what_planners_take(
    given: dict[str, object], mode: PageIndexMode, kv_layout: str
) -> None:
    shape: dict[str, object] = {"num_kv_heads": 2, "head_dim": 16, **given}
    configs = [LayerConfig(layer_id=i, **shape) for i in range(3)]  # type: ignore[arg-type]
    manager = make(configs, slots=5, kv_layout=kv_layout, device="cpu")
    planner = jitattn.AttentionPlanner(
        num_qo_heads=2, num_kv_heads=2, head_dim=configs[0].head_dim, page_size=4,
        head_dim_vo=configs[0].head_dim_vo, kv_dtype=configs[0].dtype, kv_layout=kv_layout,
        q_dtype="bfloat16" if configs[0].dtype != "float16" else "float16", device="cpu",
    )  # fmt: skip
    for region in manager.regions(0):
        region.memory.zero_()
    caches = [manager.layer_view(i, mode).kv_cache for i in range(3)]
    for cache in caches:
        planner.bind(cache)
    seq = start(manager, range(11))
    # A layer's bytes are its own, and those of regions.
    (region,) = manager.regions(0)
    for i, cache in enumerate(caches):
        page = manager.layer_view(i, mode).block_table([seq]).table[0, 1]
        parts = cache if isinstance(cache, tuple) else (cache,)
        if isinstance(cache, jitattn.QuantizedKV):
            parts = cache.tensors
        for part in parts:
            part[page].view(torch.uint8).fill_(i + 1)
        slot = seq.base_page_ids(0)[1]
        whole = region.memory[slot, region.begins[i] :][: region.page_bytes]
        assert (whole == i + 1).all()
    assert int((region.memory != 0).sum()) == 3 * region.page_bytes


def test_a_view_is_made_once() -> None:
    manager = make(layers(-1), device="cpu")
    assert manager.layer_view(0, SHARED) is manager.layer_view(0, PageIndexMode("shared"))


def test_a_view_s_cache_and_table_are_for_each_other() -> None:
    manager = make(layers(7, 7, -1), reuse_scratch=True, slots=40, typical_len=16, device="cpu")
    other = make(layers(7, 7, -1), reuse_scratch=True, slots=40, typical_len=16, device="cpu")
    for region in (*manager.regions(0), *manager.regions(1), *other.regions(0)):
        region.memory.zero_()
    seq = start(manager, range(6))
    planner = jitattn.AttentionPlanner(
        num_qo_heads=1, num_kv_heads=1, head_dim=16, page_size=4, window_left=7, device="cpu"
    )
    views = {(i, mode): manager.layer_view(i, mode) for i in (0, 1, 2) for mode in PageIndexMode}
    q = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    lens = torch.tensor([6])
    allowed = set()
    for of_cache, cache in views.items():
        kv = planner.bind(cache.kv_cache)
        for of_table, view in views.items():
            table = view.block_table([seq])
            plan = planner.plan(table, lens)
            try:
                plan.run(q, kv)
                jitattn.append_kv(q, q, cache.kv_cache, pages=table, seq_lens=lens)
            except ValueError as error:
                assert "pages is a table for the" in str(error)
                with pytest.raises(ValueError, match="pages is a table for the"):
                    jitattn.append_kv(q, q, cache.kv_cache, pages=table, seq_lens=lens)
            else:
                allowed.add((of_cache, of_table))
    same = {(key, key) for key in views}
    # One table serves all layers of a group.
    assert allowed == same | {((i, SHARED), (1 - i, SHARED)) for i in (0, 1)}
    table = views[0, SHARED].block_table([seq])
    with pytest.raises(ValueError, match="pages is a table for the SHARED view of the layers of"):
        planner.plan(table, lens).run(q, other.layer_view(0, SHARED).kv_cache)
    # Tables from elsewhere are the caller's business.
    plain = jitattn.BlockTable(views[0, SHARED].block_table([seq]).table)
    planner.plan(plain, lens).run(q, views[0, SHARED].kv_cache)


def test_early_kv_is_refused_for_scratch() -> None:
    planner = jitattn.AttentionPlanner(
        num_qo_heads=1, num_kv_heads=1, head_dim=16, page_size=4, early_kv=True, device="cpu"
    )
    with_scratch = make(layers(7, -1), reuse_scratch=True, slots=40, device="cpu")
    with pytest.raises(ValueError, match="early_kv=True"):
        planner.bind(with_scratch.layer_view(0, PER_LAYER).kv_cache)
    planner.bind(with_scratch.layer_view(0, SHARED).kv_cache)
    planner.bind(with_scratch.layer_view(1, PER_LAYER).kv_cache)
    without = make(layers(7, -1), slots=40, device="cpu")
    planner.bind(without.layer_view(0, PER_LAYER).kv_cache)


def test_what_is_public_has_docstrings() -> None:
    for name in jitattn.kv.__all__:
        value = getattr(jitattn.kv, name)
        assert inspect.getdoc(value), name
        for member_name, member in vars(value).items():
            if inspect.isfunction(member) and not member_name.startswith("_"):
                assert inspect.getdoc(member), f"{name}.{member_name}"
