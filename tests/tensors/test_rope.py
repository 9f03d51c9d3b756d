"""Rope: frequencies against float64 and against transformers, angles, and what it refuses."""

from __future__ import annotations

import copy
import ctypes
import math
import pickle
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.preprocess.reference import rotate
from jitattn.tensors.rope import turns_of
from tests.emulator import device
from tests.emulator.cuda_runtime import library_of, with_headers
from tests.emulator.preprocess import HOST, HOST_HEADERS

TRAINED = 8192
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [1.5 + i for i in range(64)],
    "original_max_position_embeddings": TRAINED,
}
SCALINGS: dict[str, Mapping[str, object] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, untruncated": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, attention_factor": YARN | {"attention_factor": 1.25},
    "longrope": LONGROPE,
}


# --- frequencies ----------------------------------------------------------------------------------


def in_float64(base: float, dim: int, scaling: Mapping[str, Any] | None, length: int) -> Tensor:
    """Frequencies by their definitions."""
    f = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    if scaling is None:
        return f
    kind, s = scaling["rope_type"], scaling.get("factor")
    if kind == "linear":
        return f / s
    if kind == "dynamic":
        grown = base * (s * length / TRAINED - (s - 1)) ** (dim / (dim - 2))
        return torch.tensor([grown ** (-2 * i / dim) for i in range(dim // 2)]).double()
    if kind == "longrope":
        name = "long_factor" if length > TRAINED else "short_factor"
        return f / torch.tensor(scaling[name]).double()
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = ((TRAINED * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return share * f + (1 - share) * f / s
    rotations = [scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)]
    ends = [dim * math.log(TRAINED / (r * 2 * math.pi)) / (2 * math.log(base)) for r in rotations]
    if scaling.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], dim - 1)
    ramp = ((torch.arange(dim // 2).double() - first) / (last - first)).clamp(0, 1)
    return f / s * ramp + f * (1 - ramp)


@pytest.mark.parametrize("length", [TRAINED // 2, 4 * TRAINED])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_against_float64(name: str, length: int) -> None:
    scaling = SCALINGS[name]
    if name == "dynamic":
        scaling = dict(scaling or {}) | {"original_max_position_embeddings": TRAINED}
    rope = jitattn.Rope(128, base=500000.0, scaling=scaling, max_position=length)
    want = in_float64(500000.0, 128, scaling, max(length, TRAINED) if name == "dynamic" else length)
    assert rope.inv_freq.dtype == torch.float32
    torch.testing.assert_close(rope.inv_freq.double(), want, rtol=2e-6, atol=0)


def hf_config(scaling: Mapping[str, object] | None, **others: object) -> Any:
    """A transformers configuration with the scaling under the name that this version has."""
    transformers = pytest.importorskip("transformers")
    given = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 4 * TRAINED}
    given |= others
    theta = given.pop("rope_theta", 500000.0)
    config = transformers.LlamaConfig(**given)
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta} | dict(scaling or {})
    else:
        config.rope_theta, config.rope_scaling = theta, copy.deepcopy(scaling)
    return config


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """Bit for bit: at the millionth token the last bit of a frequency is a twentieth of a turn."""
    config = hf_config(SCALINGS[name])
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    rope = jitattn.Rope.from_hf_config(config)
    if name == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        module = LlamaRotaryEmbedding(config)
        inv_freq, attention_factor = module.inv_freq, module.attention_scaling
    else:
        kind = str((SCALINGS[name] or {})["rope_type"])
        # What a deployment up to max_position_embeddings has for all tokens.
        compute = utils.ROPE_INIT_FUNCTIONS[kind]
        inv_freq, attention_factor = compute(config, "cpu", seq_len=4 * TRAINED)
    assert torch.equal(rope.inv_freq, inv_freq)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_short_contexts_have_short_factors() -> None:
    config = hf_config(LONGROPE)
    long, short = (jitattn.Rope.from_hf_config(config, max_position=n) for n in (None, TRAINED))
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    want, factor = utils.ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=TRAINED)
    assert torch.equal(short.inv_freq, want)
    assert not torch.equal(long.inv_freq, want)
    assert short.attention_factor == long.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("positions", [[0, 1, 700, 2355], [4095, 4096]])
def test_rotation_is_that_of_transformers(positions: list[int]) -> None:
    config = hf_config(LLAMA3)
    from transformers.models.llama import modeling_llama as llama

    ids = torch.tensor([positions])
    q, k = torch.randn(2, len(positions), 4, 128).unbind()
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), ids)
    want = llama.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rope = jitattn.Rope.from_hf_config(config)
    for given, right in zip((q, k), want, strict=True):
        found = rotate(given.double(), rope, ids.expand(3, -1))
        # Its angles are products of floats.
        torch.testing.assert_close(found.float(), right[0].transpose(0, 1), rtol=0, atol=5e-3)


# --- configurations -------------------------------------------------------------------------------

GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
GEMMA3_NEW = GEMMA3 | {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
GEMMA3_OLD = GEMMA3 | {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


@pytest.mark.parametrize("config", [GEMMA3_NEW, GEMMA3_OLD, {"text_config": GEMMA3_NEW}])
def test_layers_that_differ(config: Mapping[str, object]) -> None:
    local = jitattn.Rope.from_hf_config(config, layer_type="sliding_attention")
    full = jitattn.Rope.from_hf_config(config, layer_type="full_attention")
    assert local == jitattn.Rope(256, base=1e4, max_position=131072)
    linear = {"rope_type": "linear", "factor": 8.0}
    assert full == jitattn.Rope(256, base=1e6, scaling=linear, max_position=131072)
    for wrong in (None, "chunked_attention"):
        with pytest.raises(ValueError, match=r"layer_type is .*full_attention, sliding_attention"):
            jitattn.Rope.from_hf_config(config, layer_type=wrong)


def test_gemma3_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig()
    if not hasattr(config, "rope_parameters"):
        pytest.skip("an older transformers, whose layout the dictionaries above have")
    for kind in ("full_attention", "sliding_attention"):
        rope = jitattn.Rope.from_hf_config(config, layer_type=kind)
        assert rope.base == config.rope_parameters[kind]["rope_theta"]
        assert rope.head_dim == config.head_dim


HEADS = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
UNKNOWN = HEADS | {"model_type": "mine"}


def test_spellings() -> None:
    """Old names, new names, objects and dictionaries."""
    wanted = jitattn.Rope(128, rotary_dim=64, base=2e4, max_position=4096)
    for extra in (
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5},
        {"rope_theta": 2e4, "rotary_pct": 0.5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}, "rotary_dim": 64},
        {"rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}},
    ):
        assert jitattn.Rope.from_hf_config(HEADS | extra) == wanted
        assert jitattn.Rope.from_hf_config(SimpleNamespace(**(HEADS | extra))) == wanted


def test_models_that_pair_neighbours() -> None:
    assert jitattn.Rope.from_hf_config(HEADS | {"model_type": "glm4"}).interleaved
    assert jitattn.Rope.from_hf_config(HEADS | {"rope_interleave": True}).interleaved
    assert not jitattn.Rope.from_hf_config(HEADS | {"model_type": "llama"}).interleaved
    # A config.json of DeepSeek-V3 leaves out what its configuration class has by default.
    deepseek = HEADS | {"model_type": "deepseek_v3", "qk_rope_head_dim": 64}
    assert jitattn.Rope.from_hf_config(deepseek).interleaved
    assert not jitattn.Rope.from_hf_config(deepseek | {"rope_interleave": False}).interleaved
    assert jitattn.Rope.from_hf_config(HEADS, interleaved=True).interleaved


@pytest.mark.parametrize(
    "name",
    [
        *("llama4_text", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "longcat_flash"),
        *("glm_ocr_text", "cohere2_moe", "glm4v_text", "ernie4_5_vl_moe_text"),
    ],
)
def test_neighbours_of_models_whose_files_are_silent(name: str) -> None:
    assert jitattn.Rope.from_hf_config(HEADS | {"model_type": name}).interleaved
    assert jitattn.Rope.from_hf_config({"text_config": HEADS | {"model_type": name}}).interleaved
    declared = HEADS | {"model_type": name, "rope_interleave": False}
    assert not jitattn.Rope.from_hf_config(declared).interleaved


def test_unknown_models_need_a_pairing() -> None:
    for flag in (False, True):
        assert jitattn.Rope.from_hf_config(UNKNOWN, interleaved=flag).interleaved is flag
        declared = UNKNOWN | {"rope_interleave": flag}
        assert jitattn.Rope.from_hf_config(declared).interleaved is flag


@pytest.mark.parametrize(
    ("name", "head_dim", "part"),
    [
        ("deepseek_v4", 512, 0.125),
        ("bailing_moe_v2_5", 128, 0.5),
        ("mistral4", 128, 0.5),
        ("dots3_note_text", 256, 0.25),
    ],
)
def test_a_part_beside_latents_is_one_of_the_head(name: str, head_dim: int, part: float) -> None:
    given = {"model_type": name, "head_dim": head_dim, "qk_rope_head_dim": 64}
    for extra in (
        {"partial_rotary_factor": part},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": part}},
    ):
        rope = jitattn.Rope.from_hf_config(HEADS | given | extra)
        assert (rope.head_dim, rope.rotary_dim, rope.interleaved) == (64, 64, True)


class Raising(SimpleNamespace):
    """A configuration whose ``head_dim`` may not be asked for."""

    def __getattribute__(self, name: str) -> object:
        if name == "head_dim":
            raise RuntimeError("head_dim differs between layers")
        return super().__getattribute__(name)

    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))


GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}


