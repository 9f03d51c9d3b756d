"""Random operations on page managers against the naive model of tests/support/kv_model.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.kv_model import Model, shapes

OPERATIONS = 200
EXAMPLES = 20

# Small pools, so that most operations find them full.
MODELS: dict[str, Callable[[], Model]] = {
    "one tier": lambda: Model(shapes([-1, 5], [1, 1]), page_size=4, slots=24, host_slots=0),
    "two tiers": lambda: Model(shapes([-1, 5], [1, 1]), page_size=4, slots=18, host_slots=10),
    "scratch": lambda: Model(
        shapes([5] * 4, [1] * 4), page_size=4, slots=10, host_slots=6, reuse_scratch=True
    ),
    "scratch, rewinds, unequal layers": lambda: Model(
        shapes([4, 4, 4, -1, 4], [1, 1, 2, 3, 2]),
        page_size=2, slots=30, host_slots=4, reuse_scratch=True, max_rewind_len=3, kv_layout="HND",
    ),
    "narrow windows": lambda: Model(
        shapes([0, 1, 9], [1, 1, 1]), page_size=3, slots=14, host_slots=5, reuse_scratch=True
    ),
}  # fmt: skip

WITH_SCRATCH = ("scratch", "scratch, rewinds, unequal layers", "narrow windows")


@pytest.mark.parametrize("name", MODELS)
def test_random_operations(name: str) -> None:
    """5 x 20 x 200 operations."""
    counts: dict[str, int] = {}

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(st.integers(0, 2**40), min_size=OPERATIONS, max_size=OPERATIONS))
    def run(codes: list[int]) -> None:
        model = MODELS[name]()
        for code in codes:
            model.do(code)
        model.end()
        for what, count in model.counts.items():
            counts[what] = counts.get(what, 0) + count

    run()
    rare = {"clear", "scratch"}
    expected = {
        "create", "resume", "suspend", "grow", "step", "advance", "fork", "rewind", "stop", "close",
        "pin", "unpin", "misuse", "declare", "catch_up",
    }  # fmt: skip
    assert set(counts) - rare == expected  # each of them was really done
    assert (counts.get("scratch", 0) > 50) == (name in WITH_SCRATCH)
