"""SGLang's engine, whole, through jitattn on the CPU: transformers' tokens.

Prompts are longer than a step, begin alike, and come again when they are in the cache.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.support import hf_models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None or importlib.util.find_spec("uvloop") is None,
    reason="SGLang's engine is not installed",
)

NUM_NEW = [6, 3, 6, 2, 5]
TIED = {"tie_word_embeddings": True}  # SGLang's Gemma has one matrix for tokens and logits
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 1.0},
    **{"original_max_position_embeddings": 256, "mscale_all_dim": 1.0},
}
LATENT = {
    **{"kv_lora_rank": 256, "q_lora_rank": None, "num_key_value_heads": 4, "head_dim": 32},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    **{"n_routed_experts": 4, "first_k_dense_replace": 3, "rope_parameters": YARN},
    "moe_layer_freq": 1,  # which SGLang reads
}


class Case(NamedTuple):
    """A model, what its configuration has besides, and what the engine is given."""

    kind: str
    changes: Mapping[str, object] = MappingProxyType({})
    engine: Mapping[str, object] = MappingProxyType({})
    pool: str = "MHATokenToKVPool"


CASES = {
    "llama": Case("llama", engine={"enable_mixed_chunk": True, "page_size": 16}),
    "few slots": Case("llama", engine={"max_total_tokens": 160}),  # prefixes are dropped
    "fp8": Case("llama", engine={"kv_cache_dtype": "fp8_e4m3", "page_size": 16}),
    "qwen3": Case("qwen3", engine={"disable_overlap_schedule": True}),
    # SGLang looks for the activation by its older name, and caps logits in a kernel of Triton.
    "gemma2": Case(
        "gemma2",
        {**TIED, "hidden_act": "gelu_pytorch_tanh", "final_logit_softcapping": None},
        {"page_size": 16},
    ),
    "gemma3": Case("gemma3", TIED),
    "mellum": Case("mellum", EXPERTS, {"page_size": 16}, "SWAKVPool"),
    "deepseek": Case("deepseek", LATENT, {"page_size": 16}, "MLATokenToKVPool"),
}
OTHERS = {
    "mellum": ("Mellum", {"sliding_window": hf_models.WINDOW, "layer_types": hf_models.TYPES}),
    "deepseek": ("DeepseekV2", {}),
}


def prompts() -> list[list[int]]:
    first, second, third, fourth = hf_models.prompts_of((70, 90, 5, 33))
    return [first, first[:41] + second[41:], third, fourth, first[:64]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, dict[str, Any]]]:
    """A model, and what the engine made of it, of each case."""
    folder = tmp_path_factory.mktemp("sglang")
    models, jobs = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_models, "MODELS", hf_models.MODELS | OTHERS)
        for i, (name, case) in enumerate(CASES.items()):
            models[name] = hf_models.make_model(case.kind, **case.changes)
            models[name].save_pretrained(folder / str(i))
            engine = {"model_path": str(folder / str(i)), "page_size": 1, **case.engine}
            job = {"prompts": prompts(), "num_new": NUM_NEW, "retracts": name == "few slots"}
            jobs.append({"engine": engine, **job})
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.support.sglang_cpu", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(path.with_suffix(".out").read_text())
    return {name: (models[name], each) for name, each in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(
    name: str, results: dict[str, tuple[Any, dict[str, Any]]]
) -> None:
    model, found = results[name]
    assert [len(tokens) for tokens in found["tokens"]] == NUM_NEW
    if name == "fp8":
        assert found["tokens"] == found["again"]
    else:
        for tokens in (found["tokens"], found["again"]):
            assert hf_models.compare(model, prompts(), tokens).num_ties <= 3
    num_different = len({token for row in found["tokens"] for token in row})
    assert num_different > (3 if name.startswith("gemma") else 5)
    # All kinds of batches came to the backend.
    assert found["pool"] == CASES[name].pool
    assert {"DECODE", "EXTEND", "EXTEND behind prefixes"} <= set(found["batches"])
    assert ("MIXED" in found["batches"]) == ("enable_mixed_chunk" in CASES[name].engine)
    assert ("retracted" in found["batches"]) == (name == "few slots")
    assert max(found["cached"]) > 0
    assert max(found["cached_again"]) > 0
