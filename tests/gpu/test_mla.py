"""Latent attention on a card: every cache and table, bits, graphs, streams, invalid lengths."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.support.harness import same_bits
from tests.support.mla import (
    DECODE_ON_A_CARD,
    HEADS_OF_ROWS,
    LAYOUTS,
    ON_A_CARD,
    RISING_ON_A_CARD,
    MLACase,
    MLAInputs,
    check_invariant_rises,
    check_kernel,
    check_queries_that_are_not_finite,
    check_too_long,
    gpu_cases,
    make_inputs,
)

DECODE = replace(DECODE_ON_A_CARD, lengths=(1900, 70, 0, 600))
HEADS = (16, 128)


def some_requests(inputs: MLAInputs, order: list[int]) -> MLAInputs:
    """Those of a decode batch with a 2-D table, in this order."""
    rows = torch.tensor(order, device=DEVICE)
    return replace(
        inputs,
        q_nope=inputs.q_nope[rows],
        q_pe=inputs.q_pe[rows],
        table=inputs.table[rows].contiguous(),
        seq_lens=inputs.seq_lens[rows],
    )


@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_cases(case: MLACase) -> None:
    inputs = make_inputs(case, DEVICE)
    check_kernel(inputs, *inputs.run())


@pytest.mark.parametrize("num_heads", [16, 24])
@pytest.mark.parametrize("form", ["one", "fp8_one", "fp8_rows"])
@pytest.mark.parametrize("base", [ON_A_CARD, DECODE_ON_A_CARD], ids=["mixed", "decode"])
def test_runs_repeat_their_bits(base: MLACase, form: str, num_heads: int) -> None:
    inputs = make_inputs(replace(base, form=form, num_heads=num_heads), DEVICE)
    planner = inputs.case.planner(DEVICE)
    out, lse = inputs.run(planner)
    for _ in range(5):
        again_out, again_lse = inputs.run(planner)
        assert same_bits(again_out, out)
        assert same_bits(again_lse, lse)


def test_layouts_have_the_same_bits() -> None:
    """Of boxes, vectors and elements."""
    first = None
    for layout in LAYOUTS:
        out, lse = make_inputs(replace(ON_A_CARD, layout=layout), DEVICE).run()
        first = first or (out, lse)
        assert same_bits(out, first[0]), layout
        assert same_bits(lse, first[1]), layout


@pytest.mark.parametrize("table", ["separate", "csr", "token"])
def test_tables_have_the_same_bits(table: str) -> None:
    out, lse = make_inputs(ON_A_CARD, DEVICE).run()
    other_out, other_lse = make_inputs(replace(ON_A_CARD, page_table=table), DEVICE).run()
    assert same_bits(other_out, out)
    assert same_bits(other_lse, lse)


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("form", ["one", "fp8_one"])
def test_batch_invariant(form: str, num_heads: int) -> None:
    case = replace(DECODE, form=form, num_heads=num_heads, lengths=(9000, 70, 1, 600, 0, 4100))
    inputs = make_inputs(case, DEVICE)
    arguments = case.planner_arguments() | {"batch_invariant": True}
    planner = jitattn.MLAPlanner(**arguments, device=DEVICE)  # type: ignore[arg-type]
    out, lse = inputs.run(planner)
    check_kernel(inputs, out, lse)
    for order in ([5, 0, 3], [0], [4, 3, 2, 1], [1] * 40 + [0]):
        found_out, found_lse = some_requests(inputs, order).run(planner)
        assert same_bits(found_out, out[order])
        assert same_bits(found_lse, lse[order])


@pytest.mark.parametrize("num_heads", [5, 16])
@pytest.mark.parametrize("level", [0.0, 15_000.0])
def test_batch_invariant_maxima_that_rise(level: float, num_heads: int) -> None:
    case = replace(RISING_ON_A_CARD, num_heads=num_heads, level=level)
    arguments = case.planner_arguments() | {"batch_invariant": True}
    planner = jitattn.MLAPlanner(**arguments, device=DEVICE)  # type: ignore[arg-type]
    check_invariant_rises(case, DEVICE, planner)


@pytest.mark.parametrize("num_heads", HEADS_OF_ROWS.values())
@pytest.mark.parametrize("form", ["one", "fp8_one", "fp8_mixed"])
def test_queries_that_are_not_finite(form: str, num_heads: int) -> None:
    case = replace(RISING_ON_A_CARD, form=form, num_heads=num_heads)
    check_queries_that_are_not_finite(case, DEVICE, case.planner(DEVICE))


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("form", ["one", "fp8_rows"])
def test_a_graph_follows_lengths_and_queries(form: str, num_heads: int) -> None:
    case = replace(DECODE, form=form, num_heads=num_heads)
    inputs = make_inputs(case, DEVICE)
    planner = case.planner(DEVICE)
    kv, plan = planner.bind(inputs.kv, k_scale=inputs.k_scale), inputs.plan(planner)
    out, lse = torch.empty_like(inputs.q_nope), inputs.q_nope.new_empty((4, num_heads)).float()
    plan.run(inputs.q_nope, inputs.q_pe, kv, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh()
        plan.run(inputs.q_nope, inputs.q_pe, kv, out=out, lse=lse)
    for lengths in ((1900, 70, 0, 600), (3, 1, 20, 599), (1500, 0, 0, 1)):
        wanted = torch.tensor(lengths, device=DEVICE, dtype=inputs.seq_lens.dtype)
        inputs.seq_lens.copy_(wanted.minimum(torch.tensor(case.lengths, device=DEVICE)))
        inputs.q_nope.mul_(0.97)
        for buffer in (out, lse):
            buffer.fill_(math.nan)
        graph.replay()
        eager_out, eager_lse = inputs.run(planner)
        assert same_bits(out, eager_out)
        assert same_bits(lse, eager_lse)


@pytest.mark.parametrize("form", ["one", "fp8_one"])
def test_too_long_requests_are_nan_and_others_intact(form: str) -> None:
    case = replace(DECODE, form=form, lengths=(40, 70, 33), q_lens=(1, 20, 2), num_heads=5)
    check_too_long(make_inputs(case, DEVICE), case.planner(DEVICE))


@pytest.mark.parametrize("part", ["latent", "rope"])
def test_a_visible_nan_reaches_the_rows_that_see_it(part: str) -> None:
    case = replace(DECODE, form="pair", lengths=(130, 70, 5), page_table="separate")
    inputs = make_inputs(case, DEVICE)
    assert isinstance(inputs.kv, tuple)
    row = 0 if part == "latent" else 1
    page = int(inputs.table[1, row, 0])
    inputs.kv[row][page, 3] = math.nan
    out, lse = inputs.run()
    assert bool(lse[1].isnan().all())
    assert bool(out[1].isnan().all())
    assert bool(out[[0, 2]].isfinite().all())


def test_few_multiprocessors() -> None:
    case = replace(ON_A_CARD, num_heads=128)
    inputs = make_inputs(case, DEVICE)
    for num_sms in (1, 7):
        arguments = case.planner_arguments() | {"num_sms": num_sms}
        planner = jitattn.MLAPlanner(**arguments, device=DEVICE)  # type: ignore[arg-type]
        check_kernel(inputs, *inputs.run(planner))


def test_streams_side_by_side() -> None:
    case = replace(ON_A_CARD, num_heads=16)
    inputs = [make_inputs(replace(case, seed=seed), DEVICE) for seed in range(3)]
    planner = case.planner(DEVICE)
    wanted = [one.run(planner) for one in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for one, stream in zip(inputs * 4, streams * 4, strict=True):
        with torch.cuda.stream(stream):
            found.append(one.run(planner))
    torch.cuda.synchronize()
    for (out, lse), (want_out, want_lse) in zip(found, wanted * 4, strict=True):
        assert same_bits(out, want_out)
        assert same_bits(lse, want_lse)


def test_a_given_workspace_has_the_splits() -> None:
    """In the room that was said before."""
    case = replace(DECODE, lengths=(9000,), num_heads=16)
    inputs, workspace = make_inputs(case, DEVICE), jitattn.Workspace(DEVICE)
    arguments = case.planner_arguments() | {"workspace": workspace}
    planner = jitattn.MLAPlanner(**arguments, device=DEVICE)  # type: ignore[arg-type]
    said = planner.workspace_bytes(1)
    check_kernel(inputs, *inputs.run(planner))
    assert 0 < workspace.num_bytes <= said
    assert bool(workspace.partials.any())
