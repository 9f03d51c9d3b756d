"""Thousands of random requests, whole, in chunks, in decode steps and among others, bit for bit.

JITATTN_TEST_EXAMPLES says how many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import jitattn
from tests.gpu.device import DEVICE
from tests.support.counts import Counts
from tests.support.invariance import (
    ATTENTION,
    LATENT,
    Examples,
    attention_arguments,
    attention_sequence,
    latent_arguments,
    latent_sequence,
)

NUM_EXAMPLES = int(os.environ.get("JITATTN_TEST_EXAMPLES", "240"))
# Beyond the lengths at which splits change theirs.
LONGEST = 17_000


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Counts]:
    with Counts(request, "examples of invariance") as found:
        yield found


def examples_of(name: str) -> Examples:
    if name in LATENT:
        planner = jitattn.MLAPlanner(**latent_arguments(name), device=DEVICE)  # type: ignore[arg-type]
        return Examples(latent_sequence(planner, LONGEST, 1, DEVICE))
    planner = jitattn.AttentionPlanner(**attention_arguments(name), device=DEVICE)  # type: ignore[arg-type]
    return Examples(attention_sequence(planner, LONGEST, 1, DEVICE))


@pytest.mark.parametrize("name", [*ATTENTION, *LATENT])
def test_random_requests(name: str, counts: Counts) -> None:
    examples = examples_of(name)
    for seed in range(-(-NUM_EXAMPLES // len({**ATTENTION, **LATENT}))):
        try:
            examples.check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed} of {name}") from error
        counts.add(1)
