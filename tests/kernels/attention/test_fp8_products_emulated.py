"""Products of 8 bits, run on the CPU: prefill over FP8 queries, decode in the same plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jitattn.kernels.attention.api import FP8ProductsPlan
from tests.emulator.attention import EmulatedCuda
from tests.support.fp8_queries import FAST, FP8, FP8Case, FP8Inputs


def planner_of(host: EmulatedCuda, case: FP8Case) -> Any:
    """A planner of a card, for tensors on the CPU."""
    planner = host.planner(**case.planner_arguments())
    assert planner.kernels.reads_fp8_queries
    planner.make_plan = FP8ProductsPlan
    planner.tensor_dtypes = planner.tensor_dtypes._replace(q=FP8)
    return planner


def check(host: EmulatedCuda, case: FP8Case) -> None:
    inputs = FP8Inputs(case, "cpu")
    inputs.check(inputs.attend(planner_of(host, case)))


STEP = replace(FAST, q_lens=(1, 5, 40, 2), kv_lens=(300, 6, 177, 2))
CASES = {
    "128": STEP,
    "64, a window": replace(STEP, head_dim=64, page_size=8, window_left=50, use_sinks=True),
    "256": replace(STEP, head_dim=256, page_size=64, num_kv_heads=1, group_size=8, form="negative"),
    "small pages": replace(STEP, head_dim=32, page_size=3, view="odd", form="none"),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a", seed)
    check(host, CASES[name])
    assert host.kinds == {"decode", "prefill"}
