"""Random batches of mixed query lengths; JITATTN_TEST_EXAMPLES says how many.

A shard's number is its seed: pytest -k "seed7" runs the same examples again.
"""

from __future__ import annotations

import pytest

from tests.gpu.device import DEVICE

pytest.importorskip("hypothesis")
from tests.support.mixed_strategies import VARIANTS, examples
from tests.support.strategies import NUM_SHARDS, Shards

SHARDS = Shards(examples(), DEVICE)
SEEDS = range(1, NUM_SHARDS + 1)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
def test_random_mixed_batches(seed: int) -> None:
    SHARDS.run(seed)


def test_the_examples_reached_every_configuration() -> None:
    SHARDS.check_reached(len(VARIANTS))
