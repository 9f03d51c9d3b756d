"""Decode kernels against the float64 reference, in poisoned memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import (
    D64,
    D128,
    D128_FP16,
    D128_SEPARATE,
    D256,
    PAGE_1,
    WIDE,
    Case,
    decode_cases,
)
from tests.support.inputs import Inputs, address_probe, make_inputs, uniform_probe

FAMILIES = (D64, D128, D128_FP16, D128_SEPARATE, D256, PAGE_1, WIDE)


@pytest.mark.parametrize("case", decode_cases(), ids=str)
def test_decode(case: Case) -> None:
    harness.check_case(case, DEVICE)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 1000])
@pytest.mark.parametrize("case", [D128, D256, WIDE], ids=str)
def test_any_share_of_the_card(case: Case, num_sms: int) -> None:
    """From no split at all to as many as there are CTAs."""
    case = replace(case, lengths=(9000, 0, 1, 300, 4096), sinks="float32", seed=num_sms)
    inputs = make_inputs(case, DEVICE)
    harness.check(
        case,
        *harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms)),
        harness.expected(inputs),
    )


@pytest.mark.parametrize("batch_size", [1, 2, 31, 32, 33, 131, 132, 133, 512, 1024, 1025, 3000])
def test_batch_sizes(batch_size: int) -> None:
    lengths = tuple((37 * b) % 71 for b in range(batch_size))
    harness.check_case(replace(D64, lengths=lengths, num_kv_heads=1, rows="int32"), DEVICE)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_address_of_a_long_request(case: Case) -> None:
    """Address probes at page and tile borders, each with weight on one token of 12,345."""
    edges = (0, 1, 15, 16, 17, 31, 63, 64, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 8191, 12344)
    case = replace(case, lengths=(12345,) * len(edges), num_kv_heads=1)
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, list(edges)))
    out, _ = harness.attend(inputs)
    assert torch.equal(out, harness.target_rows(inputs, edges))


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_token_is_counted_once(case: Case) -> None:
    """Uniform probes: exp(lse) is the number of visible keys."""
    lengths = (1, 2, 63, 64, 65, 0, 1000, 4097, 9999, 65_536, 70_000)
    case = replace(case, lengths=lengths, num_kv_heads=1)
    inputs = make_inputs(case, DEVICE, uniform_probe(case, DEVICE))
    out, lse = harness.attend(inputs)
    counts = torch.tensor(lengths, device=DEVICE, dtype=torch.float64)[:, None].expand_as(lse)
    torch.testing.assert_close(lse.double().exp(), counts, rtol=1e-5, atol=0)
    harness.check(case, out, lse, harness.expected(inputs))


def fill_row(inputs: Inputs, row: int) -> None:
    """Replace the garbage of a table row by ids of dead pages: its length now claims them."""
    inputs.table[row] = inputs.table[row].masked_fill(inputs.garbage[row], inputs.dead_page)


@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D256], ids=str)
@pytest.mark.parametrize("by", ["table", "max_kv_len"])
def test_too_long_requests_are_nan_and_harm_nobody(case: Case, by: str) -> None:
    """The device can't refuse a length: it clamps its reads and marks the request."""
    inputs = make_inputs(replace(case, lengths=(100, 5000, 33)), DEVICE)
    fill_row(inputs, 1)
    capacity = inputs.table.shape[-1] * case.page_size if by == "table" else 5000
    want = harness.expected(inputs)
    for length in (capacity + 1, capacity + 12_345, 2**31 - 1):
        inputs.seq_lens[1] = length
        planner = harness.planner_for(inputs.case, DEVICE)
        pages = jitattn.BlockTable(inputs.table)
        limit = None if by == "table" else capacity
        plan = planner.plan(pages, inputs.seq_lens, max_kv_len=limit)
        out, lse = plan.run(inputs.q, planner.bind(inputs.given), return_lse=True)
        assert bool(torch.isnan(out[1]).all())
        assert bool(torch.isnan(lse[1]).all())
        out[1], lse[1] = want.out[1], want.lse[1]
        harness.check(inputs.case, out, lse, want)


