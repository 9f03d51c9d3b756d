"""Variants on a card: ALiBi, a relative bias, and one of every name, against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, seed

import jitattn
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import Case
from tests.support.examples import examples as settings_of
from tests.support.inputs import make_inputs
from tests.support.mla import MLACase, check_kernel
from tests.support.mla import make_inputs as make_latents
from tests.support.strategies import Shards
from tests.support.variant_cases import (
    CASES,
    LATENTS,
    examples,
    latents,
    latents_on_a_card,
    on_a_card,
)

SHARDS = Shards(examples(), DEVICE, num_examples=600)
SEEDS = range(1, 21)


@pytest.mark.parametrize("case", [c for case in CASES.values() for c in on_a_card(case)], ids=str)
def test_cases(case: Case) -> None:
    harness.check_case(case, DEVICE)


@pytest.mark.parametrize(
    "case", [c for case in LATENTS.values() for c in latents_on_a_card(case)], ids=str
)
def test_latents(case: MLACase) -> None:
    inputs = make_latents(case, DEVICE)
    check_kernel(inputs, *inputs.run())


@pytest.mark.parametrize("number", SEEDS, ids=[f"seed{number}" for number in SEEDS])
def test_random_examples(number: int) -> None:
    SHARDS.run(number)


@pytest.mark.parametrize("number", SEEDS, ids=[f"seed{number}" for number in SEEDS])
def test_random_latents(number: int) -> None:
    @seed(number)
    @settings_of(15)
    @given(latents())
    def shard(case: MLACase) -> None:
        inputs = make_latents(case, DEVICE)
        check_kernel(inputs, *inputs.run())

    shard()


@pytest.mark.parametrize("name", CASES)
def test_a_batch_invariant_row_has_its_bits_anywhere(name: str) -> None:
    """Whether in a kernel of few rows or of many, and whatever else is in the batch."""
    case = replace(CASES[name], batch_invariant=True, seed=8)
    inputs = make_inputs(replace(case, lengths=(3000, 70, 1, 900)), DEVICE)
    out, lse = harness.attend(inputs)
    planner = harness.planner_for(inputs.case, DEVICE)
    kv = inputs.bind(planner)
    for b in range(4):
        plan = planner.plan(jitattn.BlockTable(inputs.table[b : b + 1]), inputs.seq_lens[b : b + 1])
        alone = plan.run(
            inputs.q[b : b + 1],
            kv,
            return_lse=True,
            sinks=inputs.sinks,
            variant_params=moved(inputs.variant_params, b),
        )
        assert harness.same_bits(alone[0], out[b : b + 1])
        assert harness.same_bits(alone[1], lse[b : b + 1])


def moved(params: dict[str, object] | None, request: int) -> dict[str, object] | None:
    """What makes of request 0 what ``params`` make of a request: one variant goes by its number."""
    if params is None or "masked" not in params:
        return params
    masked = params["masked"]
    assert isinstance(masked, int)
    return params | {"masked": masked if masked == 5 else (masked - request) % 5}


@pytest.mark.parametrize("q_len", [1, 40])
def test_graphs_read_tensors_at_each_replay(q_len: int) -> None:
    """And numbers when they are captured."""
    case = replace(CASES["relative_bias, warpgroups"], seed=20)
    case = replace(case, lengths=(200, 70), q_lens=(q_len, 1))
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE)
    plan = planner.plan(inputs.pages(), inputs.seq_lens, inputs.qo_indptr, max_q_len=q_len)
    kv, out, lse = inputs.bind(planner), inputs.new_out(), inputs.new_lse()
    given = dict(inputs.variant_params)
    plan.run(inputs.q, kv, out=out, lse=lse, variant_params=given)
    harness.check(case, out, lse, harness.expected(inputs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with harness.forbid_waiting(), torch.cuda.graph(graph):
        plan.refresh()
        plan.run(inputs.q, kv, out=out, lse=lse, variant_params=given)
    given["bias"].mul_(-1.5)
    given["zero"] += 3  # captured already
    graph.replay()
    torch.cuda.synchronize()
    assert inputs.variant_params["bias"] is given["bias"]
    harness.check(case, out, lse, harness.expected(inputs))


def test_calls_of_other_params_follow_each_other() -> None:
    """Nothing of the last call stays."""
    case = replace(CASES["alibi, warpgroups"], lengths=(300, 5), seed=2)
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE)
    plan, kv = planner.plan(inputs.pages(), inputs.seq_lens), inputs.bind(planner)
    first = plan.run(inputs.q, kv, return_lse=True, variant_params=inputs.variant_params)
    harness.check(case, *first, harness.expected(inputs))
    slopes = torch.zeros(case.num_qo_heads, device=DEVICE)
    plain = plan.run(inputs.q, kv, return_lse=True, variant_params={"slopes": slopes})
    harness.check(case, *plain, harness.expected(make_inputs(replace(case, variant=None), DEVICE)))
    again = plan.run(inputs.q, kv, return_lse=True, variant_params=inputs.variant_params)
    harness.assert_same(again, first)