@pytest.mark.parametrize(
    "extra", [{"global_head_dim": 512}, {"per_layer_config": {"01": {"head_dim": 512}}}]
)
def test_layers_whose_heads_differ(extra: dict[str, Any]) -> None:
    for config in (GEMMA4 | extra, Raising(**(GEMMA4 | extra))):
        full = jitattn.Rope.from_hf_config(config, layer_type="full_attention")
        assert (full.head_dim, full.rotary_dim) == (512, 512)
        fast = 1e6 ** -(torch.arange(0, 128, 2).double() / 512)
        torch.testing.assert_close(full.inv_freq[:64].double(), fast, rtol=1e-6, atol=0)
        assert full.inv_freq[64:].tolist() == [0.0] * 192
        local = jitattn.Rope.from_hf_config(config, layer_type="sliding_attention")
        assert (local.head_dim, local.base) == (256, 1e4)


def test_zero_is_no_mscale() -> None:
    for zeros in ({"mscale_all_dim": 0}, {"mscale_all_dim": 0.0, "mscale": 1.0}, {"mscale": 0}):
        assert jitattn.Rope(64, scaling=YARN | zeros) == jitattn.Rope(64, scaling=YARN)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"rope_interleave": "no"}, "rope_interleave is a str"),
        ({"rope_scaling": {"type": "default", "mrope_interleaved": 0}}, "mrope_interleaved is a"),
    ],
)
def test_flags_of_configurations(extra: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        jitattn.Rope.from_hf_config(HEADS | extra)


def test_three_positions() -> None:
    section = [16, 24, 24]
    old = HEADS | {"rope_scaling": {"type": "mrope", "mrope_section": section}}
    rope = jitattn.Rope.from_hf_config(old)
    assert rope == jitattn.Rope(128, mrope_section=section, max_position=4096)
    assert rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    new = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    axes = jitattn.Rope.from_hf_config(HEADS | {"rope_scaling": new}).axes
    assert axes[:6] == (0, 1, 2, 0, 1, 2)
    assert axes[57:] == (0, 1, 2, 0, 0, 0, 0)
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_three_positions_are_those_of_transformers(is_interleaved: bool) -> None:
    pytest.importorskip("transformers")
    section = [24, 20, 20] if is_interleaved else [16, 24, 24]
    rope = jitattn.Rope(128, mrope_section=section, mrope_interleaved=is_interleaved)
    positions = torch.randint(0, 3000, (3, 9))
    angles = positions[..., None].double() * rope.inv_freq.double()  # [3, tokens, pairs]
    if is_interleaved:
        qwen = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
        merge = getattr(qwen.Qwen3VLTextRotaryEmbedding, "recomposition_frequencies", None)
        if merge is None:
            pytest.skip("another version of transformers")
        want = merge(SimpleNamespace(mrope_section=section), angles.clone())[..., :64]
    else:
        parts = angles.split(section, dim=-1)
        want = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    x = torch.zeros(9, 1, 128).double()
    x[..., :64] = 1.0
    found = rotate(x, rope, positions)
    torch.testing.assert_close(found[:, 0, :64], want.cos())
    torch.testing.assert_close(found[:, 0, 64:], want.sin())


# --- angles ---------------------------------------------------------------------------------------


def test_turns_against_pi() -> None:
    """As integers, from 60 digits of pi."""
    pi = Fraction(314159265358979323846264338327950288419716939937510582097494, 10**59)
    for value in (1.0, 0.5, 1e-3, 3.3e-7, 1e-30, 7.77, 0.1234567):
        inv_freq = torch.tensor(value).item()
        exact = Fraction(inv_freq) / (2 * pi) * 2**64
        assert abs((turns_of(inv_freq) - exact + 2**63) % 2**64 - 2**63) <= Fraction(1, 2)


CALL = """
#include "jitattn/rotary.cuh"
extern "C" void call(const int64_t* positions, const uint64_t* turns, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const jitattn::CosSin found = jitattn::cos_sin(positions[i], turns[i]);
    out[2 * i] = found.cos, out[2 * i + 1] = found.sin;
  }
}
"""


@pytest.fixture(scope="module")
def cos_sin() -> Callable[[Tensor, Tensor], Tensor]:
    """The kernels' header, compiled for the CPU: [count, 2] of positions and frequencies."""
    text = HOST + with_headers(CALL, HOST_HEADERS)
    function = library_of(text, begin=device.HOST, needs=(device.device(),)).call

    def call(positions: Tensor, inv_freq: Tensor) -> Tensor:
        turns = torch.tensor([turns_of(f) for f in inv_freq.tolist()])
        out = torch.empty(len(positions), 2)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (positions, turns)]
        function(*pointers, ctypes.c_int64(len(positions)), ctypes.c_void_p(out.data_ptr()))
        return out

    return call


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_angles_against_float64(cos_sin: Callable[[Tensor, Tensor], Tensor], base: float) -> None:
    """Up to a million tokens, where products of floats have lost a tenth of a radian."""
    rng = torch.Generator().manual_seed(0)
    frequencies = jitattn.Rope(128, base=base).inv_freq
    positions = torch.randint(0, 1_000_001, (4000,), generator=rng)
    positions[:6] = torch.tensor([0, 1, 999_999, 1_000_000, -1, -1000])
    inv_freq = frequencies[torch.arange(4000) % 64]
    angles = positions.double() * inv_freq.double()
    want = torch.stack((angles.cos(), angles.sin()), dim=1)
    error = (cos_sin(positions, inv_freq).double() - want).abs().max()
    assert error < 3e-7  # and 2**-20 in the hardware
    products = positions.float() * inv_freq
    assert (products.cos().double() - want[:, 0]).abs().max() > 1e-3