@pytest.mark.parametrize("case", [D128, D64], ids=str)
def test_int64_lengths_beyond_32_bits(case: Case) -> None:
    """2**32 + 5 is too long, not 5; -(2**32) + 5 is padding, not 5."""
    inputs = make_inputs(replace(case, lengths=(40, 5, 5), lengths_dtype="int64"), DEVICE)
    fill_row(inputs, 1)
    want = harness.expected(inputs)
    inputs.seq_lens[1], inputs.seq_lens[2] = 2**32 + 5, 5 - 2**32
    out, lse = harness.attend(inputs)
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isnan(lse[1]).all())
    assert bool((out[2] == 0).all())
    assert bool((lse[2] == -torch.inf).all())
    limit = (out[0].double() - want.out[0]).abs().max()
    assert float(limit) < 0.1


@pytest.mark.parametrize("page_table", ["shared", "separate"])
def test_reference_backend_on_the_device(page_table: str) -> None:
    case = replace(D128, page_table=page_table, lengths=(0, 300, 17), window_left=100, rows="int64")
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE, backend="reference")
    harness.check(case, *harness.attend(inputs, planner), harness.expected(inputs))


def test_refresh_and_new_tables() -> None:
    """A plan follows its length tensor at refresh, and its tables and caches at run."""
    case = replace(D128, lengths=(700, 3, 0, 64))
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE)
    pages = jitattn.BlockTable(inputs.table)
    plan, kv = planner.plan(pages, inputs.seq_lens), planner.bind(inputs.given)
    harness.check(case, *plan.run(inputs.q, kv, return_lse=True), harness.expected(inputs))

    other = make_inputs(replace(case, seed=1), DEVICE)
    result = plan.run(
        other.q,
        planner.bind(other.cache),
        pages=jitattn.BlockTable(other.table),
        return_lse=True,
    )
    harness.check(case, *result, harness.expected(other))

    shorter = replace(case, lengths=(600, 1, 0, 50))
    inputs = make_inputs(shorter, DEVICE)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    wide = torch.zeros(4, 60, dtype=torch.int32, device=DEVICE)
    wide[:, : inputs.table.shape[1]] = inputs.table
    plan = planner.plan(jitattn.BlockTable(wide), lengths)
    lengths.copy_(inputs.seq_lens)
    plan.refresh()
    result = plan.run(inputs.q, planner.bind(inputs.given), return_lse=True)
    harness.check(shorter, *result, harness.expected(inputs))


def test_layers_share_a_plan() -> None:
    """One plan, many runs back to back: counters and partials are clean after each."""
    case = replace(D128, lengths=(5000, 17, 900))
    layers = [make_inputs(replace(case, seed=seed), DEVICE) for seed in range(4)]
    planner = harness.planner_for(case, DEVICE)
    table, lengths = layers[0].table, layers[0].seq_lens
    plan = planner.plan(jitattn.BlockTable(table), lengths)
    results = [
        plan.run(
            layer.q,
            planner.bind(layer.cache),
            pages=jitattn.BlockTable(layer.table),
            return_lse=True,
        )
        for layer in layers * 3
    ]
    for layer, result in zip(layers * 3, results, strict=True):
        harness.check(case, *result, harness.expected(layer))


def test_nothing_waits_for_the_device() -> None:
    if DEVICE != "cuda":
        pytest.skip("there is no device to wait for")
    case = replace(D128, lengths=(5000, 17, 900), sinks="bfloat16", rows="int64")
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(case, DEVICE)
    out, lse = inputs.new_out(), inputs.new_lse()
    with harness.forbid_waiting():
        pages = jitattn.BlockTable(inputs.table, rows=inputs.rows)
        plan = planner.plan(pages, inputs.seq_lens)
        kv = planner.bind(inputs.given)
        plan.refresh()
        plan.run(inputs.q, kv, out=out, lse=lse, sinks=inputs.sinks)
    assert harness.same_bits(out, want[0])
    assert harness.same_bits(lse, want[1])


def test_run_allocates_nothing_that_is_given() -> None:
    if DEVICE != "cuda":
        pytest.skip("counts allocations of the device")
    inputs = make_inputs(replace(D128, lengths=(5000, 17, 900)), DEVICE)
    planner = harness.planner_for(inputs.case, DEVICE)
    plan = planner.plan(jitattn.BlockTable(inputs.table), inputs.seq_lens)
    kv, out, lse = planner.bind(inputs.given), inputs.new_out(), inputs.new_lse()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    plan.refresh()
    plan.run(inputs.q, kv, out=out, lse=lse)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
