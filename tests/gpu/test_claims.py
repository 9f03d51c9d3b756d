"""Slots in waves, which CTAs claim as they get ready: any order of claims gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import D64, D128, D128_TOKEN, D256, E4M3, RAGGED, WIDE, Case, of
from tests.support.inputs import Inputs, make_inputs

# Empty requests at the end, which slots of the last wave hold many of.
MANY = tuple((997 * b) % 5000 for b in range(120)) + (0,) * 180

LONG = (70_000, 60_000, 50_000)
# Least number of waves; tests/kernels/attention/test_schedule_emulated.py has an H100's schedules.
# Requests of one length are kept whole, so that few of them have one wave.
IN_WAVES: list[tuple[Case, dict[str, object], int]] = [
    (replace(D128, lengths=LONG, num_kv_heads=1), {"num_sms": 20}, 2),
    (replace(D128, lengths=(70_000,) * 3, num_kv_heads=1), {"num_sms": 5}, 4),
    (replace(D128, lengths=MANY * 2, num_kv_heads=2), {}, 2),
    (replace(D128, lengths=MANY, num_kv_heads=1), {"num_sms": 5}, 5),
    (replace(D64, lengths=MANY, num_kv_heads=8), {"num_sms": 5}, 6),
    (replace(RAGGED, lengths=MANY, num_kv_heads=2), {"num_sms": 1}, 6),
    (replace(D128_TOKEN, lengths=(60_000, 3, 0, 40_000)), {"num_sms": 7}, 4),
    (replace(D256, lengths=(*range(9000, 7400, -100),), num_kv_heads=1), {"num_sms": 20}, 3),
    (replace(D256, lengths=(500,) * 256, num_kv_heads=1), {"num_sms": 16}, 3),
    (replace(WIDE, lengths=(5000, 0, 0, 40_000), sinks="float32"), {"num_sms": 3}, 4),
    (replace(E4M3, lengths=(70_000, 17), window_left=40_000), {"num_sms": 2}, 3),
    (of(D128, (2, 30_000), (1, 9000), (0, 5), (2, 40)), {"num_sms": 2}, 4),
    (of(D128, (4, 30_000), (1, 9000), (0, 5), (2, 40)), {"num_sms": 2}, 4),
    (of(D128, (100, 30_000), (1, 9000), (0, 5), (2, 40)), {"num_sms": 2}, 2),
]


def waves_of(plan: jitattn.types.Plan) -> float:
    """How many waves of slots the decode kernel has in a plan."""
    part = plan.backend.launches[0]
    num_slots = int(part.memory[:4].view(torch.int32))
    return num_slots / part.schedule_params.wave_slots


def assert_clean(workspace: jitattn.Workspace) -> None:
    assert not workspace.counters.any(), "a launch leaves its counters at zero"


def run_often(
    inputs: Inputs, planner: jitattn.AttentionPlanner, *, at_least: int
) -> harness.Result:
    """The result of repeated runs, in at least so many waves, which leave nothing behind."""
    plan, kv = harness.plan_of(inputs, planner), inputs.bind(planner)
    if DEVICE == "cuda":
        assert waves_of(plan) >= at_least
    want = plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs))
    out, lse = inputs.new_out(), inputs.new_lse()
    for _ in range(10 if DEVICE == "cuda" else 1):
        plan.run(inputs.q, kv, out=out, lse=lse, **harness.extras(inputs))
        harness.assert_same((out, lse), want)
    if planner.workspace is not None and DEVICE == "cuda":
        assert_clean(planner.workspace)
    return want


def own_planner(case: Case, **changes: object) -> jitattn.AttentionPlanner:
    """A planner with a workspace of its own."""
    arguments = case.planner_arguments() | changes
    workspace = jitattn.Workspace(DEVICE)
    return jitattn.AttentionPlanner(**arguments, device=DEVICE, workspace=workspace)


@pytest.mark.parametrize(("case", "changes", "at_least"), IN_WAVES, ids=str)
def test_rounds(case: Case, changes: dict[str, object], at_least: int) -> None:
    inputs = make_inputs(case, DEVICE)
    got = run_often(inputs, own_planner(case, **changes), at_least=at_least)
    harness.check(case, *got, harness.expected(inputs))


def test_a_share_of_the_card_after_all_of_it() -> None:
    """Launches of different grids share a counter of claims, and whole and shared cards turn."""
    case = replace(D128, lengths=(30_000, 17, 0, 9000), num_kv_heads=2)
    inputs = make_inputs(case, DEVICE)
    workspace = jitattn.Workspace(DEVICE)
    planners = [
        harness.planner_for(case, DEVICE, num_sms=num_sms, workspace=workspace)
        for num_sms in (None, 5, 1, 60)
    ]
    plans = [harness.plan_of(inputs, planner) for planner in planners]
    bound = [inputs.bind(planner) for planner in planners]
    wants = [harness.attend(inputs, planner) for planner in planners]
    for want in wants:
        harness.check(case, *want, harness.expected(inputs))
    results = [
        (plan.run(inputs.q, kv, return_lse=True), want)
        for _ in range(5 if DEVICE == "cuda" else 1)
        for plan, kv, want in zip(plans, bound, wants, strict=True)
    ]
    for got, want in results:
        harness.assert_same(got, want)
    assert_clean(workspace)


def test_two_planners_take_turns_with_a_workspace() -> None:
    """Of two kernels, on one stream, with nothing between them."""
    workspace = jitattn.Workspace(DEVICE)
    cases = (
        replace(D128, lengths=(30_000, 17, 0, 9000), num_kv_heads=1, seed=2),
        replace(D256, lengths=(3, 50_000), num_kv_heads=2, sinks="float32"),
    )
    steps = []
    for case in cases:
        inputs = make_inputs(case, DEVICE)
        planner = harness.planner_for(case, DEVICE, workspace=workspace)
        want = harness.attend(inputs, planner)
        harness.check(case, *want, harness.expected(inputs))
        steps.append((inputs, harness.plan_of(inputs, planner), inputs.bind(planner), want))
    results = []
    for repeat in range(10):
        for inputs, plan, kv, want in steps:
            if repeat % 4 == 3:
                plan.refresh()
            results.append(
                (plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs)), want)
            )
    for got, want in results:
        harness.assert_same(got, want)
    assert_clean(workspace)


def test_invariant_launches_claim_nothing_between_those_that_do() -> None:
    """A launch that takes its pieces a grid apart leaves the counter to the next."""
    workspace = jitattn.Workspace(DEVICE)
    case = replace(D128, lengths=(30_000, 17, 0, 9000))
    inputs = make_inputs(case, DEVICE)
    planners = [
        harness.planner_for(
            case, DEVICE, batch_invariant=invariant, num_sms=11, workspace=workspace
        )
        for invariant in (False, True)
    ]
    wants = [harness.attend(inputs, planner) for planner in planners]
    for _ in range(5):
        for planner, want in zip(planners, wants, strict=True):
            harness.assert_same(harness.attend(inputs, planner), want)
    assert_clean(workspace)
