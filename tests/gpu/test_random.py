"""Random examples over every kernel of the list; JITATTN_TEST_EXAMPLES says how many.

"decode" has one query token a request, "mixed" any number. A shard's number is its seed:
pytest -k "seed7" runs the same examples again.
"""

from __future__ import annotations

import pytest

from tests.gpu.device import DEVICE

pytest.importorskip("hypothesis")
from tests.support import mixed_strategies, strategies

SHARDS = {
    "decode": strategies.Shards(strategies.examples(), DEVICE),
    "mixed": strategies.Shards(mixed_strategies.examples(), DEVICE),
}
SEEDS = range(1, strategies.NUM_SHARDS + 1)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
@pytest.mark.parametrize("kind", SHARDS)
def test_random_examples(kind: str, seed: int) -> None:
    SHARDS[kind].run(seed)


@pytest.mark.parametrize(
    ("kind", "at_least"), [("decode", 80), ("mixed", len(mixed_strategies.VARIANTS))]
)
def test_the_examples_reached_enough_kernels(kind: str, at_least: int) -> None:
    SHARDS[kind].check_reached(at_least)
