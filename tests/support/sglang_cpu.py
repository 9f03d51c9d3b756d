"""SGLang's engine on the CPU, from the wheel for CUDA: processes, scheduler, radix cache, layers.

    python -m tests.support.sglang_cpu JOBS.json

It is a program, since an engine ends all processes that its own has started. One function is here
in torch, which layers take from another package where they see no card: the rotation.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_PLUGINS": "jitattn",
}
# What an engine is started with, for prompts longer than a step's tokens.
ENGINE = {
    "device": "cpu",
    "attention_backend": "jitattn",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "chunked_prefill_size": 48,
    "context_length": 256,
    "max_running_requests": 4,
    "max_total_tokens": 1024,
    "mem_fraction_static": 0.5,
}
SEEN = "SGLANG_CPU_SEEN"  # where the scheduler's process writes which batches it had


def rotate(
    positions: Tensor, query: Tensor, key: Tensor | None, head_dim: int, cache: Tensor, *rest: Any
) -> None:
    """Rotate heads in place by ``cache`` [positions, cosines, sines]; ``rest[0]``: NeoX pairs."""
    cos, sin = cache[positions.flatten()].float()[:, None].chunk(2, dim=-1)
    for x in (query, key):
        if x is not None:
            rotated = x.view(x.shape[0], -1, head_dim)[..., : cache.shape[1]]
            pairs = rotated.float()
            if rest[0]:
                first, second = pairs.chunk(2, dim=-1)
            else:
                first, second = pairs[..., ::2], pairs[..., 1::2]
            new = (first * cos - second * sin, second * cos + first * sin)
            whole = torch.cat(new, dim=-1) if rest[0] else torch.stack(new, dim=-1).flatten(-2)
            rotated.copy_(whole)


def run_scheduler(*arguments: Any, **others: Any) -> None:
    """Be the scheduler's process, which writes down what batches the backend has."""
    operations: Any = ModuleType("vllm._custom_ops")
    operations.rotary_embedding = rotate
    sys.modules |= {"vllm": ModuleType("vllm"), "vllm._custom_ops": operations}
    backend: Any = importlib.import_module("jitattn.integrations.sglang.layers").Backend
    described = backend.init_forward_metadata
    batch: Any = importlib.import_module("sglang.srt.managers.schedule_batch").ScheduleBatch
    mix, retract = batch.mix_with_running, batch.retract_decode
    seen: set[str] = set()

    def mixed(self: Any, running: Any) -> None:
        seen.add("MIXED")  # which the runner calls EXTEND
        mix(self, running)

    def retracted(self: Any) -> Any:
        seen.add("retracted")
        return retract(self)

    def describe(self: Any, forward_batch: Any) -> None:
        described(self, forward_batch)
        prefixes = getattr(forward_batch, "extend_prefix_lens_cpu", None) or [0]
        seen.add(forward_batch.forward_mode.name + (" behind prefixes" if any(prefixes) else ""))
        pool = type(self.pools.kv).__name__
        Path(os.environ[SEEN]).write_text(json.dumps({"batches": sorted(seen), "pool": pool}))

    batch.mix_with_running, batch.retract_decode = mixed, retracted
    backend.init_forward_metadata = describe
    importlib.import_module("sglang.srt.managers.scheduler").run_scheduler_process(
        *arguments, **others
    )


def decode(job: dict[str, Any], seen: Path) -> dict[str, Any]:
    """Start an engine and decode greedily, all prompts and then each again.

    Args:
        job: ``engine``, what it is given besides ``ENGINE``; ``prompts``; ``num_new`` of each;
            ``retracts``, whether requests give way to others now and then.
        seen: a file of the scheduler's.

    Returns:
        ``tokens`` of both times; ``cached``, tokens of prompts that were in the cache, likewise;
        ``batches``, their modes, and "retracted" if some were; ``pool``, the class of the cache.
    """
    kind: Any = importlib.import_module("sglang.srt.entrypoints.engine").Engine
    kind.run_scheduler_process_func = staticmethod(run_scheduler)
    os.environ |= {SEEN: str(seen), "SGLANG_TEST_RETRACT": str(job["retracts"])}
    engine = kind(**{**ENGINE, **job["engine"]})
    greedy = {"temperature": 0.0, "ignore_eos": True}
    params = [greedy | {"max_new_tokens": num_new} for num_new in job["num_new"]]
    first = engine.generate(input_ids=job["prompts"], sampling_params=params)
    again = [
        engine.generate(input_ids=prompt, sampling_params=of_prompt)
        for prompt, of_prompt in zip(job["prompts"], params, strict=True)
    ]
    engine.shutdown()
    return {
        "tokens": [out["output_ids"] for out in first],
        "again": [out["output_ids"] for out in again],
        "cached": [out["meta_info"]["cached_tokens"] for out in first],
        "cached_again": [out["meta_info"]["cached_tokens"] for out in again],
        **json.loads(seen.read_text()),
    }


def main(path: Path) -> None:
    """Do each job of a file, and write what came of them beside it."""
    os.environ |= ENVIRONMENT
    jobs = json.loads(path.read_text())
    results = [decode(job, path.with_suffix(".seen")) for job in jobs]
    path.with_suffix(".out").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
