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


@pytest.mark.parametrize("runner", [1, 2])
def test_tokens_are_those_of_transformers(runner: int, tmp_path: Path) -> None:
    models, jobs = {}, []
    for name in NAMES:
        # vLLM's Gemma 2 has one matrix for tokens and logits.
        models[name] = hf_models.make_model(name, tie_word_embeddings=name == "gemma2")
        models[name].save_pretrained(tmp_path / name)
        for kv_dtype in ("auto", "fp8") if name in QUANTISED else ("auto",):
            engine = {
                "model": str(tmp_path / name),
                "kv_cache_dtype": kv_dtype,
                "kv_cache_memory_bytes": 1 << 20,
                "block_size": 16,
            }
            jobs.append({"engine": engine, "prompts": prompts(), "num_new": NUM_NEW})
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
