"""JITATTN_CHECK=1: what it finds, how it says it, and that it finds nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitattn
from tests.support.cases import (
    D128,
    D128_CSR,
    D128_SEPARATE,
    D128_TOKEN,
    EVERY_LAYOUT,
    RAGGED,
    Case,
)
from tests.support.devices import EVERYWHERE
from tests.support.harness import attend, check, expected
from tests.support.inputs import Inputs, make_inputs

CASES = tuple(replace(case, lengths=(40, 0, 70)) for case in EVERY_LAYOUT)


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_CHECK", "1")


def checking(case: Case, device: str) -> jitattn.AttentionPlanner:
    """A planner of its own: others were made without the check."""
    return jitattn.AttentionPlanner(**case.planner_arguments(), device=device)


def run(inputs: Inputs, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(inputs, checking(inputs.case, device))


@EVERYWHERE
@pytest.mark.parametrize("lengths_dtype", ["int32", "int64"])
@pytest.mark.parametrize("window_left", [-1, 20])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_is_found_in_a_valid_call(
    case: Case, window_left: int, lengths_dtype: str, device: str
) -> None:
    """Garbage that no query sees, padding, rows: all of it is allowed."""
    case = replace(
        case,
        lengths=(40, 0, 70, -1, 16, -(2**31)),
        window_left=window_left,
        rows="int64" if case.has_rows else None,
        lengths_dtype=lengths_dtype,
    )
    inputs = make_inputs(case, device)
    check(case, *run(inputs, device), expected(inputs))


@EVERYWHERE
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_length_beyond_the_table(case: Case, device: str) -> None:
    inputs = make_inputs(case, device)
    inputs.seq_lens[2] = 5000
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b2\b.*\b5000\b"):
        run(inputs, device)


@EVERYWHERE
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_length_beyond_max_kv_len(case: Case, device: str) -> None:
    inputs = make_inputs(case, device)
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b2\b.*\b70\b"):
        checking(case, device).plan(inputs.pages(), inputs.seq_lens, max_kv_len=69)


@EVERYWHERE
def test_a_length_beyond_the_pages_of_its_request(device: str) -> None:
    inputs = make_inputs(replace(D128_CSR, lengths=(40, 0, 70)), device)
    inputs.seq_lens[0] = 1 + 16 * int(inputs.indptr[1])
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b0\b"):
        run(inputs, device)


@EVERYWHERE
@pytest.mark.parametrize("value", [-1, 2**31 - 1, "end"])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_an_entry_outside_the_cache(case: Case, value: int | str, device: str) -> None:
    inputs = make_inputs(case, device)
    end = inputs.cache[0].shape[0] * (case.page_size if case.page_table == "token" else 1)
    bad = end if value == "end" else int(value)
    if case.page_table == "csr":
        inputs.table[int(inputs.indptr[2]) + 1] = bad
    elif case.page_table == "separate":
        inputs.table[2, 1, 1] = bad
    else:
        inputs.table[2, 1] = bad
    with pytest.raises(ValueError, match=rf"(?s)request 2\b.*\b{abs(bad)}\b.*\b{end}\b"):
        run(inputs, device)


@EVERYWHERE
@pytest.mark.parametrize(("which", "name"), [(0, "K"), (1, "V")])
def test_the_pool_of_a_separate_entry_is_named(which: int, name: str, device: str) -> None:
    inputs = make_inputs(replace(D128_SEPARATE, lengths=(40, 0, 70)), device)
    inputs.table[0, which, 2] = -7
    with pytest.raises(ValueError, match=rf"request 0\b.*-7 for {name}\b"):
        run(inputs, device)


@EVERYWHERE
@pytest.mark.parametrize("row", [-1, 9, 2**31 - 1])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D128_TOKEN], ids=str)
def test_a_row_outside_the_table(case: Case, row: int, device: str) -> None:
    inputs = make_inputs(replace(case, lengths=(40, 0, 70), rows="int64"), device)
    inputs.rows[2] = row
    with pytest.raises(ValueError, match=rf"rows\[2\] is {row}\b"):
        run(inputs, device)


@pytest.mark.gpu
def test_offsets_that_fall_or_end_too_late() -> None:
    starts = torch.tensor([0, 3, 2], dtype=torch.int32, device="cuda")
    lengths = torch.ones(2, dtype=torch.int32, device="cuda")
    many = torch.zeros(9, dtype=torch.int32, device="cuda")
    csr = checking(D128_CSR, "cuda")
    with pytest.raises(ValueError, match=r"kv_indptr.*\b2\b"):
        csr.plan(jitattn.CsrPages(starts, many), lengths)
    with pytest.raises(ValueError, match=r"kv_indptr.*\b2\b"):
        checking(RAGGED, "cuda").plan(jitattn.RaggedKV(starts), lengths)
    rising = torch.tensor([0, 3, 10], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"(?s)kv_indptr.*\b10\b.*\b9\b"):
        csr.plan(jitattn.CsrPages(rising, many), lengths)


@EVERYWHERE
def test_ragged_requests_end_inside_k_and_v(device: str) -> None:
    inputs = make_inputs(replace(RAGGED, lengths=(40, 0, 70)), device)
    end = int(inputs.indptr[2]) + 70
    inputs.cache = tuple(x[: end - 1] for x in inputs.cache)
    with pytest.raises(ValueError, match=rf"request 2\b.*\b{end}\b"):
        run(inputs, device)


@EVERYWHERE
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_pages_given_to_run_are_checked(case: Case, device: str) -> None:
    inputs = make_inputs(case, device)
    planner = checking(case, device)
    plan, kv = planner.plan(inputs.pages(), inputs.seq_lens), planner.bind(inputs.given)
    check(case, *plan.run(inputs.q, kv, return_lse=True), expected(inputs))
    inputs.table = torch.full_like(inputs.table, 10**6)
    with pytest.raises(ValueError, match=r"request 0\b.*\b1000000\b"):
        plan.run(inputs.q, kv, pages=inputs.pages())


@EVERYWHERE
def test_lengths_are_those_of_the_last_plan_or_refresh(device: str) -> None:
    """The third page of request 0 is wrong: nobody reads it until it is that long."""
    inputs = make_inputs(replace(D128, lengths=(40, 0, 70)), device)
    inputs.table[0, 2] = -1
    inputs.seq_lens[0] = 32
    planner = checking(inputs.case, device)
    plan, kv = planner.plan(inputs.pages(), inputs.seq_lens), planner.bind(inputs.given)
    plan.run(inputs.q, kv)
    inputs.seq_lens[0] = 33
    plan.run(inputs.q, kv)
    plan.refresh()
    with pytest.raises(ValueError, match=r"request 0\b.*-1\b"):
        plan.run(inputs.q, kv)


@EVERYWHERE
def test_nothing_is_written_when_something_is_found(device: str) -> None:
    inputs = make_inputs(replace(D128, lengths=(40, 0, 70)), device)
    inputs.table[0, 0] = -1
    planner = checking(inputs.case, device)
    plan, out = planner.plan(inputs.pages(), inputs.seq_lens), inputs.new_out().fill_(7)
    with pytest.raises(ValueError, match="JITATTN_CHECK"):
        plan.run(inputs.q, planner.bind(inputs.given), out=out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("row", [-1, 99])
def test_the_row_of_padding_may_be_anything(row: int) -> None:
    inputs = make_inputs(replace(D128, lengths=(40, 0, 70), rows="int64"), "cpu")
    inputs.rows[1] = row
    check(inputs.case, *run(inputs, "cpu"), expected(inputs))
