"""Variants as values: texts, keys, refusals, what compilers say of them, and their definitions."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import jitattn
from jitattn.base import knobs
from jitattn.base.errors import CompileError, ConfigError, KernelNotFoundError
from jitattn.bundles import precompile as bundles_precompile
from jitattn.jit.build import build, fill_bundle, headers_of
from jitattn.jit.nvrtc import compile_cubin, options
from jitattn.jit.render import render
from jitattn.kernels.attention.spec import DecodeSpec
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.params import variant_params
from jitattn.spec.variant import ALIBI, RELATIVE_BIAS, AttentionVariant, ParamType, parse_type
from tests.support.cases import Case, of
from tests.support.harness import attend, check, expected
from tests.support.inputs import make_inputs
from tests.support.mla import MLACase
from tests.support.mla import check as check_latents
from tests.support.mla import make_inputs as make_latents
from tests.support.variants import EVERYTHING, VARIANTS

ARCH = "sm_90a"
CONFIGS = {
    "decode and wgmma prefill": PlannerConfig(),
    "prefill of wide heads": PlannerConfig(head_dim=512),
    "wgmma latents": MLAConfig(),
    "portable latents": MLAConfig(kv_dtype="float8_e4m3fn"),
}


def specs(config: PlannerConfig | MLAConfig, variant: AttentionVariant) -> list[AttentionSpec]:
    found = specs_of(replace(config, variant=variant), ARCH)
    return [spec for spec in found if isinstance(spec, AttentionSpec)]


def decode(variant: AttentionVariant) -> AttentionSpec:
    return specs(PlannerConfig(), variant)[0]


def compile_log(spec: AttentionSpec, arch: str = ARCH) -> str:
    source = render(spec, arch)
    name = f"{spec.symbol}.cu"
    return compile_cubin(source, name=name, headers=headers_of(source), options=options(arch)).log


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("float", ParamType("float")),
        (" int ", ParamType("int")),
        ("bfloat16 *", ParamType("bfloat16", is_pointer=True)),
        ("uint8[3]", ParamType("uint8", sizes=(3,))),
        ("float[qo_heads, *,kv_heads]", ParamType("float", sizes=("qo_heads", "*", "kv_heads"))),
        *((text, None) for text in ("double", "float16", "float**", "float[]", "float[0]", "")),
        *((text, None) for text in ("float[a]", "float[1,2,3,4,5]", "const float*", "float[-1]")),
        *((text, None) for text in ("float[03]", "float[\u0663]", f"float[{'9' * 5000}]")),
    ],
)
def test_types(text: str, want: ParamType | None) -> None:
    assert parse_type(text) == want


REFUSED = {
    "no identifier": (("my bias", "logit"), ValueError, "name='my bias'"),
    "a long name": (("x" * 33, "logit"), ValueError, "32 at most"),
    "no name": ((None, "logit"), TypeError, "name is a NoneType"),
    "no text": (("x", 3), TypeError, "logits_transform is a int"),
    "nothing": (("x", "  // a comment\n"), ValueError, "is empty"),
    "an open bracket": (("x", "\nfoo(\n  logit"), ValueError, "'x':2: '\\(' is never closed"),
    "a loose bracket": (("x", "return logit;\n}"), ValueError, "'x':2: '}' closes nothing"),
    "crossed brackets": (("x", "f(logit]"), ValueError, "'x':1: ']' closes nothing"),
    "an open comment": (("x", "logit\n/* + 1"), ValueError, "'x':2: a comment that doesn't end"),
    "an open string": (("x", 'f("logit)'), ValueError, "'x':1: a string that doesn't end"),
    "a backslash": (("x", "logit \\"), ValueError, "ends with a backslash"),
    "a backslash in a comment": (("x", "logit // a \\"), ValueError, "ends with a backslash"),
    "a bracket in a comment's second line": (
        ("x", "return f(logit // \\ \n);\n"), ValueError, "'x':1: '\\(' is never closed",
    ),
    "no result": (("x", "if (logit > 0.f)\n  return /* it */\n;"), ValueError, "'x':2: a return"),
    "half a character": (("x", "logit // \ud800"), ValueError, "half of a surrogate pair"),
    "a NUL": (("x", "logit\0"), ValueError, "NUL"),
    "params of no kind": (("x", "logit", ["a"]), TypeError, "params is a list"),
    "no type": (("x", "logit", {"a": 1}), TypeError, "expected a name and a type"),
    "another type": (("x", "logit", {"a": "double"}), ValueError, "type 'double': expected float"),
    "no parameter's name": (("x", "logit", {"a b": "int"}), ValueError, "params has 'a b'"),
    "a name without a type": (("x", "logit", (1,)), TypeError, "params has 1: expected a tuple"),
    "a pair in a list": (("x", "logit", (["a", "int"],)), TypeError, "expected a tuple"),
    "three in a pair": (("x", "logit", (("a", "int", 3),)), TypeError, "expected a tuple"),
    "many params": (("x", "logit", {f"a{i}": "int" for i in range(17)}), ValueError, "16 at most"),
    "a name twice": (("x", "logit", (("a", "int"), ("a", "int"))), ValueError, "two params"),
    "no function": (("x", "logit", {}, "logit"), TypeError, "reference is a str"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, kind, match = REFUSED[name]
    with pytest.raises(kind, match=match):
        AttentionVariant(*arguments)


def test_brackets_in_comments_and_literals_are_none() -> None:
    text = "// ( [\nreturn logit + '(' + \"}\\\"{\"[0] /* ) \n */ + 1'000;"
    variant = AttentionVariant("x", text)
    assert not variant.is_expression
    assert AttentionVariant("x", "logit /* return */ // return\n").is_expression


def test_arguments_are_readable_and_values_frozen() -> None:
    variant = AttentionVariant("x", "\n    logit +\n      1.f\n", {"a": "int"})
    assert variant.logits_transform == "\nlogit +\n  1.f"  # lines keep their numbers
    assert variant.params == (("a", "int"),)
    assert str(variant) == variant.name == "x"
    assert variant.reference is None
    with pytest.raises(AttributeError):
        variant.name = "y"  # type: ignore[misc]


# --- keys -----------------------------------------------------------------------------------------


OTHERS = [
    AttentionVariant("x", "logit"),
    AttentionVariant("y", "logit"),
    AttentionVariant("x", "logit + 0.f"),
    AttentionVariant("x", "logit", {"a": "int"}),
    AttentionVariant("x", "logit", {"a": "float"}),
    AttentionVariant("x", "logit", {"b": "int"}),
    AttentionVariant("x", "logit", {"a": "int", "b": "int"}),
    AttentionVariant("x", "logit", {"b": "int", "a": "int"}),
    # Parts that join to the same letters.
    AttentionVariant("x", "logita", {"b": "int"}),
    AttentionVariant("x", "logit", {"ab": "int"}),
]


def test_two_variants_share_no_kernel() -> None:
    assert len({decode(variant).symbol for variant in OTHERS}) == len(OTHERS)
    assert len({render(decode(variant), ARCH) for variant in OTHERS}) == len(OTHERS)
    plain = specs_of(PlannerConfig(), ARCH)[0]
    assert plain.symbol not in {decode(variant).symbol for variant in OTHERS}


def test_a_reference_changes_no_key() -> None:
    one = AttentionVariant("x", "logit", {"a": "int"}, reference=lambda logit, at: logit)
    other = AttentionVariant("x", "logit", {"a": "int"})
    assert one != other
    assert decode(one) == decode(other)
    assert hash(decode(one)) == hash(decode(other))
    assert pickle.loads(pickle.dumps(decode(one))) == decode(other)


def test_another_process_finds_the_kernel(tmp_path: Path) -> None:
    """By the text: symbol and entry are those of this process, and nothing compiles there."""
    kernel = fill_bundle(decode(EVERYTHING), ARCH, tmp_path)
    assert kernel.origin == "compiled"
    program = (
        "import sys, pathlib\n"
        "from jitattn.jit.build import build\n"
        "from jitattn.spec.config import PlannerConfig\n"
        "from jitattn.base.knobs import load\n"
        "from jitattn.kernels.registry import specs_of\n"
        "from tests.support.variants import EVERYTHING\n"
        f"spec = specs_of(PlannerConfig(variant=EVERYTHING), {ARCH!r})[0]\n"
        f"kernel = build(spec, {ARCH!r}, load())\n"
        "print(kernel.entry, kernel.origin)\n"
    )
    environ = {
        **{"JITATTN_PRECOMPILED": str(tmp_path), "JITATTN_JIT": "0", "PYTHONHASHSEED": "7"},
        **{"PYTHONPATH": str(Path(jitattn.__file__).parents[1]), "HOME": str(tmp_path)},
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ
    )
    assert done.stdout.split() == [kernel.entry, "precompiled"], done.stderr


def test_bundles_hold_variants(tmp_path: Path) -> None:
    """In workers, though a reference may be what no pickle holds."""
    configs = [
        PlannerConfig(head_dim=16, num_qo_heads=8, variant=replace(ALIBI, reference=lambda x, _: x))
    ]
    found = {spec.symbol for spec, _ in bundles_precompile.kernels_of(configs, ARCH)}
    named = {
        spec.symbol
        for spec, _ in bundles_precompile.kernels_of(
            "head_dim=16,num_qo_heads=8,variant=alibi", ARCH
        )
    }
    assert found == named
    report = jitattn.precompile(
        MLAConfig(variant=EVERYTHING, kv_lora_rank=256), ARCH, tmp_path, jobs=2, progress=False
    )
    assert report.failures == ()
    assert sum("everything_" in entry.symbol for entry in report.entries) == 2


def test_a_missing_kernel_says_how_to_make_it(tmp_path: Path) -> None:
    settings = replace(knobs.load(), jit=False, precompiled=(), cache_dir=tmp_path)
    ready = decode(ALIBI)
    with pytest.raises(KernelNotFoundError, match=r"--config .*variant=alibi"):
        build(ready, ARCH, settings, hint=PlannerConfig(variant=ALIBI).arguments_text())
    for variant in (EVERYTHING, AttentionVariant("alibi", "logit")):
        with pytest.raises(KernelNotFoundError, match=rf"variant '{variant}' is defined"):
            build(decode(variant), ARCH, settings)


def test_arguments_as_text() -> None:
    config = PlannerConfig.parse("head_dim=64,variant=relative_bias")
    assert config.variant is RELATIVE_BIAS
    assert config.arguments_text() == "head_dim=64,variant=relative_bias"
    assert PlannerConfig.parse("variant=none").variant is None
    assert MLAConfig.parse("planner=mla,variant=alibi").variant is ALIBI
    assert jitattn.check_config(variant=ALIBI).supported
    reasons = jitattn.check_config(variant=3).reasons
    assert reasons == ["variant=3: expected an AttentionVariant or one of alibi, relative_bias"]


# --- compilers ------------------------------------------------------------------------------------


BROKEN = {
    "an expression": (("oops", "logit + nowhere"), 1, "nowhere"),
    "a later line": (("oops", "\nfloat x = 1.f;\nreturn x + nowhere;\n"), 3, "nowhere"),
    "no result": (("oops", "if (logit > 0.f) {\n  return logit;\n}"), 4, "missing return"),
    "another member": (("oops", "params.a +\nparams.b", {"a": "float"}), 2, 'no member "b"'),
    "two indices": (("oops", "logit\n+ params.a(1, 2)", {"a": "float[3]"}), 2, "argument"),
    "no float": (("oops", '"logit"'), 1, "type"),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", BROKEN)
def test_errors_name_the_users_line(name: str, config: str) -> None:
    arguments, line, what = BROKEN[name]
    if name not in ("an expression", "a later line") and config != "portable latents":
        return
    for spec in specs(CONFIGS[config], AttentionVariant(*arguments)):
        with pytest.raises(CompileError) as error:
            compile_log(spec)
        first = error.value.first_error
        assert first.startswith(f"variant 'oops'({line}): error:"), first
        assert what in first


def test_a_param_that_is_no_name_in_cpp_is_named() -> None:
    with pytest.raises(CompileError, match=r"params of variant 'oops'\(2\): error"):
        compile_log(decode(AttentionVariant("oops", "logit", {"a": "int", "class": "float"})))


def test_lines_of_templates_stay_theirs() -> None:
    """What follows a variant's text is numbered as without it."""
    with_variant, without = (
        [line for line in render(spec, ARCH).splitlines() if line.startswith("#line")]
        for spec in (decode(EVERYTHING), specs_of(PlannerConfig(), ARCH)[0])
    )
    following = iter(with_variant)
    assert all(line in following for line in without)  # in their order, with others between
    assert any("variant" in line for line in with_variant)


