"""Random examples over every kernel of the list; JITATTN_TEST_EXAMPLES says how many.

A shard's number is its seed: pytest -k "seed7" runs the same examples again.
"""

from __future__ import annotations

import pytest

from tests.gpu.device import DEVICE

pytest.importorskip("hypothesis")
from tests.support.strategies import NUM_SHARDS, Shards, examples

SHARDS = Shards(examples(), DEVICE)
SEEDS = range(1, NUM_SHARDS + 1)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
def test_random_examples(seed: int) -> None:
    SHARDS.run(seed)


def test_the_examples_reached_enough_kernels() -> None:
    SHARDS.check_reached(80)
