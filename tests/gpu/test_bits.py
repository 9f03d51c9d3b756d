"""What must not change a single bit of the result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.cases import (
    CACHES_SHARED,
    D64,
    D128,
    D128_PAGE_3,
    D128_SEPARATE,
    D256,
    SOFT_CAP,
    TWINS,
    Case,
)
from tests.gpu.device import DEVICE
from tests.harness import attend, planner_for, same_bits
from tests.inputs import ROW_VIEWS, Inputs, make_inputs, random_tokens

LENGTHS = (4097, 1, 0, 16, 255, 12000, 33)
Result = tuple[Tensor, Tensor]


def bits_of(case: Case) -> tuple[Inputs, Result]:
    inputs = make_inputs(case, DEVICE)
    return inputs, attend(inputs)


def assert_same(got: Result, want: Result) -> None:
    assert same_bits(got[0], want[0]), "out differs"
    assert same_bits(got[1], want[1]), "lse differs"


@pytest.mark.parametrize("window_left", [-1, 500])
@pytest.mark.parametrize("case", TWINS, ids=str)
def test_both_table_layouts(case: Case, window_left: int) -> None:
    """The same logical pages through [R, M] and [R, 2, M]."""
    shared = replace(case, page_table="shared", lengths=LENGTHS, window_left=window_left)
    inputs, want = bits_of(shared)
    inputs.case = replace(shared, page_table="separate")
    inputs.table = torch.stack((inputs.table, inputs.table), dim=1)
    assert_same(attend(inputs), want)


@pytest.mark.parametrize("case", [D128, D128_PAGE_3, D256], ids=str)
def test_page_placement(case: Case) -> None:
    case = replace(case, lengths=LENGTHS)
    tokens = random_tokens(case, DEVICE)
    want = attend(make_inputs(case, DEVICE, tokens))
    for seed in (1, 2, 3):
        moved = make_inputs(replace(case, seed=seed), DEVICE, tokens)
        assert_same(attend(moved), want)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", [*CACHES_SHARED, "twice"])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D64], ids=str)
def test_cache_strides(case: Case, cache: str, kv_layout: str) -> None:
    """Whatever the memory order and its alignment: the loaders differ, the sums don't."""
    if cache == "twice" and case.page_table == "shared":
        pytest.skip("one tensor passed twice needs two rows of ids")
    case = replace(case, lengths=LENGTHS, num_kv_heads=1 if cache == "size_1" else 2)
    tokens = random_tokens(case, DEVICE)
    want = attend(make_inputs(case, DEVICE, tokens))
    strange = replace(case, cache=cache, kv_layout=kv_layout)
    assert_same(attend(make_inputs(strange, DEVICE, tokens)), want)


@pytest.mark.parametrize("view", ROW_VIEWS)
def test_q_and_out_strides(view: str) -> None:
    case = replace(D128, lengths=LENGTHS)
    tokens = random_tokens(case, DEVICE)
    want = attend(make_inputs(case, DEVICE, tokens))
    strange = replace(case, q_view=view, out_view=view)
    assert_same(attend(make_inputs(strange, DEVICE, tokens)), want)


@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, SOFT_CAP], ids=str)
def test_garbage_table_entries(case: Case, window_left: int) -> None:
    inputs, want = bits_of(replace(case, lengths=LENGTHS, window_left=window_left))
    for garbage in (0, -1, 2**31 - 1, -(2**31), 10**6, inputs.dead_page):
        inputs.table = inputs.table.masked_fill(inputs.garbage, garbage)
        assert_same(attend(inputs), want)


def test_width_of_the_table_and_maxima() -> None:
    inputs, want = bits_of(replace(D128, lengths=LENGTHS))
    planner = planner_for(inputs.case, DEVICE)
    kv = planner.bind(inputs.cache)
    wide = torch.full((len(LENGTHS), 5000), -1, dtype=torch.int32, device=DEVICE)
    wide[:, : inputs.table.shape[1]] = inputs.table
    for table, limit in ((inputs.table, 12000), (wide, None), (wide, 70_000)):
        plan = planner.plan(jitattn.BlockTable(table), inputs.seq_lens, max_kv_len=limit)
        assert_same(plan.run(inputs.q, kv, return_lse=True), want)


@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D256], ids=str)
def test_repeated_runs(case: Case) -> None:
    """Splits finish in any order and are merged in one."""
    case = replace(case, lengths=(*LENGTHS, 30_000), sinks="float32")
    inputs, want = bits_of(case)
    planner = planner_for(case, DEVICE)
    plan = planner.plan(jitattn.BlockTable(inputs.table), inputs.seq_lens)
    kv = planner.bind(inputs.cache)
    for repeat in range(20):
        if repeat % 5 == 0:
            plan.refresh()
        result = plan.run(inputs.q, kv, sinks=inputs.sinks, return_lse=True)
        assert_same(result, want)


def test_integer_types_rows_and_strided_lengths() -> None:
    inputs, want = bits_of(replace(D128, lengths=LENGTHS, rows="int32"))
    for dtype in (torch.int32, torch.int64):
        for step in (1, 2, 77):
            wide = torch.full((2, len(LENGTHS), step), 2**31 - 1, dtype=dtype, device=DEVICE)
            wide[0, :, 0], wide[1, :, 0] = inputs.seq_lens, inputs.rows
            inputs.seq_lens, inputs.rows = wide[0, :, 0], wide[1, :, 0]
            assert_same(attend(inputs), want)


def test_a_window_as_long_as_the_request_is_none() -> None:
    case = replace(D128, lengths=LENGTHS)
    _, want = bits_of(case)
    for window_left in (max(LENGTHS) - 1, max(LENGTHS), 10**9, 2**31 - 1):
        assert_same(bits_of(replace(case, window_left=window_left))[1], want)


def test_buffers_or_not() -> None:
    case = replace(D128, lengths=LENGTHS)
    _, want = bits_of(case)
    assert_same(bits_of(replace(case, call="returned"))[1], want)
    inputs = make_inputs(case, DEVICE)
    planner = planner_for(case, DEVICE)
    plan = planner.plan(jitattn.BlockTable(inputs.table), inputs.seq_lens)
    assert same_bits(plan.run(inputs.q, inputs.cache), want[0])
