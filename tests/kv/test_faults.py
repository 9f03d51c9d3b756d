"""The page manager where copies fail, where it is exhausted, and where a change ends halfway."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest

from jitattn.kv import KVCacheConfig, KVCacheError, KVCacheManager, KVSequence, LayerConfig
from jitattn.kv.pool import PagePool
from tests.support.faulty_storage import WHERE, CopyError, faulty
from tests.support.kv_model import Model, shapes


def make(slots: int, host: int = 0, windows: tuple[int, ...] = (-1,)) -> KVCacheManager:
    """Pages of two tokens; a slot is one page."""
    layers = [
        LayerConfig(layer_id=i, num_kv_heads=1, head_dim=1, dtype="uint8", window_left=window)
        for i, window in enumerate(windows)
    ]
    config = KVCacheConfig(page_size=2, gpu_bytes=slots * 4, host_bytes=host * 4, layers=layers)
    return KVCacheManager(config, device="cpu")


def start(manager: KVCacheManager, num_pages: int, first: int) -> KVSequence:
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(2 * num_pages)
    seq.commit(range(first, first + 2 * num_pages))
    return seq


def lengths(seq: KVSequence) -> tuple[object, ...]:
    ids = tuple(seq.base_page_ids(0).tolist())
    return seq.is_active, seq.num_committed_tokens, seq.history_len, seq.capacity, ids


# --- swapping


@pytest.mark.parametrize(
    ("slots", "host", "pages"),
    [(6, 12, (3, 4, 3, 5)), (6, 16, (6, 6, 6)), (5, 9, (5, 4, 4)), (1, 2, (1, 1)), (4, 3, (3, 3))],
)
def test_sleepers_that_fit_the_device_resume(slots: int, host: int, pages: tuple[int, ...]) -> None:
    """As many pages go as come, a few at a time; contents are told by `test_random_operations`."""
    manager = make(slots, host)
    memory = manager.regions(0)[0].memory
    seqs, contents = [], []
    for i, count in enumerate(pages):
        seqs.append(start(manager, count, 100 * i))
        slots_of = seqs[-1].base_page_ids(0).tolist()
        for block, slot in enumerate(slots_of):
            memory[slot] = 16 * i + block
        contents.append([16 * i + block for block in range(count)])
        seqs[-1].suspend()
    for _ in range(3):
        for seq, content in zip(seqs, contents, strict=True):
            assert seq.resume()
            assert memory[seq.base_page_ids(0).tolist(), 0].tolist() == content
            seq.suspend()


def test_no_slot_free_anywhere_is_no_room() -> None:
    manager = make(2, 2)
    seqs = []
    for i in range(2):
        seqs.append(start(manager, 2, 10 * i))
        seqs[-1].suspend()
    assert not seqs[0].resume()
    assert seqs[1].resume()


# --- copies that fail


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("fails_at", range(1, 8))
def test_an_advance_of_several_names_those_that_have_advanced(where: str, fails_at: int) -> None:
    calls = [0]

    def fault() -> str:
        calls[0] += 1
        return where if calls[0] == fails_at else ""

    with faulty(fault):
        manager = make(9, 6)
    base = manager.create_sequence()
    assert base.resume()
    assert base.resize(4)
    base.commit([1, 2, 3])
    start(manager, 2, 50).suspend()
    seqs = [base, *(base.fork() for _ in range(5))]
    calls[0] = 0
    before = [lengths(seq) for seq in seqs]
    try:
        grown = manager.advance(seqs, [[i + 10] if i == 0 else [] for i in range(6)], num_inputs=2)
    except CopyError as error:
        named = [seq for seq in seqs if str(seq.id) in error.__notes__[0].partition("]")[0]]
        assert named
        for seq, old in zip(seqs, before, strict=True):
            assert (lengths(seq) != old) == (seq in named)
        grown = [seq in named for seq in seqs]
    else:
        assert calls[0] < fails_at
    assert grown.count(True) >= 3
    assert manager.advance([seqs[0]], [[]]) == [True]  # makes the copies that were left
    left = calls[0]
    manager.block_tables(seqs, 0)
    assert calls[0] == left


@pytest.mark.parametrize("where", WHERE)
def test_a_resume_that_fails_leaves_a_sleeper(where: str) -> None:
    faults = [""] * 100
    with faulty(lambda: faults.pop(0)):
        manager = make(4, 4)
    memory = manager.regions(0)[0].memory
    first = start(manager, 3, 0)
    for block, slot in enumerate(first.base_page_ids(0).tolist()):
        memory[slot] = block + 1
    first.suspend()
    second = start(manager, 4, 20)
    second.suspend()
    faults[:0] = [where, "before", where]
    for _ in range(3):
        with pytest.raises(CopyError):
            first.resume()
        assert not first.is_active
    assert first.resume()
    assert memory[first.base_page_ids(0).tolist(), 0].tolist() == [1, 2, 3]


def test_a_commit_after_a_fault_copies_first() -> None:
    faults: list[str] = []
    with faulty(lambda: faults.pop(0) if faults else ""):
        manager = make(4)
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(3)
    seq.commit([1])
    fork = seq.fork()
    faults += ["before", "before"]
    with pytest.raises(CopyError) as caught:
        fork.resize(2)
    assert str(fork.id) in caught.value.__notes__[0]
    assert fork.capacity == 2
    with pytest.raises(CopyError):
        fork.commit([5])
    assert fork.num_committed_tokens == 1
    fork.commit([5])
    fork.close()
    seq.close()
    manager.close()


# --- exhaustion, at each possible point


def script(manager: KVCacheManager, seed: int) -> list[tuple[str, Callable[[], object]]]:
    """Operations that take pages, of sequences that share some."""
    rng = random.Random(seed)
    seqs = [manager.create_sequence() for _ in range(3)]

    def one(name: str, *arguments: object) -> tuple[str, Callable[[], object]]:
        seq = seqs[rng.randrange(3)]
        return name, lambda: getattr(seq, name)(*arguments)

    steps: list[tuple[str, Callable[[], object]]] = []
    for _ in range(30):
        name = rng.choice(["resume", "suspend", "resize", "advance", "advance", "commit", "fork"])
        if name == "resize":
            steps.append(one(name, rng.randrange(1, 14)))
        elif name == "commit":
            steps.append(one(name, [rng.randrange(2) for _ in range(rng.randrange(1, 5))]))
        elif name == "advance":
            some = [seq for seq in seqs if rng.random() < 0.7]
            count = rng.randrange(3)
            new = [[rng.randrange(2) for _ in range(count)] for _ in some]
            steps.append((name, lambda some=some, new=new: manager.advance(some, new)))
        elif name == "fork":
            i, j = rng.sample(range(3), 2)

            def fork(i: int = i, j: int = j) -> None:
                child = seqs[i].fork()
                child.close()

            steps.append((name, fork))
        else:
            steps.append(one(name))
    begin = [("resume", seq.resume) for seq in seqs]
    begin += [("resize", lambda seq=seq: seq.resize(5)) for seq in seqs]
    return [*begin, *steps, ("seqs", lambda: seqs)]


SIZES = [(slots, host) for slots in range(2, 15) for host in (0, 1, 3, 6)]


@pytest.mark.parametrize("windows", [(-1,), (3,), (-1, 3)])
def test_without_room_each_operation_changes_nothing(windows: tuple[int, ...]) -> None:
    """Every size of both tiers, so that each operation is once the first without room."""
    refused = 0
    for slots, host in SIZES:
        for seed in range(4):
            manager = make(slots * len(windows), host * len(windows), windows)
            *steps, (_, all_of) = script(manager, seed)
            seqs = all_of()
            assert isinstance(seqs, list)
            for name, step in steps:
                before = [lengths(seq) for seq in seqs], manager.stats()
                try:
                    found = step()
                except KVCacheError:
                    found = False
                if found is False or (isinstance(found, list) and not any(found)):
                    refused += name != "commit"
                    assert ([lengths(seq) for seq in seqs], manager.stats()) == before
    assert refused > 500


@pytest.mark.parametrize("seed", range(2))
def test_a_change_that_ends_halfway_closes_the_manager(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each taking of slots fails once: all is as before, or only `close` is left."""
    take = PagePool.take
    broken = fails_at = 0
    while True:
        fails_at += 1
        calls = [0]

        def failing(pool: PagePool, count: int, calls=calls, fails_at=fails_at) -> list[int]:  # type: ignore[no-untyped-def]
            calls[0] += 1
            if calls[0] == fails_at:
                raise MemoryError("none left")
            return take(pool, count)

        monkeypatch.setattr(PagePool, "take", failing)
        manager = make(26, 10, (-1, 3))
        *steps, (_, all_of) = script(manager, seed)
        seqs = all_of()
        assert isinstance(seqs, list)
        failed = False
        for _, step in steps:
            try:
                step()
            except MemoryError:
                failed = True
                break
            except KVCacheError:
                continue
        if not failed:
            break
        broken += 1
        with pytest.raises(KVCacheError, match="halfway"):
            manager.stats()
        for call in (seqs[0].close, seqs[0].suspend, manager.create_sequence):
            with pytest.raises(KVCacheError, match="halfway"):
                call()
        manager.close()
        with pytest.raises(KVCacheError, match="closed"):
            manager.close()
    assert broken > 5