# --- C52 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), (128, 128), (80, 32), (96, 24)])
def test_c52_partial_rotary(head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    rope = jitattn.Rope(head_dim, rotary_dim=rotary_dim, interleaved=interleaved)
    x = torch.randn(4, 3, head_dim).double()
    positions = torch.tensor([0, 1, 700, 2355])
    turned = rotate(x, rope, positions.expand(3, -1))
    assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(turned[0], x[0])
    for i in range(rotary_dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
        angle = positions * 10000.0 ** (-2 * i / rotary_dim)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        torch.testing.assert_close(
            turned[..., a], x[..., a] * cos - x[..., b] * sin, rtol=0, atol=2e-3
        )
        squares = [(y[..., a] ** 2 + y[..., b] ** 2) for y in (x, turned)]
        torch.testing.assert_close(squares[0], squares[1])


def test_c52_products_depend_on_distance() -> None:
    rope = jitattn.Rope(128)
    q, k = torch.randn(2, 1, 1, 128).double().unbind()

    def product(m: int, n: int) -> Tensor:
        parts = [
            rotate(x, rope, torch.tensor([position]).expand(3, -1))
            for x, position in ((q, m), (k, n))
        ]
        return (parts[0] * parts[1]).sum()

    for m, n in ((0, 0), (5, 3), (700, 2355)):
        torch.testing.assert_close(product(m, n), product(m + 1000, n + 1000))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rotary_dim": 3}, "rotary_dim is 3"),
        ({"rotary_dim": 130}, "rotary_dim is 130"),
        ({"rotary_dim": 64.0}, "rotary_dim is a float"),
        ({"base": 0.0}, "base is 0"),
        ({"base": "1e4"}, "base is a str"),
        ({"scaling": {"rope_type": "ntk-by-parts"}}, "type 'ntk-by-parts'.*linear.*longrope"),
        ({"scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast.*no use"),
        ({"scaling": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"scaling": LONGROPE}, "max_position is None"),
        ({"scaling": LONGROPE, "rotary_dim": 64, "max_position": 9}, "64 factors: expected.*32"),
        ({"mrope_section": [1, 2]}, "three counts"),
        ({"mrope_section": [16, 24, 25]}, "65 pairs"),
        ({"mrope_interleaved": True}, "needs mrope_section"),
        ({"max_position": 0}, "max_position is 0"),
        ({"scaling": "linear"}, "scaling is a str"),
        ({"interleaved": "false"}, "interleaved is a str"),
        ({"mrope_section": 5}, "mrope_section is a int"),
        ({"base": 1e-300}, "aren't finite"),
        ({"base": 1.0, "scaling": YARN}, "aren't finite"),
        ({"scaling": LONGROPE | {"long_factor": [0.0] * 64}, "max_position": 9}, "long_factor.*0"),
        (
            {
                "scaling": {
                    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0},
                    **{"high_freq_factor": 1.0, "original_max_position_embeddings": TRAINED},
                }
            },
            "the latter is larger",
        ),
    ],
)
def test_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        jitattn.Rope(128, **arguments)


