"""A few query tokens a request, as speculative decoding has them: the wide decode kernel."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import jitattn
from jitattn.kernels.attention.config import wide_row_tile
from tests.gpu.device import DEVICE
from tests.gpu.test_graphs import Layer, captured
from tests.gpu.test_mixed import overwrite, replays_are_eager
from tests.support import harness
from tests.support.cases import (
    CACHES_SHARED,
    D64,
    D128,
    D128_SEPARATE,
    DRAFTS,
    E4M3,
    MASKED_D64,
    MASKED_D128,
    RAGGED,
    Case,
    of,
)
from tests.support.inputs import Inputs, make_inputs, random_tokens
from tests.support.layouts import assert_same_through_every_table
from tests.support.queries import MaskOf, mask_of_last_keys, ragged_mask

D64_PAGE_64 = next(case for case in DRAFTS if case.page_size == 64)  # with boxes of 32 tokens


def longest_of(case: Case) -> int:
    """The most query tokens of a request that the case's wide row tile holds."""
    return wide_row_tile(case.config()) // case.group_size


def drafts(case: Case, **changes: object) -> Case:
    """A batch of requests of up to as many query tokens, keys or none, and none of either."""
    case = replace(case, **changes)
    most = longest_of(case)
    assert most > 1
    pairs = ((most, 4097), (1, 1), (most, most), (0, 40), (2, 9000), (most, 1), (1, 300), (2, -1))
    return of(case, *pairs, *((q_len, 90 * q_len) for q_len in range(1, most + 1)))


def roles_of(plan: jitattn.types.Plan) -> list[str]:
    """What the kernels of a plan are for."""
    return [part.role for part in plan.backend.launches]


def attend_wide(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    if DEVICE == "cuda":
        assert roles_of(harness.plan_of(inputs, harness.planner_for(inputs.case, DEVICE))) == [
            "decode_multi_token"
        ]
    return harness.attend(inputs)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_left", [-1, 0, 2, 500])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("case", DRAFTS, ids=str)
def test_drafts(case: Case, group_size: int, window_left: int) -> None:
    case = drafts(case, group_size=group_size, window_left=window_left, spare_rows=3)
    inputs = make_inputs(case, DEVICE)
    harness.check(case, *attend_wide(inputs), harness.expected(inputs))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sinks", [None, "float32"])
@pytest.mark.parametrize(
    ("case", "group_size"),
    [(D128, 4), (D128_SEPARATE, 2), (D64, 8), (D64, 3), (D64_PAGE_64, 5), (RAGGED, 1), (E4M3, 4)],
    ids=str,
)
def test_sinks_and_later_keys(case: Case, group_size: int, sinks: str | None, causal: bool) -> None:
    case = drafts(case, group_size=group_size, sinks=sinks, causal=causal, seed=1)
    inputs = make_inputs(case, DEVICE)
    harness.check(case, *attend_wide(inputs), harness.expected(inputs))


@pytest.mark.parametrize("form", ["bool", "packed", "ragged"])
@pytest.mark.parametrize("window_left", [-1, 50])
@pytest.mark.parametrize("case", [MASKED_D128, MASKED_D64], ids=str)
def test_random_masks(case: Case, window_left: int, form: str) -> None:
    case = drafts(case, mask=form, mask_width=200, window_left=window_left, causal=False)
    inputs = make_inputs(case, DEVICE)
    harness.check(case, *attend_wide(inputs), harness.expected(inputs))


@pytest.mark.parametrize("form", ["bool", "packed", "ragged"])
@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("case", [MASKED_D128, MASKED_D64], ids=str)
def test_trees(case: Case, group_size: int, form: str) -> None:
    """Every draft token sees the tokens before the tree, and those on its path to the root."""
    rng = random.Random(group_size)
    size = longest_of(replace(case, group_size=group_size))
    pairs = [(size, size + prefix) for prefix in (0, 1, 100, 9000)]
    case = of(case, *pairs, group_size=group_size, mask=form, mask_width=32)
    bits = torch.zeros((case.num_tokens, 32), dtype=torch.bool)
    for first in range(0, case.num_tokens, size):
        bits[first : first + size, : 32 - size] = True
        for node in range(size):
            if node:
                parent = rng.randrange(node)
                bits[first + node, 32 - size :] = bits[first + parent, 32 - size :]
            bits[first + node, 32 - size + node] = True
    inputs = make_inputs(case, DEVICE)
    plain = replace(case, mask="packed" if form == "packed" else "bool")
    inputs.mask = mask_of_last_keys(plain, bits.to(DEVICE))
    if form == "ragged":
        inputs.mask = MaskOf(ragged_mask(inputs.mask.seen), inputs.mask.seen)
    harness.check(case, *attend_wide(inputs), harness.expected(inputs))


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES_SHARED)
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D64_PAGE_64], ids=str)
def test_cache_strides(case: Case, cache: str) -> None:
    """Whatever the memory order and its alignment: the loaders differ, the sums don't."""
    case = drafts(case, num_kv_heads=1 if cache == "size_1" else 2)
    tokens = random_tokens(case, DEVICE)
    want = attend_wide(make_inputs(case, DEVICE, tokens))
    harness.assert_same(attend_wide(make_inputs(replace(case, cache=cache), DEVICE, tokens)), want)