# --- at random


MODELS: dict[str, Callable[[float], Model]] = {
    "two tiers": lambda rate: Model(
        shapes([-1, 5], [1, 1]), page_size=4, slots=18, host_slots=10, fault_rate=rate
    ),
    "one tier": lambda rate: Model(
        shapes([-1, 5], [1, 1]), page_size=4, slots=24, host_slots=0, fault_rate=rate
    ),
    "scratch": lambda rate: Model(
        shapes([5] * 4, [1] * 4),
        page_size=4, slots=10, host_slots=6, reuse_scratch=True, fault_rate=rate,
    ),
    "small": lambda rate: Model(
        shapes([-1, 2], [1, 2]), page_size=2, slots=9, host_slots=20, fault_rate=rate
    ),
}  # fmt: skip


def run_random(name: str, seed: int, count: int, rate: float = 0.3) -> dict[str, int]:
    """Do ``count`` operations, checked one by one; return how many of each were done."""
    rng = random.Random(seed)
    model = MODELS[name](rate)
    for _ in range(count):
        model.do(rng.randrange(1, 2**40))
    model.end()
    return model.counts


@pytest.mark.parametrize("name", MODELS)
def test_random_operations_where_copies_fail(name: str) -> None:
    """400 operations; ``python -m tests.kv.test_faults`` does 20,000."""
    counts = run_random(name, seed=1, count=400)
    assert counts["faults"] > 5


def main() -> None:
    """Do 20,000 operations, and print what they were."""
    for name in MODELS:
        for seed in range(10):
            sys.stdout.write(f"{name} {seed} {run_random(name, seed, 500)}\n")


if __name__ == "__main__":
    main()
