"""The page manager where memory is nearly gone, and with numbers that nothing could hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jitattn.kv import KVCacheConfig, KVCacheError, KVCacheManager, LayerConfig, PageIndexMode


def make(slots: int, host: int = 0, windows: tuple[int, ...] = (-1,)) -> KVCacheManager:
    """Pages of two tokens; a slot is one page of each layer."""
    layers = [
        LayerConfig(layer_id=i, num_kv_heads=1, head_dim=1, dtype="uint8", window_left=window)
        for i, window in enumerate(windows)
    ]
    config = KVCacheConfig(page_size=2, gpu_bytes=slots * 4, host_bytes=host * 4, layers=layers)
    return KVCacheManager(config, device=None)


def lengths(seq: object) -> tuple[int, int, int]:
    return seq.num_committed_tokens, seq.history_len, seq.capacity  # type: ignore[attr-defined]


@pytest.mark.parametrize("kept", ["a fork", "a pin", "a sleeper"])
def test_an_advance_that_finds_its_block_committed_takes_nothing(kept: str) -> None:
    """What another has committed for the same tokens is not locked where own pages stay."""
    slots = 2 if kept == "a pin" else 3
    manager = make(slots, host=int(kept == "a sleeper"))
    first = manager.create_sequence()
    assert first.resume()
    assert first.resize(2)
    first.commit([1, 2])
    if kept == "a sleeper":
        first.suspend()
    else:
        first.close()
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(2)
    if kept == "a pin":
        seq.pin(0)
        tokens = [1, 2]
    else:
        seq.commit([1])
        seq.fork()
        other = manager.create_sequence()
        assert other.resume()
        assert other.resize(1)
        tokens = [2]
    before = lengths(seq), manager.stats()
    grown = manager.advance([seq], [tokens])
    if grown == [False]:
        assert (lengths(seq), manager.stats()) == before
    else:
        assert lengths(seq) == (2, 2, 3)


@pytest.mark.parametrize("windows", [(-1,), (3,), (-1, 3)])
def test_lengths_beyond_all_pages_are_refused_at_once(windows: tuple[int, ...]) -> None:
    manager = make(8, windows=windows)
    seq = manager.create_sequence()
    assert seq.resume()
    before = manager.stats()
    assert not seq.resize(2**30)  # a list of its blocks would take seconds
    assert manager.advance([seq], [[]], num_inputs=2**30) == [False]
    assert manager.stats() == before
    with pytest.raises(ValueError, match="capacity is"):
        seq.resize(2**30 + 1)
    with pytest.raises(ValueError, match="num_inputs is"):
        manager.advance([seq], [[]], num_inputs=2**63 - 1)


def test_tokens_beyond_64_bits_with_a_sign_are_refused() -> None:
    manager = make(4)
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(2)
    with pytest.raises(ValueError, match="64 bits with a sign"):
        seq.commit(np.array([2**63 + 5], np.uint64))
    seq.commit(np.array([2**63 - 1], np.uint64))
    assert seq.num_committed_tokens == 1


def test_a_scope_that_nobody_uses_is_forgotten() -> None:
    manager = make(8)
    for i in range(50):
        manager.create_sequence([1], reuse_scope=f"tenant {i}").close()
    assert len(manager._blocks.tree._roots) == 0
    seq = manager.create_sequence(reuse_scope="tenant 1")
    assert seq.resume()
    assert seq.resize(2)
    seq.commit([1, 2])
    seq.close()
    again = manager.create_sequence([1, 2, 3], reuse_scope="tenant 1")
    assert again.num_committed_tokens == 2
    assert manager.create_sequence([1, 2, 3], reuse_scope="tenant 2").num_committed_tokens == 0


@pytest.mark.parametrize(
    "rows",
    [
        [0.5, 1.7], [True, False], np.array([1.0, 0.0]), [0, 2**40], torch.tensor([0, 2**33]),
        torch.zeros(2, dtype=torch.int64, device="meta"), "ab", {0, 1}, iter([0, 1]),
    ],
    ids=[
        "fractions", "bools", "array of floats", "beyond int32", "tensor beyond int32", "meta",
        "text", "set", "iterator",
    ],
)  # fmt: skip
def test_rows_are_different_numbers(rows: object) -> None:
    layers = [LayerConfig(layer_id=0, num_kv_heads=1, head_dim=16)]
    manager = KVCacheManager(
        KVCacheConfig(page_size=2, gpu_bytes=4096, layers=layers), device="cpu"
    )
    seqs = [manager.create_sequence() for _ in range(2)]
    assert all(seq.resume() and seq.resize(2) for seq in seqs)
    view = manager.layer_view(0, PageIndexMode.SHARED)
    with pytest.raises((TypeError, ValueError), match="rows"):
        view.block_table(seqs, rows=rows)
    assert view.block_table(seqs, rows=np.array([1, 0])).table.shape == (2, 1)


@pytest.mark.parametrize("layer_id", [True, 1.0, "0"])
def test_layers_are_named_by_integers(layer_id: object) -> None:
    with pytest.raises(TypeError, match="layer_id"):
        make(2).layer_view(layer_id, PageIndexMode.SHARED)  # type: ignore[arg-type]


def test_a_full_pool_still_says_false() -> None:
    manager = make(1)
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(2)
    assert manager.advance([seq], [[7]], num_inputs=4) == [False]
    with pytest.raises(KVCacheError, match="capacity"):
        seq.commit([1, 2, 3])
