"""What is read of config.json files: well-known models, odd fields, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jitattn.base.errors import ConfigError
from jitattn.bundles.model_config import Indexer, Latent, model_of, read_model
from jitattn.spec.layout import Pairing
from jitattn.spec.model_types import MODEL_TYPES
from jitattn.spec.rotary_fields import ROPE_TYPES
from jitattn.tensors import rope
from tests.support.model_configs import MODELS, write_config

LLAMA = MODELS["llama-3.1-8b"]
UNKNOWN = {"num_attention_heads": 32, "hidden_size": 4096, "model_type": "someone's"}

# Heads of q and of K and V, head_dim, windows.
SHAPES = {
    "llama-3.1-8b": (32, 8, 128, (-1,)),
    "mistral-7b-v0.1": (32, 8, 128, (4095,)),
    "qwen2.5-7b": (28, 4, 128, (-1,)),
    "qwen3-8b": (32, 8, 128, (-1,)),
    "qwen3-30b-a3b": (32, 4, 128, (-1,)),
    "gemma-2-9b": (16, 8, 256, (-1, 4095)),
    "gemma-3-27b": (32, 16, 128, (-1, 1023)),
    "gpt-oss-20b": (64, 8, 64, (-1, 127)),
    "deepseek-v2-lite": (16, 16, 64, (-1,)),
    "deepseek-v3.2": (128, 128, 64, (-1,)),
    "glm-5": (64, 64, 64, (-1,)),
    "phi-2": (32, 32, 80, (-1,)),
    "phi-3-mini-4k": (32, 32, 96, (2046,)),
}
OTHERS: dict[str, dict[str, object]] = {
    "qwen2.5-7b": {"biases": (True, False)},
    "qwen3-8b": {"norms": (True,)},
    "qwen3-30b-a3b": {"norms": (True,)},
    "gemma-2-9b": {"logits_soft_cap": 50.0, "sm_scale": 1 / 16, "dtype": "bfloat16"},
    "gemma-3-27b": {"norms": (True,), "sm_scale": 168**-0.5},
    "gpt-oss-20b": {"use_sinks": True, "biases": (True, False)},
    "deepseek-v2-lite": {
        "latent": Latent(
            kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128
        ),
        "pairings": (Pairing.INTERLEAVED,),
        "sm_scale": pytest.approx(0.1147213867929261),
    },
    "deepseek-v3.2": {
        "latent": Latent(
            kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128
        ),
        "indexer": Indexer(num_heads=64, head_dim=128, num_tokens=2048),
        "pairings": (Pairing.INTERLEAVED,),
        "sm_scale": pytest.approx(0.1147213867929261),
    },
    "glm-5": {
        "latent": Latent(
            kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256
        ),
        "indexer": Indexer(num_heads=32, head_dim=128, num_tokens=2048),
        "pairings": (Pairing.INTERLEAVED,),
        "sm_scale": 256**-0.5,
    },
    "phi-2": {"biases": (True, False), "rotary_dim": 32, "dtype": "float16"},
}


@pytest.mark.parametrize("name", MODELS)
def test_well_known_models(name: str) -> None:
    model = model_of(MODELS[name])
    shape = (model.num_qo_heads, model.num_kv_heads, model.head_dim, model.windows)
    assert shape == SHAPES[name]
    expected = {
        "dtype": "bfloat16",
        "logits_soft_cap": 0.0,
        "sm_scale": None,
        "use_sinks": False,
        "pairings": (Pairing.NEOX,),
        "rotary_dim": model.head_dim,
        "use_mrope": False,
        "biases": (False,),
        "norms": (False,),
        "latent": None,
    } | OTHERS.get(name, {})
    assert {field: getattr(model, field) for field in expected} == expected
    assert all("dtype" in note for note in model.notes)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = MODELS[name] | MODELS[name].get("text_config", {})  # type: ignore[operator]
    if fields["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {fields['model_type']}")
    config = transformers.CONFIG_MAPPING[fields["model_type"]](**fields)
    model = model_of(MODELS[name])
    assert model.num_qo_heads == config.num_attention_heads
    assert model.num_kv_heads == config.num_key_value_heads
    if model.latent is None:
        default = config.hidden_size // config.num_attention_heads
        assert model.head_dim == (getattr(config, "head_dim", None) or default)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or ["sliding_attention" if window else "full_attention"]
    windows = {window - 1 if kind == "sliding_attention" else -1 for kind in kinds}
    assert set(model.windows) == windows
    # And what it would write again is read as the same model.
    written = json.loads(config.to_json_string(use_diff=False))
    again = model_of(written | {"dtype": model.dtype})
    assert {f: v for f, v in vars(again).items() if f != "notes"} == {
        f: v for f, v in vars(model).items() if f != "notes"
    }


def test_transformers_defaults_are_ours() -> None:
    transformers = pytest.importorskip("transformers")
    for name, known in MODEL_TYPES.items():
        if name not in transformers.CONFIG_MAPPING or not known.defaults:
            continue
        config = transformers.CONFIG_MAPPING[name]()
        config = config.get_text_config()
        for field, value in known.defaults.items():
            if field == "partial_rotary_factor":
                assert config.rope_parameters[field] == value
            else:
                assert getattr(config, field) == value, (name, field)


def test_rotary_types_are_those_of_rope() -> None:
    assert set(rope._SCALINGS) == set(ROPE_TYPES)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"head_dim": 64}, {"head_dim": 64}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 32}),
        ({"torch_dtype": None, "dtype": "float16"}, {"dtype": "float16"}),
        ({"torch_dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"attn_logit_softcapping": 30.0}, {"logits_soft_cap": 30.0}),
        ({"query_pre_attn_scalar": 256}, {"sm_scale": 0.0625}),
        ({"attention_multiplier": 0.0078125}, {"sm_scale": 0.0078125}),
        ({"attention_bias": True}, {"biases": (True, False)}),
        ({"text_config": {"head_dim": 256}}, {"head_dim": 256, "num_kv_heads": 8}),
        ({"thinker_config": {"text_config": {"head_dim": 256}}}, {"head_dim": 256}),
        ({"language_config": {"model_type": "qwen3"}}, {"norms": (True,)}),
        ({"partial_rotary_factor": 0.75}, {"rotary_dim": 96}),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {"rotary_dim": 64}),
        ({"rotary_dim": 32}, {"rotary_dim": 32}),
        ({"rope_scaling": {"type": "su", "mrope_section": [16, 24, 24]}}, {"use_mrope": True}),
        ({"no_rope_layers": [1, 0]}, {"pairings": (Pairing.NEOX, Pairing.NONE)}),
        ({"use_qk_norm": True}, {"norms": (True, False)}),
        ({"sliding_window": 4096}, {"windows": (4095,)}),
        ({"sliding_window_size": 4096}, {"windows": (4095,)}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"windows": (-1,)}),
        ({"sliding_window": 0}, {"windows": (-1,)}),
        ({"sliding_window": 128, "sliding_window_pattern": 2}, {"windows": (-1, 127)}),
        ({"sliding_window": 128, "layer_types": ["sliding_attention"]}, {"windows": (127,)}),
        ({"layer_types": ["full_attention", "linear_attention"]}, {"windows": (-1,)}),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64},
            {"windows": (-1, 63)},
        ),
        ({"model_type": "qwen2", "sliding_window": 64}, {"windows": (-1,)}),
        ({"model_type": "gemma2"}, {"logits_soft_cap": 50.0, "windows": (-1, 4095)}),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": None, "sliding_window": None},
            {"logits_soft_cap": 0.0, "windows": (-1,)},
        ),
        ({"model_type": "gemma2", "head_dim": None}, {"head_dim": 128}),
        ({"model_type": "glm4"}, {"pairings": (Pairing.INTERLEAVED,), "rotary_dim": 64}),
    ],
    ids=str,
)
def test_fields_are_understood(fields: dict[str, object], expected: dict[str, object]) -> None:
    model = model_of(LLAMA | fields)
    assert {field: getattr(model, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"alibi": True}, "alibi is True: ALiBi, .* with variant=alibi"),
        ({"model_type": "bloom"}, "model_type 'bloom' has ALiBi"),
        ({"model_type": "bert"}, "model_type 'bert' has queries that see later tokens"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192"),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning is True"),
        ({"index_topk": 2048}, "index_topk is 2048: attention over chosen tokens without latents"),
        ({"index_topk": 2048, "kv_lora_rank": 512, "v_head_dim": 64, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 64, "index_head_dim": 128}, "index_n_heads is missing"),
        ({"is_causal": False}, "is_causal is False"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"layer_types": ["chunked_attention"]}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["indexed_attention"]}, "index_topk is not set"),
        ({"layer_types": ["mamba"]}, "no layer with attention over pages"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is not set"),
        ({"sliding_window": [4096]}, r"sliding_window is \[4096\]: expected a positive integer"),
        ({"sliding_window": 4, "sliding_window_size": 8}, "expected one window"),
        ({"sliding_window": 8, "kv_lora_rank": 512, "v_head_dim": 64, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 64}, "latents have no window"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope type 'axial' is not one of"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn': expected an object"),
        ({"partial_rotary_factor": 0.51}, "rotary embeddings turn 65 of 128 elements"),
        ({"partial_rotary_factor": 2}, "rotary embeddings turn 0 of 128 elements"),
        ({"rotary_dim": 256}, "rotary embeddings turn 256 of 128 elements"),
        ({"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50': expected a number"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1: expected a number"),
        ({"num_attention_heads": True}, "num_attention_heads is True: expected a positive integer"),
        ({"num_attention_heads": 33}, "hidden_size 4096 is not a multiple of num_attention_heads"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing: expected a positive integer"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is missing"),
        ({"text_config": 3}, "text_config is a int: expected an object"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_kernel_computes_is_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        model_of(LLAMA | fields)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba", "rwkv", "mine"])
def test_models_without_attention_are_said_to_have_none(model_type: str) -> None:
    fields = {"model_type": model_type, "hidden_size": 768, "state_size": 16}
    with pytest.raises(ConfigError, match="no attention") as caught:
        model_of(fields)
    assert len(caught.value.reasons) == 1


def test_missing_fields_are_named_as_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of({"model_type": "llama"})
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == [
        "num_attention_heads is missing",
        "hidden_size is missing",
    ]


def test_every_reason_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of(LLAMA | {"alibi": True, "is_causal": False, "num_attention_heads": None})
    assert len(caught.value.reasons) == 3


def test_a_field_that_is_not_understood_is_named() -> None:
    fields = {"sink_token_count": 4, "attention_dropout": 0.1, "vision_head_dim": 3, "swa_rank": 0}
    known = model_of(LLAMA | fields)
    assert known.notes == (
        "sink_token_count is 4, which is not understood: kernels are those of models without it",
    )
    with pytest.raises(ConfigError, match="sink_token_count is 4, which is not understood and may"):
        model_of(UNKNOWN | fields)


def test_an_unknown_model_is_read_from_its_fields() -> None:
    model = model_of(UNKNOWN | {"rope_theta": 1e6, "num_key_value_heads": 4})
    assert (model.num_qo_heads, model.num_kv_heads, model.head_dim) == (32, 4, 128)
    assert model.pairings == (Pairing.NEOX, Pairing.INTERLEAVED)
    assert any("neighbours is not known: kernels for both" in note for note in model.notes)
    assert any('"someone\'s", of which nothing is known' in note for note in model.notes)
    without = model_of({"num_attention_heads": 32, "hidden_size": 4096})
    assert without.pairings == (Pairing.NEOX, Pairing.INTERLEAVED, Pairing.NONE)
    assert any("no rope_theta" in note for note in without.notes)
    assert any("model_type is missing" in note for note in without.notes)


@pytest.mark.parametrize("name", sorted(MODEL_TYPES))
def test_pairings_are_those_of_the_table(name: str) -> None:
    fields = {"model_type": name, "kv_lora_rank": None, "rotary_pct": None}
    shape = {"head_dim": 128, "sliding_window": None, "partial_rotary_factor": None}
    model = model_of(LLAMA | shape | fields)
    assert model.pairings[0] is MODEL_TYPES[name].pairing


def test_a_file_decides_over_its_model_type() -> None:
    for declared, pairing in ((True, Pairing.INTERLEAVED), (False, Pairing.NEOX)):
        for name in ("llama", "glm4", "someone's"):
            fields = {"model_type": name, "rope_interleave": declared}
            model = model_of(LLAMA | fields)
            assert model.pairings[0] is pairing
            assert Pairing.NONE in model.pairings or len(model.pairings) == 1
    with pytest.raises(ConfigError, match="'nanochat' turns pairs by negative angles"):
        model_of(LLAMA | {"model_type": "nanochat"})


@pytest.mark.parametrize(("head_dim", "part"), [(512, 0.125), (128, 0.5), (256, 0.25), (64, 1.0)])
def test_a_part_beside_latents_is_one_of_the_head(head_dim: int, part: float) -> None:
    fields = {"head_dim": head_dim, "partial_rotary_factor": part}
    assert model_of(MODELS["deepseek-v2-lite"] | fields).rotary_dim == 64


def test_what_is_done_before_is_noted() -> None:
    model = model_of(LLAMA | {"clip_qkv": 8, "quantization_config": {"kv_cache_scheme": {"a": 1}}})
    assert any(note.startswith("clip_qkv is 8: clamp q, k and v") for note in model.notes)
    assert any("--kv-dtype" in note for note in model.notes)


# ---------------------------------------------------------------------------- files


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen3-8b")
    assert read_model(path) == read_model(tmp_path) == read_model(str(path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "num_attention_heads is missing"),
        ('{"num_attention_heads": "32"}', "num_attention_heads is '32'"),
        ('{"num_attention_heads": 32}', "hidden_size is missing"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=reason) as caught:
        read_model(path)
    assert all(str(path) in line for line in caught.value.reasons)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            read_model(path)
