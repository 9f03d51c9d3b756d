"""Small cases of many query tokens; tests/gpu/sanitize.sh runs them instrumented."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jitattn.spec.layout import Layout, Loader
from tests.gpu.device import DEVICE
from tests.support.cases import (
    D64,
    D128,
    D128_CSR,
    D128_SEPARATE,
    D128_TOKEN,
    D192X128,
    D512,
    E4M3,
    E4M3_D256,
    INT8,
    MASKED_D128,
    RAGGED,
    Case,
    loader_of,
)
from tests.support.harness import check_case, extras, plan_of, planner_for
from tests.support.inputs import make_inputs


def of(case: Case, *pairs: tuple[int, int], **changes: object) -> Case:
    """The case with these (q_len, kv_len)."""
    q_lens, lengths = zip(*pairs, strict=True)
    return replace(case, q_lens=q_lens, lengths=lengths, **{"num_kv_heads": 1} | changes)


# Decode with queries, split and whole; prefill split, whole, empty; requests without queries.
MIX = ((2, 2500), (1, 17), (20, 1200), (70, 70), (0, 5), (3, 0))

CASES = (
    of(D128, *MIX, spare_rows=3, sinks="float32"),
    of(D64, (3, 40), (33, 90), cache="odd_strides", q_view="odd", out_view="odd", causal=False),
    of(D128_SEPARATE, *MIX, cache="odd_values", window_left=100, rows="int64"),
    of(D128_CSR, *MIX, batch_invariant=True, seed=1),
    of(D128_TOKEN, (130, 129), (5, 2), (40, 1500), window_left=0),
    of(RAGGED, *MIX, batch_invariant=True, cache="odd_base"),
    of(D192X128, (18, 700), (2, 33), cache="packed", call="returned"),
    of(D512, (18, 300), (2, 33), out_view="heads_outside"),
    of(E4M3, *MIX, spare_rows=3),
    of(E4M3_D256, *MIX, cache="odd_strides"),
    of(INT8, *MIX, batch_invariant=True),
    of(MASKED_D128, *MIX, spare_rows=2),
    of(MASKED_D128, *MIX, mask="packed", mask_width=72, seed=1, cache="odd_strides"),
    of(MASKED_D128, *MIX, mask="ragged", batch_invariant=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    check_case(case, DEVICE)


def test_cases_reach_every_kind_of_kernel() -> None:
    assert {case.page_table for case in CASES} == {table.value for table in Layout}
    loaders = {(case.mask is None, loader_of(case)) for case in CASES}
    wanted = {(True, loader) for loader in Loader}
    wanted |= {(False, Loader.TENSOR), (False, Loader.PLAIN)}
    assert loaders == wanted
    assert {(case.mask is None, case.batch_invariant) for case in CASES} == {
        (unmasked, invariant) for unmasked in (True, False) for invariant in (True, False)
    }


@pytest.mark.parametrize("case", [D128, MASKED_D128, RAGGED], ids=str)
def test_offsets_that_promise_too_much(case: Case) -> None:
    """Too many queries, and rows that q lacks: reads and writes stop at the tensors' ends."""
    if DEVICE == "cpu":
        pytest.skip("the CPU refuses such offsets")
    inputs = make_inputs(of(case, (70, 90), (9, 40), (40, 200)), DEVICE)
    if inputs.mask is not None:
        inputs.mask = replace(inputs.mask, given=inputs.mask.given[:100].clone())
    plan = plan_of(inputs, planner_for(inputs.case, DEVICE), max_q_len=60)
    out = plan.run(inputs.q[:100].clone(), inputs.given, **extras(inputs))
    assert bool(torch.isnan(out[:70]).all())
    assert bool(torch.isfinite(out[70:]).all())
