"""One engine of vLLM in this process: what it is made of, decodes, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines import llama
from bench.engines.agreement import Greedy
from bench.engines.prompts import LIMITS, Prompts, Workload

GRAPHS: Mapping[str, Mapping[str, object]] = {
    "decode": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "breakable": {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "compiled": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "none": {"mode": 0, "cudagraph_mode": "NONE"},
}
"""vLLM's compilation_config: graphs of decode batches, also of what lies between the attention of
others (with VLLM_USE_BREAKABLE_CUDAGRAPH=1), that and torch.compile, and eager calls alone."""

EXACT, EXACT_AS = "EXACT", "NO_ATTENTION"
"""Attention in float32, and the name among vLLM's that it is registered as."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an engine is started with, but for its attention.

    Attributes:
        model: a name in ``llama.SIZES``.
        folder: that holds the model's config.json.
        graphs: a name in ``GRAPHS``.
        num_layers: in place of the model's, or None.
        kv_bytes: of the cache.
        block_size: tokens of a page, or None for vLLM's choice.
    """

    model: str
    folder: Path
    graphs: str = "decode"
    num_layers: int | None = None
    kv_bytes: int = 20 << 30
    block_size: int | None = None

    def sizes(self) -> dict[str, int]:
        """Return the model's sizes."""
        sizes = dict(llama.SIZES[self.model])
        if self.num_layers is not None:
            sizes["num_hidden_layers"] = self.num_layers
        return sizes

    def arguments(self, name: str) -> dict[str, Any]:
        """Return what vLLM's ``LLM`` is given.

        Args:
            name: vLLM's name of an attention backend, "CUSTOM" being jitattn, or "EXACT"; behind a
                colon vLLM's ``kv_cache_dtype``.
        """
        backend, _, kv_dtype = name.partition(":")
        max_length, max_tokens, max_requests = LIMITS[self.model]
        powers = [1 << i for i in range(max_requests.bit_length()) if 1 << i <= max_requests]
        graphs = dict(GRAPHS[self.graphs])
        if self.graphs != "none":
            graphs["cudagraph_capture_sizes"] = sorted({*powers, 3 * max_requests // 4})
        return {
            "model": str(self.folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "seed": 0,
            "kv_cache_dtype": kv_dtype or "auto",
            "kv_cache_memory_bytes": self.kv_bytes,
            "gpu_memory_utilization": 0.1,  # that must be free; kv_bytes decides
            "max_model_len": max_length,
            "max_num_batched_tokens": max_tokens,
            "max_num_seqs": max_requests,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "enforce_eager": self.graphs == "none",
            "compilation_config": graphs,
            "attention_config": {"backend": EXACT_AS if backend == EXACT else backend},
            **({} if self.block_size is None else {"block_size": self.block_size}),
        }


class Session:
    """An engine that decodes."""

    def __init__(self, name: str, setting: Setting, llm: Any = None) -> None:
        """Start it and fill its weights.

        Args:
            name: as of ``Setting.arguments``.
            setting: what else it is started with.
            llm: what stands for vLLM's ``LLM``.
        """
        self.name, self.setting = name, setting
        started = time.perf_counter()
        if llm is None:
            import vllm

            llm = vllm.LLM(**setting.arguments(name))
        self._llm = llm
        self._llm.apply_model(llama.fill)
        self.start_s = time.perf_counter() - started

    def facts(self) -> dict[str, object]:
        """Return what vLLM made of the setting."""
        config = self._llm.llm_engine.vllm_config
        (found,) = self._llm.apply_model(attentions)
        return {
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "compilation_mode": str(config.compilation_config.mode),
            "runner": "v2" if config.use_v2_model_runner else "v1",
            "block_size": config.cache_config.block_size,
            "num_pages": config.cache_config.num_gpu_blocks,
            "attentions": found,
            "start_s": self.start_s,
        }

    def _generate(self, prompts: Prompts, **params: Any) -> list[Any]:
        import vllm

        params = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **params}
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return list(self._llm.generate(asked, vllm.SamplingParams(**params), use_tqdm=False))

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._llm.reset_prefix_cache()

    def greedy(self, prompts: Prompts, num_new: int) -> list[Greedy]:
        """Decode greedily."""
        found = []
        for out in self._generate(prompts, max_tokens=num_new, logprobs=2):
            one = out.outputs[0]
            best, second = [], []
            for token, row in zip(one.token_ids, one.logprobs, strict=True):
                best.append(row[token].logprob)
                second.append(max(p.logprob for t, p in row.items() if t != token))
            found.append(Greedy(list(one.token_ids), best, second, out.num_cached_tokens or 0))
        return found

    def forced(self, prompts: Prompts, tokens: Prompts) -> list[list[float]]:
        """Return the logarithmic probabilities of ``tokens`` after ``prompts``."""
        whole = [prompt + more for prompt, more in zip(prompts, tokens, strict=True)]
        found = []
        for out, more in zip(
            self._generate(whole, max_tokens=1, prompt_logprobs=0), tokens, strict=True
        ):
            rows = out.prompt_logprobs[-len(more) :]
            found.append([row[token].logprob for token, row in zip(more, rows, strict=True)])
        return found

    def seconds(self, workload: Workload, prompts: Prompts, num_new: int | None = None) -> float:
        """Return how long a batch takes, from the call to the last token, without cached prefixes.

        Args:
            workload: the batch.
            prompts: its tokens.
            num_new: instead of the workload's.
        """
        self.forget()
        wanted = workload.num_new if num_new is None else num_new
        started = time.perf_counter()
        outs = self._generate(prompts, max_tokens=wanted)
        elapsed = time.perf_counter() - started
        lengths = {len(out.outputs[0].token_ids) for out in outs}
        if lengths != {wanted} or len(outs) != len(prompts):
            raise RuntimeError(f"{len(outs)} requests have {sorted(lengths)} new tokens")
        return elapsed


def attentions(model: Any) -> dict[str, int]:
    """Return how many layers attend through which backend and version of FlashAttention."""
    found: dict[str, int] = {}
    for module in model.modules():
        backend = getattr(module, "attn_backend", None)
        if backend is None:
            continue
        version = getattr(getattr(module, "impl", None), "vllm_flash_attn_version", "")
        name = f"{backend.__name__}{version}"
        found[name] = found.get(name, 0) + 1
    return found
