"""A dozen small cases that touch every path; tests/gpu/sanitize.sh runs them instrumented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cases import (
    D64,
    D128,
    D128_FP16,
    D128_PAGE_3,
    D128_PAGE_32,
    D128_SEPARATE,
    D256,
    PAGE_1,
    SOFT_CAP,
    WIDE,
    Case,
)
from tests.gpu.device import DEVICE
from tests.harness import run_case

SPLIT = (2500, 1, 0, 17)  # the first request is split over many CTAs, and merged

CASES = (
    replace(D128, lengths=SPLIT),
    replace(D128_SEPARATE, lengths=SPLIT, cache="twice", rows="int64"),
    replace(D64, lengths=(1, 16, 17, 95), cache="odd_strides", q_view="odd", out_view="odd"),
    replace(D128_PAGE_32, lengths=(700, 33), window_left=100, sinks="bfloat16-column"),
    replace(D128_FP16, lengths=(0, -1, 65), cache="odd_base", lengths_dtype="int64"),
    replace(D128_PAGE_3, lengths=(13, 400), cache="heads_outside", kv_layout="HND"),
    replace(D256, lengths=SPLIT, cache="packed", group_size=8),
    replace(PAGE_1, lengths=(600, 2), cache="odd_values", window_left=0),
    replace(SOFT_CAP, lengths=SPLIT, sinks="float32", call="returned"),
    replace(WIDE, lengths=(300, 5), group_size=71, num_kv_heads=1, cache="size_1"),
    replace(WIDE, lengths=SPLIT, cache="layer_inside", out_view="heads_outside"),
    replace(D128, lengths=tuple(range(64)), cache="one_hnd", kv_layout="HND", causal=False),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    run_case(case, DEVICE)
