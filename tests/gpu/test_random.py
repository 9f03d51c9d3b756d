"""Random examples over every kernel of the list; JITATTN_TEST_EXAMPLES says how many.

A shard's number is its seed: pytest -k "seed7" runs the same examples again.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.gpu.device import DEVICE

pytest.importorskip("hypothesis")
from tests.strategies import NUM_EXAMPLES, run_shard

NUM_SHARDS = 20
REACHED: Counter[str] = Counter()
SEEDS = range(1, NUM_SHARDS + 1)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
def test_random_examples(seed: int) -> None:
    before = REACHED["examples"]
    run_shard(seed, -(-NUM_EXAMPLES // NUM_SHARDS), DEVICE, REACHED)
    sys.stdout.write(f"seed {seed}: {REACHED['examples'] - before} examples\n")


def test_the_examples_reached_enough_kernels() -> None:
    """Runs after the shards of this process."""
    num_kernels = len([name for name in REACHED if name != "examples"])
    sys.stdout.write(f"{REACHED['examples']} examples over {num_kernels} kernels\n")
    if REACHED["examples"] < 3000:
        pytest.skip(f"{REACHED['examples']} examples are too few to tell")
    assert num_kernels >= 80
