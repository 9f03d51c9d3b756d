"""FP8 queries on the reference backend, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import jitattn
from jitattn import ConfigError
from jitattn.cascade import CascadePlanner
from jitattn.kernels.registry import specs_of
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.config import PlannerConfig
from tests.support.fp8_queries import FAST, FORMS, FP8, GPU_CASES, MIXED, FP8Case, FP8Inputs

SMALL = FP8Case(head_dim=16, q_lens=(1, 3, 2), kv_lens=(20, 3, 40))


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    inputs = FP8Inputs(replace(SMALL, form=form), "cpu")
    inputs.check(inputs.attend())


@pytest.mark.parametrize(
    "name", [name for name in GPU_CASES if "long" not in name and "fast" not in name]
)
def test_every_case(name: str) -> None:
    inputs = FP8Inputs(GPU_CASES[name], "cpu")
    inputs.check(inputs.attend())


def test_a_scale_is_read_when_a_plan_runs() -> None:
    inputs = FP8Inputs(replace(SMALL, form="heads"), "cpu")
    planner = inputs.planner()
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    first = plan.run(inputs.q, kv, q_scale=inputs.q_scale)
    inputs.q_scale.mul_(-2.0)
    plan.refresh()
    again = torch.empty_like(first)
    assert plan.run(inputs.q, kv, q_scale=inputs.q_scale, out=again) is again
    assert not torch.equal(first, again)
    inputs.check((again, plan.run(inputs.q, kv, q_scale=inputs.q_scale, return_lse=True)[1]))


def test_the_outputs() -> None:
    for out_dtype in ("bfloat16", "float16"):
        planner = FP8Inputs(replace(SMALL, out_dtype=out_dtype), "cpu").planner()
        assert planner.tensor_dtypes.out is getattr(torch, out_dtype)
    assert FP8Inputs(SMALL, "cpu").planner().tensor_dtypes.out is torch.bfloat16


def test_one_call() -> None:
    inputs = FP8Inputs(replace(SMALL, form="heads", q_lens=(1, 1, 1)), "cpu")
    found = jitattn.attention(
        inputs.q,
        inputs.cache,
        jitattn.BlockTable(inputs.table),
        inputs.seq_lens,
        q_scale=inputs.q_scale,
        k_scale=0.25,
        v_scale=0.5,
        return_lse=True,
    )
    inputs.check(found)  # type: ignore[arg-type]


def test_lists_and_two_of_them() -> None:
    """Of values that are exact, what 16-bit queries give."""
    from jitattn.pages import IndexLists

    inputs = FP8Inputs(replace(SMALL, q_lens=(1, 1, 1)), "cpu")
    slots = torch.arange(3 * 5, dtype=torch.int32).view(3, 5) % 20 + inputs.table[0, 0] * 16 // 16
    lists, found = IndexLists(slots % 16 + 16 * inputs.table[2, :1]), []
    q = inputs.q.half() * 0.5
    for dtype in ("float8_e4m3fn", "float16"):
        planner = inputs.planner(page_table="indices", q_dtype=dtype, out_dtype="bfloat16")
        plan, kv = planner.plan(lists, 3), inputs.bind(planner)
        is_fp8 = dtype == "float8_e4m3fn"
        given, scale = (inputs.q, {"q_scale": 0.5}) if is_fp8 else (q, {})
        found.append(
            (
                plan.run(given, kv, return_lse=True, **scale),  # type: ignore[arg-type]
                plan.run(given, kv, return_lse=True, extra=(lists, kv), **scale),  # type: ignore
            )
        )
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["none", "number", "0-d", "heads", "rows"])
def test_compiled(form: str) -> None:
    torch._dynamo.reset()
    inputs = FP8Inputs(replace(SMALL, form=form), "cpu")
    planner = inputs.planner()
    plan, kv = inputs.plan(planner), inputs.bind(planner)
    call = torch.compile(
        lambda q, q_scale: plan.run(q, kv, q_scale=q_scale, return_lse=True),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        inputs.check(call(inputs.q, inputs.q_scale))


REFUSED_PLANNERS: dict[str, tuple[dict[str, Any], str]] = {
    "a cache of 16 bits": ({"kv_dtype": "bfloat16"}, "kv_dtype=bfloat16 does not fit q_dtype"),
    "another cache": ({"kv_dtype": "float8_e5m2"}, "kv_dtype=float8_e5m2 does not fit q_dtype"),
    "queries of another type": ({"q_dtype": "float8_e5m2"}, "q_dtype=float8_e5m2 is not one of"),
    "outputs of 32 bits": ({"out_dtype": "float32"}, "out_dtype=float32 does not fit q_dtype"),
    "products": ({"fp8_products": "quick"}, "fp8_products=quick is not one of exact, fast"),
    "no name": ({"fp8_products": 1}, "fp8_products=1: expected a string"),
    "16-bit products": (
        {"q_dtype": "bfloat16", "kv_dtype": "bfloat16", "fp8_products": "fast"},
        "fp8_products=fast does not fit: it is for caches of 8 bits",
    ),
    "products of 4 bits": (
        {"q_dtype": "bfloat16", "kv_dtype": "nvfp4", "fp8_products": "fast"},
        "fp8_products=fast does not fit",
    ),
}


@pytest.mark.parametrize("name", REFUSED_PLANNERS)
def test_refused_planners(name: str) -> None:
    changes, reason = REFUSED_PLANNERS[name]
    arguments = MIXED.planner_arguments() | changes
    with pytest.raises(ConfigError, match=reason):
        jitattn.AttentionPlanner(**arguments, device="cpu")  # type: ignore[arg-type]
    answer = jitattn.check_config(**arguments)
    assert not answer.supported
    assert any(reason in found for found in answer.reasons)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_products_of_other_queries(kv_dtype: str) -> None:
    """Any cache of 8 bits has both, of the same kernels."""
    config = PlannerConfig(kv_dtype=kv_dtype)
    fast = replace(config, fp8_products="fast")
    assert jitattn.check_config(kv_dtype=kv_dtype, fp8_products="fast").supported
    assert specs_of(fast, "sm_90a") == specs_of(config, "sm_90a")


def test_products_of_other_planners() -> None:
    latents = jitattn.MLAPlanner(
        sm_scale=0.1, kv_dtype=FP8, num_heads=16, fp8_products="fast", device="cpu"
    )
    assert latents.fp8_products == "fast"
    assert specs_of(latents.config, "sm_90a") == specs_of(
        replace(latents.config, fp8_products="exact"), "sm_90a"
    )
    levels = CascadePlanner(kv_dtype=FP8, fp8_products="fast", device="cpu")
    assert levels.config.fp8_products == levels.prefix.config.fp8_products == "fast"
    for answer in (
        jitattn.check_config(planner="mla", fp8_products="fast"),
        jitattn.check_config(planner="mla", kv_dtype=FP8, fp8_products="quick"),
        jitattn.check_config(fp8_products="fast"),
    ):
        assert ["fp8_products" in reason for reason in answer.reasons] == [True]


def test_latents_and_levels_are_refused() -> None:
    reasons = jitattn.check_config(planner="mla", q_dtype=FP8, kv_dtype=FP8).reasons
    assert any("q_dtype" in reason for reason in reasons)
    with pytest.raises(ConfigError, match="q_dtype=float8_e4m3fn is refused in a cascade"):
        CascadePlanner(q_dtype=FP8, kv_dtype=FP8, device="cpu")


H, T = SMALL.num_qo_heads, sum(SMALL.q_lens)
REFUSED_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"q_scale": "0.5"}, "q_scale is a str"),
    "a list": ({"q_scale": [0.5]}, "q_scale is a list"),
    "nan": ({"q_scale": float("nan")}, "q_scale is nan"),
    "infinity": ({"q_scale": float("inf")}, "q_scale is inf"),
    "a large number": ({"q_scale": 1e39}, "q_scale is 1e[+]39"),
    "float64": ({"q_scale": torch.ones(H).double()}, "q_scale has dtype float64"),
    "heads of others": ({"q_scale": torch.ones(H + 1)}, "q_scale has shape"),
    "tokens alone": ({"q_scale": torch.ones(T)}, "q_scale has shape"),
    "columns": ({"q_scale": torch.ones(T, 1)}, "q_scale has shape"),
    "three dimensions": ({"q_scale": torch.ones(T, H, 1)}, "q_scale has shape"),
    "another device": ({"q_scale": torch.ones(H, device="meta")}, "q_scale is on meta"),
    "out_scale": ({"out_scale": 1.0}, "out_scale is given"),
    "q of 16 bits": ({"q": torch.zeros(T, H, 16).half()}, "q has dtype float16"),
    "bytes": ({"q": torch.zeros(T, H, 16, dtype=torch.uint8)}, "q has dtype uint8"),
    "no q": ({"q": None}, "q is a NoneType"),
    "fewer heads": ({"q": torch.zeros(T, H - 1, 16).to(FP8)}, "q has shape"),
    "q as rows": ({"q": torch.zeros(T, H * 16).to(FP8)}, "q has shape"),
    "q of columns": ({"q": torch.zeros(T, H, 32).to(FP8)[..., ::2]}, "q has strides"),
    "out of another type": ({"out": torch.zeros(T, H, 16)}, "out has dtype float32"),
    "sinks": ({"sinks": torch.zeros(H)}, "sinks are given"),
}


@pytest.mark.parametrize("name", REFUSED_RUNS)
def test_refused_runs(name: str) -> None:
    changes, reason = REFUSED_RUNS[name]
    inputs = FP8Inputs(replace(SMALL, form="none"), "cpu")
    planner = inputs.planner()
    arguments: dict[str, Any] = {"q": inputs.q, "kv": inputs.bind(planner)} | changes
    with pytest.raises((TypeError, ValueError), match=reason):
        inputs.plan(planner).run(**arguments)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernels(arch: str) -> None:
    """Those of float16 queries, and the one before them: a bundle has all that a step launches."""
    specs = specs_of(MIXED.config, arch)
    symbols = [spec.symbol for spec in specs]
    assert "jitattn_dequantize_queries" in symbols
    assert "_qf16_kve4m3_obf16_" in symbols[0]
    same = specs_of(replace(MIXED.config, q_dtype="float16", out_dtype="bfloat16"), arch)
    assert {spec for spec in specs if spec not in same} == {
        spec for spec in specs if spec.kernel == "dequantize_queries"
    }


FAST_TWINS: dict[str, dict[str, Any]] = {
    "16-bit queries": {"q_dtype": "bfloat16"},
    "a head dim": {"head_dim": 80},
    "a wide head dim": {"head_dim": 256},
    "a value head dim": {"head_dim_vo": 48},
    "lists": {"page_table": "page_lists"},
    "a variant": {"variant": jitattn.ALIBI},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernels_of_products_of_8_bits(arch: str) -> None:
    """They read FP8 queries, on one architecture."""
    kinds = ("decode", "prefill")
    symbols = [spec.symbol for spec in specs_of(FAST.config, arch) if spec.kernel in kinds]
    has_fp8 = arch == "sm_90a"
    assert all(("_qe4m3_kve4m3_" in symbol) is has_fp8 for symbol in symbols)
    others = {spec.kernel for spec in specs_of(FAST.config, arch)}
    assert ("dequantize_queries" in others) is not has_fp8


@pytest.mark.parametrize("name", FAST_TWINS)
def test_what_has_no_products_of_8_bits(name: str) -> None:
    fast = replace(FAST.config, **FAST_TWINS[name])
    assert specs_of(fast, "sm_90a") == specs_of(replace(fast, fp8_products="exact"), "sm_90a")


@pytest.mark.parametrize("head_dim", [32, 96, 224])
def test_a_kernel_names_its_configuration(head_dim: int) -> None:
    for spec in specs_of(replace(FAST.config, head_dim=head_dim), "sm_90a"):
        if spec.kernel in ("decode", "prefill"):
            again = specs_of(PlannerConfig.parse(spec.config_text()), "sm_90a")
            assert spec.symbol in {other.symbol for other in again}
