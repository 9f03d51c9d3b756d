"""FP8 queries on a card: every form of a scale, graphs, lists, compiled functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jitattn.pages import IndexLists
from tests.gpu.device import DEVICE
from tests.support.fp8_queries import FAST, FORMS, GPU_CASES, LONG, MIXED, FP8Case, FP8Inputs
from tests.support.harness import assert_same, captured


@pytest.mark.parametrize("name", GPU_CASES)
def test_every_case(name: str) -> None:
    inputs = FP8Inputs(GPU_CASES[name], DEVICE)
    inputs.check(inputs.attend())


def test_the_same_bits_whatever_the_form_and_the_view() -> None:
    """A scale of one value is that value, and queries are read wherever they lie."""
    _check_forms_and_views(MIXED)


def test_the_same_bits_of_products_of_8_bits() -> None:
    _check_forms_and_views(FAST)


def _check_forms_and_views(case: FP8Case) -> None:
    inputs = FP8Inputs(replace(case, form="number"), DEVICE)
    want = inputs.attend()
    heads, tokens = case.num_qo_heads, sum(case.q_lens)
    one = torch.tensor(inputs.q_scale, device=DEVICE)
    for scale in (one, one[None], one.expand(heads), one.expand(tokens, heads)):
        inputs.q_scale = scale
        assert_same(inputs.attend(), want)
    wide = torch.empty(tokens, heads + 1, case.head_dim + 1, device=DEVICE).to(inputs.q.dtype)
    wide[:, 1:, 1:] = inputs.q
    inputs.q = wide[:, 1:, 1:]
    assert_same(inputs.attend(), want)


@pytest.mark.parametrize("case", [MIXED, FAST, LONG, replace(LONG, early_kv=True)])
@pytest.mark.parametrize("form", ["0-d", "heads", "rows"])
def test_replays_read_queries_and_scales(form: str, case: object) -> None:
    inputs = FP8Inputs(replace(case, form=form), DEVICE)  # type: ignore[type-var]
    planner = inputs.planner()
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    out, lse = (torch.empty_like(x) for x in inputs.attend(planner))

    def step() -> None:
        plan.refresh()
        plan.run(inputs.q, kv, q_scale=inputs.q_scale, out=out, lse=lse)

    graph = captured(step)
    for factor in (1.0, -0.5, 0.0, 2.0):
        inputs.q_scale.mul_(factor)
        inputs.q.copy_(inputs.q.float().roll(1, 0).to(inputs.q.dtype))
        out.fill_(torch.nan)
        graph.replay()
        assert_same((out, lse), inputs.attend(planner))


def test_layers_one_after_the_other() -> None:
    """Values of one layer may lie where those of the next do."""
    inputs = [FP8Inputs(replace(LONG, seed=seed), DEVICE) for seed in range(6)]
    planner = inputs[0].planner()
    found = [one.attend(planner) for one in inputs * 5]
    for one, result in zip(inputs * 5, found, strict=True):
        one.check(result)


def test_lists_and_two_of_them() -> None:
    """Of values that are exact, what 16-bit queries give."""
    inputs = FP8Inputs(replace(MIXED, form="none"), DEVICE)
    inputs.q_scale = 0.5
    tokens = sum(MIXED.q_lens)
    first = 16 * inputs.table[2, : MIXED.kv_lens[2] // 16].int()
    slots = (first[:, None] + torch.arange(16, device=DEVICE)).flatten().int()
    lists = IndexLists(slots.expand(tokens, -1).contiguous())
    results = []
    for q_dtype in ("float8_e4m3fn", "float16"):
        planner = inputs.planner(page_table="indices", q_dtype=q_dtype, out_dtype="bfloat16")
        plan, kv = planner.plan(lists, tokens), inputs.bind(planner)
        is_fp8 = q_dtype == "float8_e4m3fn"
        q = inputs.q if is_fp8 else inputs.values().half()
        scale = {"q_scale": inputs.q_scale} if is_fp8 else {}
        results += [
            plan.run(q, kv, return_lse=True, **scale),
            plan.run(q, kv, return_lse=True, extra=(lists, kv), **scale),
        ]
    assert_same(results[0], results[2])  # type: ignore[arg-type]
    assert_same(results[1], results[3])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor
@pytest.mark.parametrize("fp8_products", ["exact", "fast"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled(form: str, fp8_products: str) -> None:
    torch._dynamo.reset()
    case = FAST if fp8_products == "fast" else MIXED
    inputs = FP8Inputs(replace(case, form=form), DEVICE)
    planner = inputs.planner()
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    call = torch.compile(
        lambda q, q_scale: plan.run(q, kv, q_scale=q_scale, return_lse=True),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        assert_same(call(inputs.q, inputs.q_scale), inputs.attend(planner))