def test_planners_raise_what_the_compiler_says(tmp_path: Path) -> None:
    settings = replace(knobs.load(), cache_dir=tmp_path, precompiled=())
    with pytest.raises(CompileError, match=r"variant 'oops'\(1\): error"):
        build(decode(AttentionVariant("oops", "logit + nowhere")), ARCH, settings)


# --- calls ----------------------------------------------------------------------------------------

CASE = of(Case(head_dim=16, page_size=4, seed=5), (1, 9), (3, 2), (0, 5), (7, 12), (5, 3))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_reference_backend(name: str, causal: bool) -> None:
    case = replace(CASE, variant=name, causal=causal, sinks="float32", logits_soft_cap=2.0)
    inputs = make_inputs(case, "cpu")
    check(case, *attend(inputs), expected(inputs))


@pytest.mark.parametrize("q_lens", [None, (1, 3, 2, 4)], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_reference_backend_of_latents(name: str, q_lens: tuple[int, ...] | None) -> None:
    case = MLACase(
        variant=name, num_heads=3, kv_lora_rank=256, lengths=(9, 0, 2, 30), q_lens=q_lens, seed=9,
    )  # fmt: skip
    inputs = make_latents(case)
    check_latents(inputs, *inputs.run())


def test_a_planner_without_a_definition_is_refused_on_the_cpu() -> None:
    variant = AttentionVariant("mine", "logit")
    for make in (jitattn.AttentionPlanner, jitattn.MLAPlanner):
        scale = {"sm_scale": 1.0} if make is jitattn.MLAPlanner else {}
        with pytest.raises(ConfigError, match="variant=mine has no reference, which backend="):
            make(variant=variant, device="cpu", **scale)


def test_what_is_masked_infinite_or_no_number() -> None:
    """-inf masks; a row of nothing else is empty; +inf and NaN are NaN."""
    special = AttentionVariant(
        "special",
        "logit",
        {"values": "float[qo_heads, *]"},
        reference=lambda logit, at: logit + at.params.values[at.qo_head, at.kv_idx],
    )
    planner = jitattn.AttentionPlanner(
        num_qo_heads=4, num_kv_heads=4, head_dim=16, page_size=4, variant=special, device="cpu"
    )
    table = jitattn.BlockTable(torch.zeros(1, 1, dtype=torch.int32))
    plan = planner.plan(table, torch.tensor([4]))
    cache = torch.randn(1, 2, 4, 4, 16).bfloat16()
    values = torch.zeros(4, 4)
    values[0, :3], values[1], values[2, 1], values[3, 2] = (
        -torch.inf,
        -torch.inf,
        torch.nan,
        torch.inf,
    )
    q = torch.randn(1, 4, 16).bfloat16()
    out, lse = plan.run(q, cache, return_lse=True, variant_params={"values": values})
    assert torch.equal(out[0, 0], cache[0, 1, 3, 0])
    assert bool((out[0, 1] == 0).all())
    assert lse[0, 1] == -torch.inf
    assert bool(out[0, 2:].isnan().all())
    assert bool(lse[0, 2:].isnan().all())


GOOD = {
    "masked": 1,
    "alpha": 0.5,
    "shift": torch.zeros(8).bfloat16(),
    "kind": torch.zeros(2, 2, dtype=torch.uint8),
    "table": torch.zeros(3, 2).half(),
}
BAD = {
    "nothing": (None, ValueError, "not given: everything has masked, alpha, shift, kind, table"),
    "no mapping": ([1], TypeError, "variant_params is a list"),
    "missing": ({"masked": ...}, ValueError, "lacks masked"),
    "unknown": ({"beta": 1}, ValueError, "has beta: everything has masked"),
    "no integer": ({"masked": 1.5}, TypeError, r"variant_params\['masked'\] is a float"),
    "a bool": ({"masked": True}, TypeError, "is a bool"),
    "a large integer": ({"masked": 2**31}, ValueError, "is 2147483648"),
    "no number": ({"alpha": "1"}, TypeError, r"\['alpha'\] is a str: expected a number"),
    "a larger integer": ({"alpha": 10**400}, ValueError, "is beyond floats"),
    "a large number": ({"alpha": 1e39}, ValueError, "expected a finite float32"),
    "infinity": ({"alpha": float("inf")}, ValueError, "expected a finite number"),
    "no tensor": ({"shift": 1.0}, TypeError, r"\['shift'\] is a float: expected a tensor"),
    "another dtype": ({"shift": torch.zeros(8)}, TypeError, "has dtype float32: expected bfloat16"),
    "strides": ({"shift": torch.zeros(16).bfloat16()[::2]}, ValueError, r"strides \[2\]: expected"),
    "another shape": (
        {"kind": torch.zeros(3, 2, dtype=torch.uint8)}, ValueError, r"\[3, 2\]: expected \[2, 2\]",
    ),
    "another rank": ({"table": torch.zeros(3).half()}, ValueError, r"\[3\]: expected \[3, \*\]"),
    "another device": (
        {"shift": torch.zeros(8, device="meta").bfloat16()}, ValueError, "is on meta: expected cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_params(name: str) -> None:
    given, kind, match = BAD[name]
    if isinstance(given, dict):
        given = {k: v for k, v in (GOOD | given).items() if v is not ...}
    case = replace(CASE, variant="everything")
    inputs = make_inputs(case, "cpu")
    with pytest.raises(kind, match=match):
        attend(inputs, variant_params=given)
    attend(inputs, variant_params=GOOD)


def test_params_without_a_variant() -> None:
    inputs = make_inputs(CASE, "cpu")
    with pytest.raises(ValueError, match="the planner has no variant"):
        attend(inputs, variant_params={})
    bare = AttentionVariant("bare", "logit", reference=lambda logit, at: logit)
    planner = jitattn.AttentionPlanner(**CASE.planner_arguments() | {"variant": bare}, device="cpu")
    with pytest.raises(ValueError, match="the variant bare without params"):
        attend(inputs, planner, variant_params={})
    out, lse = attend(inputs, planner)
    check(CASE, out, lse, expected(inputs))


def test_a_reference_of_another_shape_is_refused() -> None:
    wrong = AttentionVariant("wrong", "logit", reference=lambda logit, at: logit[0])
    planner = jitattn.AttentionPlanner(
        **CASE.planner_arguments() | {"variant": wrong}, device="cpu"
    )
    with pytest.raises(ValueError, match="the reference of wrong returns no logits"):
        attend(make_inputs(CASE, "cpu"), planner)


def test_params_have_their_places() -> None:
    names = [name for name, *_ in variant_params(EVERYTHING)._fields_]
    assert names == [name for name, _ in EVERYTHING.params]
    assert isinstance(decode(EVERYTHING), DecodeSpec)


# --- what the ready ones are given ----------------------------------------------------------------


def test_alibi_slopes() -> None:
    assert jitattn.variants.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert jitattn.variants.alibi_slopes(1).tolist() == [2.0**-8]
    # 4 heads have 2**-2, 2**-4, 2**-6 and 2**-8; of 8 heads the first has 2**-1, the third 2**-3.
    assert jitattn.variants.alibi_slopes(6).tolist() == [2.0**-i for i in (2, 4, 6, 8, 1, 3)]
    with pytest.raises(ValueError, match="num_qo_heads is 0"):
        jitattn.variants.alibi_slopes(0)


def test_t5_bias() -> None:
    """Distances below half of the buckets have one each, the others share in logarithms."""
    weight = torch.arange(8.0)[:, None] * torch.tensor([1.0, -10.0])
    params = jitattn.variants.t5_bias(weight, bidirectional=False, max_distance=64)
    # 4 exact ones, then 4 to 7, 8 to 15, 16 to 31, and more.
    want = [0, 1, 2, 3, *[4] * 4, *[5] * 8, *[6] * 16, *[7] * 33]
    assert params["zero"] == 64
    assert params["bias"][0].tolist() == [0.0] * 64 + want
    assert params["bias"][1].tolist() == [0.0] * 64 + [-10.0 * bucket for bucket in want]
    both = jitattn.variants.t5_bias(weight.half(), bidirectional=True, max_distance=4)["bias"]
    assert both[0].tolist() == [7, 7, 6, 5, 0, 1, 2, 3, 3]
    with pytest.raises(ValueError, match=r"weight has shape \[2, 2\]"):
        jitattn.variants.t5_bias(weight[:2], bidirectional=False)
    with pytest.raises(ValueError, match="max_distance is 4: expected 5 to"):
        jitattn.variants.t5_bias(weight, bidirectional=False, max_distance=4)


def test_t5_bias_is_that_of_transformers() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for bidirectional, num_buckets, max_distance in ((False, 32, 128), (True, 32, 128)):
        weight = torch.randn(num_buckets, 3)
        params = jitattn.variants.t5_bias(
            weight, bidirectional=bidirectional, max_distance=max_distance
        )
        distance = torch.arange(-300, 301)
        buckets = t5.T5Attention._relative_position_bucket(
            -distance, bidirectional, num_buckets, max_distance
        )
        columns = (params["zero"] + distance).clamp(0, params["bias"].shape[1] - 1)
        assert torch.equal(params["bias"][:, columns], weight[buckets].T)
