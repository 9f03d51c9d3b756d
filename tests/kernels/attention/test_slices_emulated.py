"""Decode over four bits, whose warps take slices of 64 tokens: two entries of the table a lane."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulator.attention import EmulatedCuda
from tests.support.cases import INT4, NVFP4, of
from tests.support.harness import extras, plan_of, same_bits
from tests.support.inputs import make_inputs

ARCH = "sm_90a"
BASE = replace(NVFP4, group_size=2, num_kv_heads=2)
CASES = {
    "pages of 16": replace(BASE, page_size=16),
    "pages of 1, separate": replace(BASE, page_size=1, page_table="separate"),
    "pages of 48 and a window": replace(BASE, page_size=48, window_left=70),
    "slots": replace(BASE, page_table="token", page_size=3, head_dim=64),
    "heads of 112": replace(BASE, page_table="csr", page_size=32, head_dim=112),
    "groups of 32": replace(
        INT4, group_size=2, num_kv_heads=2, kv_dtype="int4_g32", page_size=64, window_left=100
    ),
}
# Ends in the first half of a slice, at its middle, in the second half, and at its end.
LENGTHS = (1, 32, 33, 64, 65, 95, 250, 300, 0)


@pytest.mark.parametrize("name", CASES)
def test_slices_of_64_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(CASES[name], *((1, length) for length in LENGTHS))
    EmulatedCuda(monkeypatch, ARCH).check(case)


def test_rows_of_8_and_of_16_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(replace(BASE, group_size=4, num_kv_heads=1), (1, 150), (1, 40), (1, 300))
    inputs = make_inputs(case, "cpu")
    planner = EmulatedCuda(monkeypatch, ARCH).planner(**case.planner_arguments())
    kv, outs = inputs.bind(planner), []
    for max_q_len in (1, 4):
        out = inputs.new_out()
        plan = plan_of(inputs, planner, max_q_len=max_q_len)
        plan.run(inputs.q, kv, out=out, **extras(inputs))
        outs.append(out)
    assert same_bits(*outs)
