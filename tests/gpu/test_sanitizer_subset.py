"""Small cases that reach every kind of kernel; tests/gpu/sanitize.sh runs them instrumented."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitattn
from jitattn.spec.layout import Layout, Loader
from tests.gpu.device import DEVICE
from tests.support import cases
from tests.support.harness import check_case
from tests.support.inputs import make_inputs

SPLIT = (2500, 1, 0, 17)  # the first request is split over many CTAs, and merged

CASES = (
    replace(cases.D128, lengths=SPLIT),
    replace(cases.D128_SEPARATE, lengths=SPLIT, cache="twice", rows="int64"),
    replace(cases.D64, lengths=(1, 16, 17, 95), cache="odd_strides", q_view="odd", out_view="odd"),
    replace(cases.D128_PAGE_32, lengths=(700, 33), window_left=100, sinks="bfloat16-column"),
    replace(cases.D128_FP16, lengths=(0, -1, 65), cache="odd_base", lengths_dtype="int64"),
    replace(cases.D128_PAGE_3, lengths=(13, 400), cache="heads_outside", kv_layout="HND"),
    replace(cases.D256, lengths=SPLIT, cache="packed", group_size=8),
    replace(cases.PAGE_1, lengths=(600, 2), cache="odd_values", window_left=0),
    replace(cases.SOFT_CAP, lengths=SPLIT, sinks="float32", call="returned"),
    replace(cases.WIDE, lengths=(300, 5), group_size=71, num_kv_heads=1, cache="size_1"),
    replace(cases.WIDE, lengths=SPLIT, cache="layer_inside", out_view="heads_outside"),
    replace(cases.D128, lengths=tuple(range(64)), cache="one_hnd", kv_layout="HND", causal=False),
    # Every layout through both loaders.
    replace(cases.D128_CSR, lengths=SPLIT, seed=1),
    replace(cases.D128_CSR, lengths=(33, 0, 700), cache="odd_strides", window_left=100),
    replace(cases.D128_TOKEN, lengths=SPLIT, rows="int32"),
    replace(cases.D128_TOKEN, lengths=(33, 0, 700), cache="odd_base", window_left=100),
    replace(cases.RAGGED, lengths=SPLIT, sinks="float32"),
    replace(cases.RAGGED, lengths=(33, 0, 700), cache="odd_values", window_left=100),
    replace(cases.D128_SEPARATE, lengths=(33, 0, 700), cache="odd_strides"),
    # Two head dims.
    replace(cases.D192X128, lengths=SPLIT, cache="packed"),
    replace(cases.D192X128, lengths=(33, 700), page_table="ragged", page_size=1, group_size=16),
    replace(
        cases.D192X128, lengths=(33, 700), page_table="token", page_size=1, cache="odd_strides"
    ),
    # Splits that depend on the request alone: several of one slot, and of several slots.
    *(replace(case, lengths=SPLIT, batch_invariant=True) for case in cases.EVERY_LAYOUT),
    replace(cases.D256, lengths=(2500, 900, 300) * 20, batch_invariant=True, num_kv_heads=1),
    replace(cases.WIDE, lengths=(2500, 900), batch_invariant=True, cache="odd_strides"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: cases.Case) -> None:
    check_case(case, DEVICE)


def test_cases_reach_every_kind_of_kernel() -> None:
    reached = {
        (
            case.page_table,
            cases.loader_of(case),
            case.batch_invariant,
            case.value_dim == case.head_dim,
        )
        for case in CASES
    }
    for table in Layout:
        has_boxes = table not in (Layout.TOKEN, Layout.RAGGED)
        fast = Loader.TENSOR if has_boxes else Loader.VECTOR
        loaders = {loader for layout, loader, *_ in reached if layout == table}
        assert loaders >= {fast, Loader.PLAIN}
        assert {invariant for layout, _, invariant, _ in reached if layout == table} == {
            False,
            True,
        }
    assert {same for *_, same in reached} == {False, True}


@pytest.mark.parametrize("case", cases.EVERY_LAYOUT, ids=str)
def test_too_long(case: cases.Case) -> None:
    """Reads stop at the table's end."""
    if DEVICE == "cpu":
        pytest.skip("the CPU refuses such a length")
    inputs = make_inputs(replace(case, lengths=(40, 300, 7)), DEVICE)
    inputs.seq_lens[1] = 2**31 - 1
    planner = jitattn.AttentionPlanner(**inputs.case.planner_arguments(), device=DEVICE)
    plan = planner.plan(inputs.pages(), inputs.seq_lens)
    out = plan.run(inputs.q, planner.bind(inputs.given))
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isfinite(out[::2]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_merge(dtype: torch.dtype) -> None:
    outs = torch.randn(3, 7, 3, 40, device=DEVICE).to(dtype)
    lses = torch.randn(3, 7, 3, device=DEVICE)
    lses[1, ::2] = -torch.inf
    out, lse = jitattn.merge_states(outs, lses)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(lse).all())
