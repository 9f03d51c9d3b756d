"""Scores at the edge of float32, in every kernel of attention and latent attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from tests.emulator.attention import EmulatedCuda
from tests.support.cases import Case, of
from tests.support.edge_numbers import (
    check_far_queries,
    check_far_scales,
    check_large_latent_neighbour,
    check_large_latent_scores,
    check_large_neighbour,
    check_large_scores,
)
from tests.support.harness import attend, check, expected
from tests.support.inputs import Inputs, make_inputs
from tests.support.mla import MLACase

BASE = Case(head_dim=64, num_kv_heads=1, group_size=2)
DECODE = of(BASE, (1, 150), (1, 70))
PREFILL = of(BASE, (70, 150), (66, 66))
LATENT = MLACase(kv_lora_rank=256, lengths=(90, 64, 0, 1), page_size=16, out_dtype="float32")
# Of each kernel one: the GPU tests have the others.
KERNELS = pytest.mark.parametrize(
    ("case", "arch"),
    [
        (PREFILL, "sm_90a"),
        (replace(PREFILL, kv_dtype="float8_e4m3fn"), "sm_80"),
        (DECODE, "sm_90a"),
    ],
    ids=["prefill of warpgroups", "prefill", "decode"],
)


def on(host: EmulatedCuda, inputs: Inputs) -> tuple[Tensor, Tensor]:
    return attend(inputs, host.planner(**inputs.case.planner_arguments()))


@KERNELS
def test_large_scores(case: Case, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, arch)
    check_large_scores(case, "cpu", lambda inputs: on(host, inputs))


@KERNELS
def test_large_scores_of_another_row(
    case: Case, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, arch)
    check_large_neighbour(case, "cpu", lambda inputs: on(host, inputs))


@KERNELS
def test_scales_whose_product_is_infinite(
    case: Case, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, arch)
    fp8 = replace(case, kv_dtype="float8_e4m3fn")
    check_far_scales(fp8, "cpu", lambda inputs: on(host, inputs))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int4"])
def test_queries_that_become_float16(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a")
    check_far_queries(replace(PREFILL, kv_dtype=kv_dtype), "cpu", lambda inputs: on(host, inputs))
    assert "prefill" in host.kinds


@pytest.mark.parametrize("sink", [-500.0, -100.0, 200.0])
def test_far_sinks_of_rows_without_keys(sink: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows with keys, in a query tile whose scores a soft cap bounds: lse is the sink."""
    host = EmulatedCuda(monkeypatch, "sm_90a")
    case = of(replace(BASE, logits_soft_cap=50.0, sinks="float32"), (70, 40), (140, 150))
    inputs = make_inputs(case, "cpu")
    assert inputs.sinks is not None
    inputs.sinks.fill_(sink)
    check(case, *on(host, inputs), expected(inputs))
    assert any("fixedmax" in symbol for symbol in host.ran)


@pytest.mark.parametrize(
    ("arch", "num_heads"), [("sm_80", 16), ("sm_90a", 16), ("sm_90a", 20), ("sm_90a", 33)]
)
def test_large_latent_scores(arch: str, num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, arch)
    case = replace(LATENT, num_heads=num_heads)
    arguments = case.planner_arguments() | {"sm_scale": 1.0}
    check_large_latent_scores(case, planner=host.mla_planner(**arguments))


@pytest.mark.parametrize(
    ("arch", "num_heads"), [("sm_80", 16), ("sm_90a", 16), ("sm_90a", 20), ("sm_90a", 33)]
)
def test_large_latent_scores_of_another_row(
    arch: str, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, arch)
    case = replace(LATENT, num_heads=num_heads)
    planner = host.mla_planner(**case.planner_arguments(), batch_invariant=True)
    check_large_latent_neighbour(case, planner=planner)