@pytest.mark.parametrize("case", [D128, D64], ids=str)
def test_every_table_layout(case: Case) -> None:
    inputs = make_inputs(drafts(case, rows="int32"), DEVICE)
    assert_same_through_every_table(inputs, attend_wide(inputs))


@pytest.mark.parametrize("case", DRAFTS, ids=str)
def test_what_no_request_owns_does_not_count(case: Case) -> None:
    case = drafts(case, window_left=700)
    inputs = make_inputs(case, DEVICE)
    want = harness.assert_dead_slots_do_not_count(inputs, math.nan, 240.0, -240.0)
    harness.check(case, *want, harness.expected(inputs))


@pytest.mark.parametrize("num_sms", [None, 1, 7])
@pytest.mark.parametrize("case", [D128, D64_PAGE_64, RAGGED, E4M3], ids=str)
def test_splits_of_long_contexts(case: Case, num_sms: int | None) -> None:
    """Splits finish in any order and are merged in one."""
    most = longest_of(case)
    pairs = ((most, 30_000), (1, 9000), (0, 5), (most, 17), (2, 12_345))
    case = of(case, *pairs, num_kv_heads=1, sinks="float32")
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE, num_sms=num_sms)
    plan, kv = harness.plan_of(inputs, planner), inputs.bind(planner)
    want = plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs))
    harness.check(case, *want, harness.expected(inputs))
    for _ in range(10 if DEVICE == "cuda" else 1):
        harness.assert_same(plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs)), want)


@pytest.mark.parametrize("case", [*DRAFTS[:7], E4M3], ids=str)
def test_early_kv_gives_the_same(case: Case) -> None:
    inputs = make_inputs(drafts(case, window_left=3000), DEVICE)
    planner = harness.planner_for(inputs.case, DEVICE, early_kv=True)
    harness.assert_same(harness.attend(inputs, planner), attend_wide(inputs))


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [D128, D64_PAGE_64, RAGGED], ids=str)
def test_plans_of_all_kinds_in_turn(case: Case) -> None:
    """On one workspace, where plans take over what others left."""
    most = longest_of(case)
    planner = harness.planner_for(case, DEVICE, workspace=jitattn.Workspace(DEVICE))
    steps = []
    for longest in (1, most, 100):
        some = of(case, (longest, 9000), (1, 17), (min(longest, 3), 700))
        inputs = make_inputs(some, DEVICE)
        steps.append((inputs, inputs.bind(planner), harness.expected(inputs)))
    for turn in range(8):
        inputs, kv, want = steps[(0, 1, 2, 1, 0, 2, 0, 1)[turn]]
        plan = harness.plan_of(inputs, planner)
        for _ in range(3):
            harness.check(inputs.case, *plan.run(inputs.q, kv, return_lse=True), want)


