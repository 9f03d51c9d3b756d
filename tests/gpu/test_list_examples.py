"""Thousands of random lists over a few planners; JITATTN_TEST_EXAMPLES says how many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.device import DEVICE
from tests.support.counts import Counts
from tests.support.list_examples import FORMS, NUM_EXAMPLES, ON_CARD, Form, make_example


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Counts]:
    with Counts(request, "examples of lists") as found:
        yield found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_random_lists(form: Form, counts: Counts) -> None:
    for seed in range(-(-NUM_EXAMPLES // len(FORMS))):
        try:
            make_example(form, seed, DEVICE, ON_CARD).check()
        except Exception as error:
            raise AssertionError(f"seed {seed} of {form}") from error
        counts.add(1)
