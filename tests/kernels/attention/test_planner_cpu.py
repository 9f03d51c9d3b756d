"""The public API on the CPU: what plan, bind and run promise, on the reference backend."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.support.cases import Case, decode_cases
from tests.support.harness import (
    attend,
    check,
    check_case,
    expected,
    planner_for,
    same_bits,
    target_rows,
)
from tests.support.inputs import address_probe, make_inputs, uniform_probe

SMALL = [
    case
    for case in decode_cases()
    if max(case.lengths) < 700 and len(case.lengths) < 50 and case.num_qo_heads <= 32
]
CASE = Case(head_dim=32, page_size=4, lengths=(5, 0, 17), num_kv_heads=2, group_size=2)


@pytest.mark.parametrize("case", SMALL[::2], ids=str)
def test_decode_cases(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.parametrize("page_table", ["shared", "separate"])
@pytest.mark.parametrize("cache", ["pair_nhd", "one_hnd", "interleaved", "packed", "odd_strides"])
def test_address_probe(cache: str, page_table: str) -> None:
    case = replace(CASE, cache=cache, page_table=page_table, lengths=(37, 37, 37, 37))
    targets = [0, 15, 16, 36]
    inputs = make_inputs(case, "cpu", address_probe(case, "cpu", targets))
    out, _ = attend(inputs)
    assert torch.equal(out, target_rows(inputs, targets))


@pytest.mark.parametrize("window_left", [-1, 0, 1, 15, 16, 298, 299, 300, 10**9, 2**31])
def test_window_counts_its_keys(window_left: int) -> None:
    case = replace(CASE, lengths=(300, 1, 17), window_left=window_left)
    _, lse = attend(make_inputs(case, "cpu", uniform_probe(case, "cpu")))
    for row, length in zip(lse, case.lengths, strict=True):
        count = length if window_left < 0 else min(length, window_left + 1)
        torch.testing.assert_close(row.exp(), torch.full_like(row, count))


def test_scale_defaults_to_one_over_the_root_of_head_dim() -> None:
    inputs = make_inputs(CASE, "cpu")
    explicit = attend(inputs, planner_for(CASE, "cpu", sm_scale=32**-0.5))
    assert same_bits(attend(inputs)[0], explicit[0])


# --- what run returns -----------------------------------------------------------------------------


def parts(case: Case = CASE, **changes: object) -> tuple:
    """Inputs, the plan and the bound cache of a case."""
    inputs = make_inputs(case, "cpu")
    planner = planner_for(case, "cpu", **changes)
    plan = planner.plan(jitattn.BlockTable(inputs.table, rows=inputs.rows), inputs.seq_lens)
    return inputs, plan, planner.bind(inputs.given)


def test_run_returns_out_alone() -> None:
    inputs, plan, kv = parts()
    out = plan.run(inputs.q, kv)
    assert isinstance(out, Tensor)
    assert out.dtype == torch.bfloat16
    assert out.shape == inputs.q.shape


def test_return_lse_gives_both() -> None:
    inputs, plan, kv = parts()
    out, lse = plan.run(inputs.q, kv, return_lse=True)
    check(CASE, out, lse, expected(inputs))


def test_given_out_and_lse_are_filled_and_returned() -> None:
    inputs, plan, kv = parts()
    out, lse = inputs.new_out(), inputs.new_lse()
    assert plan.run(inputs.q, kv, out=out, lse=lse) is out
    check(CASE, out, lse, expected(inputs))
    again = plan.run(inputs.q, kv, out=out, lse=lse, return_lse=True)
    assert again[0] is out
    assert again[1] is lse


def test_out_dtype_defaults_to_that_of_q() -> None:
    for dtype in ("bfloat16", "float16"):
        inputs, plan, kv = parts(replace(CASE, dtype=dtype))
        assert plan.run(inputs.q, kv).dtype == getattr(torch, dtype)
    inputs, plan, kv = parts(replace(CASE, out_dtype="float32"))
    assert plan.run(inputs.q, kv).dtype == torch.float32


def test_raw_caches_are_bound_on_the_spot() -> None:
    inputs, plan, kv = parts()
    assert same_bits(plan.run(inputs.q, inputs.given), plan.run(inputs.q, kv))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtypes_are_torch_dtypes_or_names(dtype: object) -> None:
    inputs, plan, kv = parts(q_dtype=dtype, kv_dtype=dtype)
    check(CASE, *plan.run(inputs.q, kv, return_lse=True), expected(inputs))


# --- padding and sinks ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
@pytest.mark.parametrize("page_table", ["shared", "separate"])
def test_empty_requests(length: int, page_table: str) -> None:
    case = replace(CASE, lengths=(length, 6, length), page_table=page_table)
    inputs = make_inputs(case, "cpu")
    out, lse = attend(inputs)
    check(case, out, lse, expected(inputs))
    assert bool((out[[0, 2]] == 0).all())
    assert bool((lse[[0, 2]] == -torch.inf).all())


def test_batch_of_padding_only() -> None:
    out, lse = attend(make_inputs(replace(CASE, lengths=(0, 0)), "cpu"))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def test_empty_request_with_a_sink_has_the_sink_as_lse() -> None:
    case = replace(CASE, lengths=(0, 5), sinks="float32")
    inputs = make_inputs(case, "cpu")
    out, lse = attend(inputs)
    assert torch.equal(lse[0], inputs.sinks)
    assert bool((out[0] == 0).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bfloat16-column"])
def test_sinks_of_every_float_dtype_and_stride(dtype: str) -> None:
    check_case(replace(CASE, sinks=dtype), "cpu")


# --- what a plan snapshots ------------------------------------------------------------------------


def test_lengths_are_read_by_plan_and_refresh() -> None:
    inputs, plan, kv = parts()
    before = plan.run(inputs.q, kv)
    inputs.seq_lens.copy_(torch.tensor([3, 0, 11], dtype=torch.int32))
    assert same_bits(plan.run(inputs.q, kv), before)
    plan.refresh()
    shorter = replace(CASE, lengths=(3, 0, 11))
    after = plan.run(inputs.q, kv)
    assert not same_bits(after, before)
    fresh = planner_for(shorter, "cpu").plan(
        jitattn.BlockTable(inputs.table), torch.tensor([3, 0, 11], dtype=torch.int32)
    )
    assert same_bits(after, fresh.run(inputs.q, kv))


def test_tables_are_read_by_run() -> None:
    inputs, plan, kv = parts()
    before = plan.run(inputs.q, kv)
    # Exchange the pages of request 0 in the table and in memory: the result stays.
    first, second = inputs.table[0, :2].tolist()
    inputs.table[0, 0], inputs.table[0, 1] = second, first
    for cache in inputs.cache:
        cache[[first, second]] = cache[[second, first]]
    assert same_bits(plan.run(inputs.q, kv), before)


def test_run_takes_another_table() -> None:
    inputs, plan, kv = parts()
    other = make_inputs(replace(CASE, seed=1), "cpu")
    pages = jitattn.BlockTable(other.table)
    out, lse = plan.run(
        other.q, planner_for(CASE, "cpu").bind(other.cache), pages=pages, return_lse=True
    )
    check(CASE, out, lse, expected(other))
    out, lse = plan.run(inputs.q, kv, return_lse=True)
    check(CASE, out, lse, expected(inputs))


def test_block_table_keeps_its_tensors() -> None:
    table, rows = torch.zeros(4, 3, dtype=torch.int32), torch.tensor([2, 0])
    pages = jitattn.BlockTable(table, rows=rows)
    assert pages.table is table
    assert pages.rows is rows
    assert jitattn.BlockTable(table).rows is None


def test_planner_arguments_are_readable() -> None:
    planner = planner_for(CASE, "cpu", window_left=7)
    assert planner.num_qo_heads == 4
    assert planner.num_kv_heads == 2
    assert planner.head_dim == 32
    assert planner.page_size == 4
    assert planner.window_left == 7


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_table", ["shared", "separate"])
def test_length_beyond_the_table(page_table: str) -> None:
    shape = (2, 4) if page_table == "shared" else (2, 2, 4)
    pages = jitattn.BlockTable(torch.zeros(shape, dtype=torch.int32))
    planner = planner_for(replace(CASE, page_size=16, page_table=page_table), "cpu")
    planner.plan(pages, torch.tensor([3, 64]))
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b1\b.*\b65\b.*\b64\b"):
        planner.plan(pages, torch.tensor([3, 65]))


def test_length_beyond_max_kv_len() -> None:
    pages = jitattn.BlockTable(torch.zeros(2, 4, dtype=torch.int32))
    planner = planner_for(replace(CASE, page_size=16), "cpu")
    planner.plan(pages, torch.tensor([33, 3]), max_kv_len=33)
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b0\b.*\b34\b.*\b33\b"):
        planner.plan(pages, torch.tensor([34, 3]), max_kv_len=33)


def test_length_beyond_the_table_at_refresh() -> None:
    inputs, plan, _ = parts()
    inputs.seq_lens[2] = 10_000
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b2\b.*\b10000\b"):
        plan.refresh()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [1, 2, 77])
def test_lengths_and_rows_of_both_integers_and_any_stride(dtype: torch.dtype, step: int) -> None:
    case = replace(CASE, rows="int32")
    inputs = make_inputs(case, "cpu")
    want = attend(inputs)

    def stretched(values: Tensor) -> Tensor:
        wide = torch.full((len(values), step), 2**31 - 1, dtype=dtype)
        wide[:, 0] = values
        return wide[:, 0]

    inputs.seq_lens, inputs.rows = stretched(inputs.seq_lens), stretched(inputs.rows)
    got = attend(inputs)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@pytest.mark.parametrize("page_table", ["shared", "separate"])
def test_table_with_strided_columns(page_table: str) -> None:
    inputs = make_inputs(replace(CASE, page_table=page_table), "cpu")
    want = attend(inputs)
    inputs.table = inputs.table.repeat_interleave(3, dim=-1)[..., ::3]
    assert inputs.table.stride(-1) == 3
    assert same_bits(attend(inputs)[0], want[0])


def test_two_requests_of_a_separate_table_are_not_ambiguous() -> None:
    # [2, 2, M] with two requests: the rank decides, not the sizes.
    check_case(replace(CASE, page_table="separate", lengths=(1, 1)), "cpu")


# --- sharing --------------------------------------------------------------------------------------


def test_a_planner_serves_many_threads() -> None:
    cases = [replace(CASE, lengths=(5 + i, 0, 17 * i), seed=i) for i in range(4)]
    failures: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            for _ in range(3):
                check_case(case, "cpu")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_backend_may_be_named() -> None:
    inputs = make_inputs(CASE, "cpu")
    out, lse = attend(inputs, planner_for(CASE, "cpu", backend="reference"))
    check(CASE, out, lse, expected(inputs))