@pytest.mark.skipif(DEVICE != "cuda", reason="the CPU has no kernels to choose from")
@pytest.mark.parametrize(
    ("case", "group_size", "max_q_len", "roles"),
    [
        (D128, 4, 2, ["decode"]),
        (D128, 4, 3, ["decode_multi_token"]),
        (D128, 4, 4, ["decode_multi_token"]),
        (D128, 4, 5, ["prefill", "decode_multi_token"]),
        (D128, 16, 1, ["decode"]),
        (D128, 16, 2, ["prefill", "decode"]),
        (D64, 8, 1, ["decode"]),
        (D64, 8, 2, ["decode_multi_token"]),
        (D64, 8, 3, ["prefill_narrow", "decode_multi_token"]),
        (D64, 16, 2, ["prefill_narrow", "decode"]),
    ],
    ids=str,
)
def test_which_kernels_a_plan_has(
    case: Case, group_size: int, max_q_len: int, roles: list[str]
) -> None:
    case = of(case, (max_q_len, 900), (1, 40), group_size=group_size)
    inputs = make_inputs(case, DEVICE)
    assert roles_of(harness.plan_of(inputs, harness.planner_for(case, DEVICE))) == roles
    invariant = harness.planner_for(case, DEVICE, batch_invariant=True)
    assert "decode_multi_token" not in roles_of(harness.plan_of(inputs, invariant))


@pytest.mark.skipif(DEVICE != "cuda", reason="the CPU has no graphs")
@pytest.mark.parametrize("cache", ["pair_nhd", "odd_strides"])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D64_PAGE_64], ids=str)
def test_graphs(case: Case, cache: str) -> None:
    """Captured at the most query tokens, replayed with fewer, none and too many."""
    most = longest_of(case)
    case = of(case, *((most, 6000),) * 4, num_kv_heads=1, cache=cache)
    replays = [
        [(most, 6000), (1, 17), (0, 300), (most - 1, 2)],
        [(1, 5999), (1, 1), (1, 0), (1, -1)],
        [(most, most)] * 4,
        [(most + 1, 900), (most, 900), (1, 4097), (2, 4096)],
    ]
    replays_are_eager(Layer.of(make_inputs(case, DEVICE)), replays)


@pytest.mark.skipif(DEVICE != "cuda", reason="the CPU has no graphs")
@pytest.mark.parametrize("captured_q_len", [4, 200])
@pytest.mark.parametrize("cache", ["pair_nhd", "odd_strides"])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D64, RAGGED, E4M3], ids=str)
def test_replays_have_the_bits_of_shorter_plans(
    case: Case, cache: str, captured_q_len: int
) -> None:
    """A plan of the replay's own longest request, though other kernels were captured."""
    case = of(case, *((captured_q_len, 20_000),) * 4, num_kv_heads=1, cache=cache, sinks="float32")
    layer = Layer.of(make_inputs(case, DEVICE))
    inputs = layer.inputs
    graph = captured(layer)
    for pairs in (
        [(1, 20_000), (1, 17), (1, 300), (1, 1)],
        [(1, 19_999), (0, 40), (1, 0), (1, -1)],
        [(2, 20_000), (1, 9000), (2, 2), (0, 0)],
        [(1, 5), (3, 12_345), (4, 4), (2, 20_000)],
    ):
        overwrite(inputs, pairs)
        inputs.q.normal_()
        layer.forget()
        graph.replay()
        longest = max(q_len for q_len, _ in pairs)
        plan = harness.plan_of(inputs, layer.planner, max_q_len=longest)
        assert roles_of(plan) == ["decode" if longest <= 2 else "decode_multi_token"]
        kv = inputs.bind(layer.planner)
        want = plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs))
        harness.assert_same((layer.out, layer.lse), want)
