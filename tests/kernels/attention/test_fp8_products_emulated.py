"""Products of 8 bits, run on the CPU: prefill over FP8 queries, decode in the same plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jitattn.kernels.attention.api import FP8ProductsPlan
from tests.emulator.attention import EmulatedCuda
from tests.support.fp8_queries import FAST, FP8, FP8Case, FP8Inputs
from tests.support.harness import assert_same


def planner_of(host: EmulatedCuda, case: FP8Case, **others: object) -> Any:
    """A planner of a card, for tensors on the CPU."""
    planner = host.planner(**case.planner_arguments(), **others)
    assert planner.kernels.reads_fp8_queries
    planner.make_plan = FP8ProductsPlan
    planner.tensor_dtypes = planner.tensor_dtypes._replace(q=FP8)
    return planner


def check(host: EmulatedCuda, case: FP8Case) -> None:
    inputs = FP8Inputs(case, "cpu")
    inputs.check(inputs.attend(planner_of(host, case)))


STEP = replace(FAST, q_lens=(1, 5, 40, 2), kv_lens=(300, 6, 177, 2))
CASES = {
    "128": STEP,
    "64, a window": replace(STEP, head_dim=64, page_size=8, window_left=50, use_sinks=True),
    "224": replace(
        STEP,
        head_dim=224,
        head_dim_vo=128,
        page_size=64,
        num_kv_heads=1,
        group_size=8,
        form="negative",
    ),
    "small pages": replace(STEP, head_dim=32, page_size=3, view="odd", form="none"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=1)
    check(host, CASES[name])
    assert host.kinds == {"decode", "prefill"}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_many_tiles(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one query tile, whose sums are added one after the other."""
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=2, num_sms=1)
    case = replace(STEP, head_dim=32, page_size=32, num_kv_heads=1, q_lens=(9, 1))
    case = replace(case, kv_lens=(1900, 1), window_left=1500)
    inputs = FP8Inputs(case, "cpu")
    inputs.check(inputs.attend(planner_of(host, case, batch_invariant=batch_invariant)))


SMALL = replace(CASES["small pages"], view="whole", q_lens=(1, 17), kv_lens=(9, 40))


def test_one_call_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run reads its own scale, whatever the run before was, and launches nothing in front."""
    host = EmulatedCuda(monkeypatch, "sm_90a")
    planner = planner_of(host, SMALL)
    inputs = FP8Inputs(SMALL, "cpu")
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    for turn, form in enumerate(("rows", "0-d", "none"), start=1):
        inputs = FP8Inputs(replace(SMALL, form=form), "cpu")
        arguments: dict[str, Any] = {"q_scale": inputs.q_scale}
        found = plan.run(inputs.q, kv, return_lse=True, **arguments)
        inputs.check(found)
        for _ in range(2):
            out = plan.run(inputs.q, kv, out=torch.empty_like(found[0]), **arguments)
            assert_same((out, found[1]), found)
        assert len(host.ran) == 2 * 3 * turn


WRONG: dict[str, dict[str, Any]] = {
    "q": {"q": torch.zeros(18, 7, 32).to(FP8)},
    "q has dtype": {"q": torch.zeros(18, 8, 32).half()},
    "q_scale": {"q_scale": torch.ones(9)},
    "out_scale": {"out_scale": 2.0},
    "kv": {"kv": torch.zeros(3)},
    "out": {"out": torch.zeros(18, 8, 32)},
    "lse": {"lse": torch.zeros(18, 9)},
    "sinks": {"sinks": torch.zeros(8)},
    "custom_mask": {"custom_mask": torch.ones(18, 9, dtype=torch.bool)},
    "variant_params": {"variant_params": {"slopes": 1.0}},
    "extra": {"extra": (None, None)},
}


def test_nothing_is_launched_for_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a")
    planner = planner_of(host, SMALL)
    inputs = FP8Inputs(SMALL, "cpu")
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    for name, changes in WRONG.items():
        with pytest.raises((TypeError, ValueError), match=name):
            plan.run(**{"q": inputs.q, "kv": kv} | changes)
    assert not host.ran


@pytest.mark.parametrize("place", [0, 16])
def test_a_nan_in_a_key(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees it is NaN, out and lse, whichever way its exponential is found."""
    host = EmulatedCuda(monkeypatch, "sm_90a")
    inputs = FP8Inputs(SMALL, "cpu")
    page, offset = divmod(23 + place, SMALL.page_size)  # the first token of 17 is the key 23 of 40
    inputs.cache.view(torch.uint8)[inputs.table[1, page].item(), 0, offset] = 0x7F
    out, lse = inputs.attend(planner_of(host, SMALL))
    seen = torch.arange(18) > place
    assert torch.equal(out.isnan().all(-1).all(-1), seen)
    assert torch.equal(lse.isnan().all(-1), seen)
    assert not bool(out[~seen].isnan().any() | lse[~seen].isnan().any())


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    host = EmulatedCuda(monkeypatch, "sm_90a")
    planner = planner_of(host, SMALL)
    inputs = FP8Inputs(replace(SMALL, form="rows"), "cpu")
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    call = torch.compile(
        lambda q, q_scale: plan.run(q, kv, q_scale=q_scale, return_lse=True),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        inputs.check(call(inputs.q, inputs.q_scale))
    assert len(host.ran) == 2
