"""nano-vllm with jitattn in flash-attn's place: the tokens of torch's attention, graphs and all."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.device import DEVICE
from tests.support import nano

pytestmark = [
    pytest.mark.skipif(DEVICE != "cuda", reason="nano-vllm runs on CUDA devices"),
    pytest.mark.skipif(
        importlib.util.find_spec("nanovllm") is None, reason="nano-vllm-fork is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),  # of the engine
]

NUM_REQUESTS, NUM_NEW = 64, 24
TIES = 0.01
"""The most tokens that may differ where two logits are closer than rounding moves them."""


def furthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def ties(found: nano.Run, wanted: nano.Run, rounding: float) -> int:
    """How many best tokens are not those that both went on with; their logits must be close."""
    count = 0
    for logits, others, chosen in zip(found.logits, wanted.logits, wanted.chosen, strict=True):
        best = logits.argmax(-1)
        for row in (best != chosen).nonzero().flatten().tolist():
            assert others[row].max() - others[row, best[row]] <= 4 * rounding
            count += 1
    return count


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_engine_gives_the_tokens_of_torchs_attention(
    dtype: str, compiled: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    nano.make_checkpoint(tmp_path, dtype)
    prompts = nano.prompts_of(NUM_REQUESTS)
    decode = functools.partial(nano.decode, tmp_path, compiled=compiled)
    want = decode(nano.Torch(), prompts, NUM_NEW)
    assert len({tuple(tokens) for tokens in want.tokens}) > NUM_REQUESTS / 2
    exact = decode(nano.Torch(torch.float32), prompts, NUM_NEW, want.chosen)
    found = decode(nano.JitAttn(), prompts, NUM_NEW, want.chosen)
    assert found.tokens == exact.tokens == want.tokens  # they were forced

    # How far attention in 16 bits moves logits, and how far ours are from those in float32.
    rounding = furthest(want.logits, exact.logits)
    assert rounding < max(float(logits.std()) for logits in exact.logits) / 4
    assert furthest(found.logits, exact.logits) < 2 * rounding
    num_tokens = sum(len(chosen) for chosen in want.chosen)
    assert num_tokens == NUM_REQUESTS * NUM_NEW
    # In bfloat16, torch's attention in float32 gives others of such tokens, too.
    most = TIES * num_tokens
    if dtype == "bfloat16":
        most += 2 * ties(exact, want, rounding)
    num_ties = ties(found, want, rounding)
    record_property("differing tokens", f"{num_ties} of {num_tokens}")
    assert num_ties <= most

    # Graphs decode everything, and some requests found their prefix in the cache.
    counts = found.counts
    assert counts["graphs"] == len([1, 2, 4, 8, 16, 32])
    assert counts["decode"] == counts["decode while capturing"] > 0
    assert counts["decode"] == 2 * counts["graphs"] * nano.NUM_LAYERS
    assert counts["prefix"] > 0
    assert counts["prefill"] > 0


def test_the_engine_alone_gives_the_same_tokens(tmp_path: Path) -> None:
    """Nothing forced: requests agree until two logits are as close as rounding."""
    nano.make_checkpoint(tmp_path, "float16")
    prompts = nano.prompts_of(NUM_REQUESTS)
    want = nano.decode(tmp_path, nano.Torch(), prompts, NUM_NEW)
    found = nano.decode(tmp_path, nano.JitAttn(), prompts, NUM_NEW)
    same = sum(a == b for a, b in zip(found.tokens, want.tokens, strict=True))
    assert same >= 0.9 * NUM_REQUESTS  # a tie turns all of a request's later tokens
