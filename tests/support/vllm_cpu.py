"""vLLM's engine on the CPU, from the wheel for CUDA: scheduler, runner, layers, weights' loader.

    VLLM_USE_V2_MODEL_RUNNER=0 python -m tests.support.vllm_cpu JOB.json

It is a program, since vLLM asks once in a process where it runs. What its build for CPUs would
bring is here, in torch: a few operations. The newer model runner's kernels are Triton's, which
``TRITON_INTERPRET=1`` runs; the older one has others for CPUs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support import vllm_latent_ops

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# What an engine is started with, for prompts longer than a step's tokens.
ENGINE = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "enforce_eager": True,
    "compilation_config": {"mode": 0, "cudagraph_mode": "NONE", "custom_ops": ["none"]},
    "attention_config": {"backend": "CUSTOM"},
}


def gated(out: Tensor, x: Tensor, kind: str) -> None:
    gate, up = x.chunk(2, dim=-1)
    act = functional.silu if kind == "silu" else functional.gelu
    out.copy_(act(gate, **({"approximate": "tanh"} if kind == "gelu_tanh" else {})) * up)


def slots_of(starts: Tensor, positions: Tensor, table: Tensor, out: Tensor, size: int) -> None:
    out.fill_(-1)
    bounds = starts.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end > begin:
            at = positions[begin:end].long()
            out[begin:end] = table[row][at // size].long() * size + at % size


def define_operations() -> torch.library.Library:
    """Make the operations; they are there as long as what this returns is."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    for kind in ("silu", "gelu", "gelu_tanh"):
        library.define(f"{kind}_and_mul(Tensor(a!) out, Tensor x) -> ()")
        library.impl(f"{kind}_and_mul", lambda out, x, kind=kind: gated(out, x, kind), "CPU")
    library.define("greedy_argmax(Tensor logits) -> Tensor")  # of 0.33
    library.impl("greedy_argmax", lambda logits: logits.argmax(dim=-1), "CPU")
    name = "compute_slot_mapping_kernel_impl"
    library.define(f"{name}(Tensor q, Tensor p, Tensor t, Tensor(a!) out, int size) -> ()")
    library.impl(name, slots_of, "CPU")
    return library


def be_on_the_cpu() -> None:
    """Let vLLM take itself for its build for CPUs, and choose backends as its platforms do."""
    version = importlib.metadata.version

    def version_of(name: str) -> str:
        return version(name) + ("+cpu" if name == "vllm" else "")

    importlib.metadata.version = version_of
    if os.environ.get("TRITON_INTERPRET"):
        found: dict[str, Any] = importlib.import_module("triton.backends").backends
        nvidia = found["nvidia"]
        nvidia.driver.is_active = staticmethod(lambda: True)
        found.clear()
        found["cpu"] = nvidia
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    capability = importlib.import_module("vllm.platforms.interface").DeviceCapability(9, 0)

    def choose(cls: type, selected_backend: Any, attn_selector_config: Any, **others: Any) -> str:
        asked = attn_selector_config._asdict()
        chosen = selected_backend.get_class()
        reasons = chosen.validate_configuration(device_capability=capability, **asked)
        if reasons:
            raise ValueError(f"{selected_backend}: {reasons}")
        return ".".join(chosen.full_cls_name())

    platform.get_attn_backend_cls = classmethod(choose)
    take_latents(platform, capability)


def take_latents(platform: Any, capability: Any) -> None:
    """Let models with latents run as on a card: prompts in steps, prefixes from the cache."""
    update = platform.check_and_update_config.__func__

    def keep_steps(cls: type, config: Any) -> None:
        kept = (
            (config.scheduler_config, "enable_chunked_prefill"),
            (config.scheduler_config, "max_num_batched_tokens"),
            (config.cache_config, "enable_prefix_caching"),
            (config.cache_config, "block_size"),
        )
        values = [getattr(*one) for one in kept]
        update(cls, config)
        for one, value in zip(kept, values, strict=True):
            setattr(*one, value)

    platform.check_and_update_config = classmethod(keep_steps)
    selector = importlib.import_module("vllm.v1.attention.backends.mla.prefill.selector")

    def choose_prefill(config: Any) -> Any:
        """Return what the configuration names, which vLLM does not read for CPUs."""
        chosen = config.attention_config.mla_prefill_backend.get_class()
        dims = config.model_config.hf_text_config
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes = selector.MLADimensions(**{name: getattr(dims, name) for name in names})
        asked = selector.MLAPrefillSelectorConfig(config.model_config.dtype, sizes)
        if reasons := chosen.validate_configuration(capability, asked):
            raise ValueError(f"{chosen}: {reasons}")
        return chosen

    importlib.import_module(vllm_latent_ops.COMMON).get_mla_prefill_backend = choose_prefill
    vllm_latent_ops.install(SimpleNamespace(setattr=setattr))


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine and decode greedily, all prompts and then each again.

    Args:
        job: ``engine``, what ``LLM`` is given besides ``ENGINE``; ``prompts``; ``num_new``.

    Returns:
        ``tokens`` of both times; ``cached``, tokens of prompts that were in the cache the second
        time; ``runner``, "v1" or "v2"; ``attentions``, the backends of layers.
    """
    import vllm

    llm: Any = vllm.LLM(**{**ENGINE, **job["engine"]})
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["num_new"], ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    first = llm.generate(asked, params, use_tqdm=False)
    again = [llm.generate([one], params, use_tqdm=False)[0] for one in asked]
    (attentions,) = llm.apply_model(backends_of)
    is_new = llm.llm_engine.vllm_config.use_v2_model_runner
    return {
        "tokens": [list(out.outputs[0].token_ids) for out in first],
        "again": [list(out.outputs[0].token_ids) for out in again],
        "cached": [out.num_cached_tokens for out in again],
        "runner": "v2" if is_new else "v1",
        "attentions": attentions,
    }


def backends_of(model: Any) -> list[str]:
    layers = [m for m in model.modules() if hasattr(m, "attn_backend")]
    found = {m.attn_backend.__name__ for m in layers}
    return sorted(
        found | {type(m.prefill_backend).__name__ for m in layers if m.attn_backend.is_mla()}
    )


def main(path: Path) -> None:
    """Do each job of a file, and write what came of them beside it."""
    os.environ |= ENVIRONMENT
    library = define_operations()
    be_on_the_cpu()
    from jitattn.integrations.vllm import register

    register()
    results = [decode(job) for job in json.loads(path.read_text())]
    path.with_suffix(".out").write_text(json.dumps(results))
    del library


if __name__ == "__main__":
    main(Path(sys.argv[1]))
