"""The kernel that dequantises queries, run on the CPU with the real host code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.attention.queries import check_q_scale, dequantize_into
from tests.emulator.attention import EmulatedCuda
from tests.emulator.queries import emulated_queries
from tests.support.fp8_queries import FORMS, FP8, FP8Case, FP8Inputs
from tests.support.harness import assert_same

__all__ = ["emulated_queries"]  # a fixture


def dequantized(q: Tensor, q_scale: object) -> Tensor:
    out = torch.full(q.shape, torch.inf, dtype=torch.float16)
    dequantize_into(q, check_q_scale(q_scale, q), out)  # type: ignore[arg-type]
    return out


@pytest.mark.usefixtures("emulated_queries")
class TestKernel:
    @pytest.mark.parametrize("view", ["whole", "packed", "odd"])
    @pytest.mark.parametrize("form", FORMS)
    def test_every_form(self, form: str, view: str) -> None:
        inputs = FP8Inputs(FP8Case(form=form, view=view, head_dim=48), "cpu")
        assert inputs.q.is_contiguous() is (view == "whole")
        assert torch.equal(dequantized(inputs.q, inputs.q_scale), inputs.values().half())

    @pytest.mark.parametrize("scale", [1.0, -0.5, 0.0, 2.0**-20, 3.0e4, -3.0e38])
    def test_every_byte(self, scale: float) -> None:
        """Nearest, the largest float16 beyond it, NaN for NaN."""
        q = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 8, 16)
        want = (q.double() * scale).clamp(-65504, 65504).half()
        for given in (scale, torch.tensor(scale)):
            found = dequantized(q, given)
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.signbit(), want.signbit()) or bool(want.isnan().any())

    @pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf])
    def test_scales_without_a_value(self, scale: float) -> None:
        """A row whose scale is none is NaN; the others are themselves."""
        q = torch.ones(2, 3, 16).to(FP8)
        scales = torch.ones(2, 3)
        scales[1, 2] = scale
        found = dequantized(q, scales)
        assert bool(found[1, 2].isnan().all())
        assert int((found == 1).sum()) == 5 * 16

    def test_nothing(self) -> None:
        assert dequantized(torch.ones(0, 3, 16).to(FP8), torch.ones(0, 3)).numel() == 0


# --- in front of attention ------------------------------------------------------------------------

STEP = FP8Case(q_lens=(1, 3, 20), kv_lens=(50, 3, 70), head_dim=32)


def planner_of(host: EmulatedCuda, case: FP8Case) -> Any:
    """A planner of a card, for tensors on the CPU."""
    planner = host.planner(**case.planner_arguments())
    planner.tensor_dtypes = planner.tensor_dtypes._replace(q=torch.float16)
    return planner


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_step(arch: str, emulated_queries: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run launches the kernel once, in front, whatever the run before was."""
    host = EmulatedCuda(monkeypatch, arch)
    planner = planner_of(host, STEP)
    inputs = FP8Inputs(STEP, "cpu")
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    forms = "rows", "rows", "0-d", "number", "none", "0-d"
    for turn, form in enumerate(forms, start=1):
        inputs = FP8Inputs(replace(STEP, form=form), "cpu")
        arguments: dict[str, Any] = {"q_scale": inputs.q_scale}
        found = plan.run(inputs.q, kv, return_lse=True, **arguments)
        inputs.check(found)
        assert len(emulated_queries) == 4 * turn - 3
        for given in ({"out": torch.empty_like(found[0])}, {}, {"out": torch.empty_like(found[0])}):
            out = plan.run(inputs.q, kv, **given, **arguments)
            assert_same((out, found[1]), found)
        assert len(emulated_queries) == 4 * turn
    assert host.kinds == {"decode", "prefill"}


WRONG: dict[str, dict[str, Any]] = {
    "q": {"q": torch.zeros(24, 7, 32).to(FP8)},
    "q_scale": {"q_scale": torch.ones(9)},
    "out_scale": {"out_scale": 2.0},
    "kv": {"kv": torch.zeros(3)},
    "out": {"out": torch.zeros(24, 8, 32)},
    "lse": {"lse": torch.zeros(24, 9)},
    "sinks": {"sinks": torch.zeros(8)},
    "custom_mask": {"custom_mask": torch.ones(24, 9, dtype=torch.bool)},
    "variant_params": {"variant_params": {"slopes": 1.0}},
    "extra": {"extra": (None, None)},
}


def test_nothing_is_launched_for_what_is_refused(
    emulated_queries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, "sm_80")
    planner = planner_of(host, STEP)
    inputs = FP8Inputs(STEP, "cpu")
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    for turn in range(2):
        launched = len(emulated_queries), len(host.ran)
        for name, changes in WRONG.items():
            arguments = {"q": inputs.q, "kv": kv, "q_scale": inputs.q_scale}
            if turn == 1:  # after calls that were right
                plan.run(**arguments)
                launched = len(emulated_queries), len(host.ran)
            with pytest.raises((TypeError, ValueError), match=name):
                plan.run(**arguments | changes)
            assert (len(emulated_queries), len(host.ran)) == launched


def test_a_capture_after_a_call_has_the_kernel_once(
    emulated_queries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, "sm_80")
    planner = planner_of(host, STEP)
    inputs = FP8Inputs(replace(STEP, form="heads"), "cpu")
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    want = plan.run(inputs.q, kv, q_scale=inputs.q_scale)
    host.fake.is_capturing = True
    for turn in (2, 3):
        assert torch.equal(plan.run(inputs.q, kv, q_scale=inputs.q_scale), want)
        assert len(emulated_queries) == turn
    assert len(host.ran) == 3 * 2


def test_another_table_between_two_calls(
    emulated_queries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the operator, too, which attends to values that are there."""
    from jitattn.kernels.attention.api import Plan

    host = EmulatedCuda(monkeypatch, "sm_80")
    planner = planner_of(host, STEP)
    inputs = FP8Inputs(replace(STEP, form="heads"), "cpu")
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    other = jitattn.BlockTable(inputs.table.flip(0).contiguous())
    arguments: dict[str, Any] = {"q_scale": inputs.q_scale}
    want = plan.run(inputs.q, kv, **arguments)
    for _ in range(2):
        assert torch.equal(plan.run(inputs.q, kv, **arguments), want)
        changed = plan.run(inputs.q, kv, pages=other, **arguments)
        assert not torch.equal(changed.nan_to_num(), want)
        assert torch.equal(plan.run(inputs.q, kv, **arguments), want)
        run: Any = Plan.run
        run(plan, inputs.values().half(), kv, pages=other)
    assert len(emulated_queries) == 7