@pytest.mark.parametrize(
    ("config", "arguments", "match"),
    [
        ({}, {}, "neither head_dim nor hidden_size"),
        (HEADS, {"layer_type": "full_attention"}, "all layers of this model are alike"),
        (HEADS | {"rope_scaling": {"type": "axial"}}, {}, "'axial'"),
        (UNKNOWN, {}, "model_type 'mine' is not known: pass interleaved=True"),
        (UNKNOWN | {"model_type": None}, {}, "no model_type: pass interleaved=True"),
        (HEADS | {"model_type": "nanochat"}, {}, "'nanochat' turns pairs by negative angles"),
        (HEADS | {"rope_scaling": 3}, {}, "rope parameters of type int"),
        (HEADS | {"num_attention_heads": 0}, {}, "neither head_dim nor hidden_size"),
        ({"head_dim": "64"}, {}, "head_dim of config is a str"),
    ],
)
def test_configurations_refused(
    config: Mapping[str, object], arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        jitattn.Rope.from_hf_config(config, **arguments)


def test_values_compare() -> None:
    a, b = jitattn.Rope(64, base=5e5), jitattn.Rope(64, base=5e5)
    assert a == b
    assert hash(a) == hash(b)
    assert a != jitattn.Rope(64)
    assert a != jitattn.Rope(64, base=5e5, interleaved=True)
    for other in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert other == a
    with pytest.raises(AttributeError, match="can't be changed"):
        a.base = 1e4
    assert repr(a) == "Rope(64, rotary_dim=64, base=500000.0)"


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}])
def test_frequencies_lie_on_the_cpu(scaling: dict[str, Any] | None) -> None:
    """Whatever torch's default is: engines make models on others, and on no device at all."""
    want = jitattn.Rope(16, scaling=scaling).inv_freq
    with torch.device("meta"):
        rope = jitattn.Rope(16, scaling=scaling)
    assert torch.equal(rope.inv_freq, want)
