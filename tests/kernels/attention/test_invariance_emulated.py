"""Batch invariance across decode, verification, chunks and prefill, in kernels run on the CPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import jitattn
from jitattn.kernels.attention import kernels as attention_kernels
from jitattn.kernels.mla import kernels as mla_kernels
from tests.emulator.attention import EmulatedCuda
from tests.support.invariance import Examples, attention_sequence, latent_sequence

BASE = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 32, "page_size": 16}
CASES = {
    "plain": {},
    "window": {"window_left": 200},
    "not causal": {"causal": False},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
}


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits so short that a few hundred tokens have several lengths of them."""
    for module in (attention_kernels, mla_kernels):
        short = replace(module.TRAITS, max_splits=4, min_split_tokens=1, max_split_tokens=64)
        monkeypatch.setattr(module, "TRAITS", short)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", CASES)
def test_a_token_has_its_bits_in_any_piece(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, arch, seed=3)
    planner = host.planner(**{**BASE, **CASES[name]}, batch_invariant=True)
    num_tokens = 560
    request = attention_sequence(planner, num_tokens, 5, "cpu")
    # Without a causal mask a row sees what its piece ends with.
    first = num_tokens - (1 if name == "not causal" else 120)
    assert request.check(first, random.Random(name), rounds=1)
    assert {symbol.split("_")[1] for symbol in host.ran} <= {"prefill", "decode"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_token_of_latent_attention_has_its_bits_in_any_piece(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, arch, seed=3)
    planner = host.mla_planner(num_heads=3, page_size=16, sm_scale=0.05, batch_invariant=True)
    request = latent_sequence(planner, 300, 5, "cpu")
    assert request.check(270, random.Random(2), rounds=1)


def test_the_examples_of_a_card() -> None:
    """What tests/gpu/test_invariance_examples.py does, in small and by the definition."""
    planner = jitattn.AttentionPlanner(
        num_qo_heads=2, num_kv_heads=1, head_dim=64, page_size=4, device="cpu"
    )
    examples = Examples(attention_sequence(planner, 40, 1, "cpu"), most_rows=10)
    for seed in range(2):
        examples.check(seed)
