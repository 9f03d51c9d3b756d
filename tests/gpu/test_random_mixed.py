"""Random batches of mixed query lengths; JITATTN_TEST_EXAMPLES says how many.

A shard's number is its seed: pytest -k "seed7" runs the same examples again.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest

from tests.gpu.device import DEVICE

pytest.importorskip("hypothesis")
from tests.mixed_strategies import VARIANTS, run_shard
from tests.strategies import NUM_EXAMPLES

NUM_SHARDS = 20
REACHED: Counter[str] = Counter()
SEEDS = range(1, NUM_SHARDS + 1)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
def test_random_mixed_batches(seed: int) -> None:
    before, start = REACHED["examples"], time.monotonic()
    run_shard(seed, -(-NUM_EXAMPLES // NUM_SHARDS), DEVICE, REACHED)
    count, seconds = REACHED["examples"] - before, time.monotonic() - start
    sys.stdout.write(f"seed {seed}: {count} examples in {seconds:.1f} s\n")


def test_the_examples_reached_every_configuration() -> None:
    """Runs after the shards of this process."""
    num_kernels = len([name for name in REACHED if name != "examples"])
    sys.stdout.write(f"{REACHED['examples']} examples over {num_kernels} prefill kernels\n")
    if REACHED["examples"] < 3000:
        pytest.skip(f"{REACHED['examples']} examples are too few to tell")
    assert num_kernels >= len(VARIANTS)
