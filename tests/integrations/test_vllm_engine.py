"""vLLM's engine, whole, through jitattn on the CPU: transformers' tokens.

Prompts are longer than a step, begin alike, and come again when they are in the cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import hf_models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("fastapi") is None,
    reason="vLLM's engine is not installed",
)

NUM_NEW = 6
NAMES = ("llama", "qwen3", "mistral", "gemma2", "gemma3")
QUANTISED = ("llama", "gemma2")
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 1.0},
    **{"original_max_position_embeddings": 256, "mscale_all_dim": 1.0},
}
# Without experts, whose kernels have no build for CPUs here.
LATENT = {
    **{"num_key_value_heads": 4, "qk_rope_head_dim": 64, "head_dim": 64, "rope_parameters": YARN},
    **{"n_routed_experts": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1},
}
LATENTS = {
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | {"kv_lora_rank": 256, "q_lora_rank": 48, "qk_nope_head_dim": 32, "v_head_dim": 48},
    ),
}


def prompts() -> list[list[int]]:
    first, second, third, fourth = hf_models.prompts_of((70, 90, 5, 33))
    return [first, first[:41] + second[41:], third, fourth, first[:64]]


def run(folder: Path, jobs: list[dict[str, Any]], runner: int) -> list[dict[str, Any]]:
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
    if runner == 2:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.support.vllm_cpu", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(path.with_suffix(".out").read_text())
    return found


def job_of(path: Path, kv_dtype: str) -> dict[str, Any]:
    engine = {
        "model": str(path),
        "kv_cache_dtype": kv_dtype,
        "kv_cache_memory_bytes": 1 << 20,
        "block_size": 16,
    }
    return {"engine": engine, "prompts": prompts(), "num_new": NUM_NEW}


@pytest.mark.parametrize("runner", [1, 2])
def test_tokens_are_those_of_transformers(runner: int, tmp_path: Path) -> None:
    models, jobs = {}, []
    for name in NAMES:
        # vLLM's Gemma 2 has one matrix for tokens and logits.
        models[name] = hf_models.make_model(name, tie_word_embeddings=name == "gemma2")
        models[name].save_pretrained(tmp_path / name)
        for kv_dtype in ("auto", "fp8") if name in QUANTISED else ("auto",):
            jobs.append(job_of(tmp_path / name, kv_dtype))
    for job, found in zip(jobs, run(tmp_path, jobs, runner), strict=True):
        name = Path(job["engine"]["model"]).name
        assert found["runner"] == f"v{runner}"
        assert found["attentions"] == ["JitattnBackend"]
        assert sum(found["cached"]) > 0
        if job["engine"]["kv_cache_dtype"] == "auto":
            for tokens in (found["tokens"], found["again"]):
                compared = hf_models.compare(models[name], prompts(), tokens)
                assert compared.num_tokens == len(prompts()) * NUM_NEW
                assert compared.num_ties <= 3
        else:
            assert found["tokens"] == found["again"]
        num_different = len({token for row in found["tokens"] for token in row})
        assert num_different > (1 if name == "gemma2" else 5)


@pytest.mark.parametrize("runner", [1, 2])
def test_tokens_of_models_with_latents(
    runner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's, with chunks of prompts behind what the cache has."""
    monkeypatch.setattr(hf_models, "MODELS", hf_models.MODELS | LATENTS)
    models, jobs = {}, []
    for name in LATENTS:
        models[name] = hf_models.make_model(name)
        models[name].save_pretrained(tmp_path / name)
        jobs += [job_of(tmp_path / name, kv_dtype) for kv_dtype in ("auto", "fp8")]
    results = run(tmp_path, jobs, runner)
    for job, found in zip(jobs, results, strict=True):
        name = Path(job["engine"]["model"]).name
        assert found["runner"] == f"v{runner}"
        assert found["attentions"] == ["JitattnMLABackend", "JitattnMLAPrefillBackend"]
        assert sum(found["cached"]) > 0
        for tokens in (found["tokens"], found["again"]):
            assert len({token for row in tokens for token in row}) > 5
            if job["engine"]["kv_cache_dtype"] == "auto":
                compared = hf_models.compare(models[name], prompts(), tokens)
                assert compared.num_tokens == len(prompts()) * NUM_NEW
                assert compared.num_ties <= 3
    for exact, rounded in zip(results[::2], results[1::2], strict=True):
        rows = zip(exact["tokens"], rounded["tokens"], strict=True)
        num_same = sum(a == b for row in rows for a, b in zip(*row, strict=True))
        assert num_same >= 20  # of 30: those behind another differ, too
