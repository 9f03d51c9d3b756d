"""A small Qwen3 in nano-vllm, whose attention is jitattn's or torch's, and what it decodes.

nano-vllm imports ``flash_attn``; a module of that name with jitattn's two functions stands for it.
Tokens of one run can be forced upon another, whose logits are then comparable step by step.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from jitattn.compat import flash_attn
from jitattn.spec.config import PlannerConfig

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 256
NUM_LAYERS, VOCABULARY, MAX_LEN, MAX_REQUESTS = 3, 512, 1024, 32
THETA = 10000.0


def make_checkpoint(folder: Path, dtype: str) -> None:
    """Write a model with random weights, scaled so that tokens vary."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    model.save_pretrained(folder)


def prompts_of(num_requests: int) -> list[list[int]]:
    """Of 3 to 700 tokens; every third begins with the same two blocks."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
        return found

    prefix = tokens(2 * BLOCK)
    lengths = torch.randint(3, 700, (num_requests,), generator=generator).tolist()
    return [
        prefix + tokens(n % 200 + 1) if i % 3 == 0 else tokens(n) for i, n in enumerate(lengths)
    ]


# --- attention ------------------------------------------------------------------------------------


class Calls:
    """The two functions that nano-vllm calls, and how often it does."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def flash_attn_varlen_func(self, *tensors: Tensor, **given: Any) -> Tensor:
        self.counts["prefill" if given["block_table"] is None else "prefix"] += 1
        return self.prefill(*tensors, **given)

    def flash_attn_with_kvcache(self, *tensors: Tensor, **given: Any) -> Tensor:
        self.counts["decode"] += 1
        return self.decode(*tensors, **given)

    def prefill(self, *tensors: Tensor, **given: Any) -> Tensor:
        raise NotImplementedError

    def decode(self, *tensors: Tensor, **given: Any) -> Tensor:
        raise NotImplementedError


class JitAttn(Calls):
    """jitattn's."""

    def prefill(self, *tensors: Tensor, **given: Any) -> Tensor:
        found = flash_attn.flash_attn_varlen_func(*tensors, **given)
        assert isinstance(found, Tensor)
        return found

    def decode(self, *tensors: Tensor, **given: Any) -> Tensor:
        found = flash_attn.flash_attn_with_kvcache(*tensors, **given)
        assert isinstance(found, Tensor)
        return found


class Torch(Calls):
    """torch's, over gathered keys and values; in ``dtype``, unless None, the model's."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def prefill(self, *tensors: Tensor, **given: Any) -> Tensor:
        q, k, v = tensors
        assert given["causal"]
        starts, ends = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
        table, outs = given["block_table"], []
        for i in range(len(starts) - 1):
            length = ends[i + 1] - ends[i]
            if table is None:
                keys, values = (x[ends[i] : ends[i + 1]] for x in (k, v))
            else:
                blocks = table[i, : -(-length // BLOCK)].long()
                keys, values = (x[blocks].flatten(0, 1)[:length] for x in (k, v))
            own = q[starts[i] : starts[i + 1]]
            shape = own.shape[0], length
            seen = torch.ones(shape, dtype=torch.bool, device=q.device).tril(length - own.shape[0])
            outs.append(self._attend(own[None], keys[None], values[None], seen, given)[0])
        return torch.cat(outs)

    def decode(self, *tensors: Tensor, **given: Any) -> Tensor:
        """Attend over whole tables, so that a graph may replay it with other lengths."""
        q, k_cache, v_cache = tensors
        table, lens = given["block_table"].clamp(min=0).long(), given["cache_seqlens"]
        places = torch.arange(table.shape[1] * BLOCK, device=q.device)
        seen = places < lens[:, None]
        k, v = (
            torch.where(seen[..., None, None], cache[table].flatten(1, 2), 0)
            for cache in (k_cache, v_cache)
        )
        out = self._attend(q, k, v, seen[:, None, None], given)
        return out.masked_fill((lens <= 0)[:, None, None, None], 0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, given: Any) -> Tensor:
        parts = (x.transpose(1, 2).to(self.dtype or q.dtype) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=given["softmax_scale"], enable_gqa=True
        )
        return out.transpose(1, 2).to(q.dtype)


# --- the engine -----------------------------------------------------------------------------------


def import_engine(*, compiled: bool = False) -> ModuleType:
    """Import nano-vllm anew with a stand-in for flash-attn.

    Its norms, rotation, activation and sampler are functions of ``torch.compile`` only if asked
    for, since that is slow.
    """
    stand_in = ModuleType("flash_attn")
    vars(stand_in).update(
        flash_attn_varlen_func=flash_attn.flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn.flash_attn_with_kvcache,
    )
    sys.modules.setdefault("flash_attn", stand_in)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nanovllm"]:
        del sys.modules[name]
    plain = mock.patch.object(torch, "compile", lambda function: function)
    with nullcontext() if compiled else plain:
        engine = importlib.import_module("nanovllm")
    model = importlib.import_module("nanovllm.models.qwen3")
    rope_of = importlib.import_module("nanovllm.layers.rotary_embedding").get_rope

    def get_rope(*sizes: int, rotary_dim: int, max_position: int, **others: object) -> object:
        return rope_of(*sizes, rotary_dim, max_position, THETA)  # newer configs have a dict

    model.get_rope = get_rope  # type: ignore[attr-defined]
    return engine


@dataclass
class Run:
    """What an engine decoded.

    Attributes:
        logits: of each step, [requests of the step, vocabulary] float32 on the CPU.
        chosen: of each step, the tokens that it went on with.
        tokens: of each request.
        counts: how often attention was called, and graphs were replayed.
    """

    logits: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Sampler:
    """Takes the best token, or those of another run."""

    def __init__(self, run: Run, forced: Sequence[Tensor] | None) -> None:
        self.run, self.forced = run, forced

    def __call__(self, logits: Tensor, *others: object, **named: object) -> Tensor:
        step = len(self.run.chosen)
        best = logits.argmax(-1) if self.forced is None else self.forced[step]
        self.run.logits.append(logits.float().cpu())
        self.run.chosen.append(best.cpu())
        return self.run.chosen[-1]


@contextmanager
def engine_of(
    folder: Path,
    calls: Calls,
    *,
    compiled: bool = False,
    prepare: Callable[[], None] = lambda: None,
    enforce_eager: bool = False,
) -> Iterator[Any]:
    """An engine, with graphs unless eager, whose attention makes ``calls``.

    ``prepare`` is called when it is imported.
    """
    nano = import_engine(compiled=compiled)
    prepare()
    layer: Any = importlib.import_module("nanovllm.layers.attention")
    layer.flash_attn_varlen_func = calls.flash_attn_varlen_func
    layer.flash_attn_with_kvcache = calls.flash_attn_with_kvcache
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda tokens: "")
    dtype = torch.get_default_dtype()
    try:
        engine = nano.LLM(
            str(folder),
            tokenizer=tokenizer,
            max_num_batched_tokens=4 * MAX_LEN,
            max_num_seqs=MAX_REQUESTS,
            max_model_len=MAX_LEN,
            gpu_memory_utilization=0.03,
            enforce_eager=enforce_eager,
        )
        atexit.unregister(engine.exit)
        yield engine
        engine.exit()
    finally:
        # What an engine leaves that fails while it begins, or decodes.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


def decode(
    folder: Path,
    calls: Calls,
    prompts: list[list[int]],
    num_new: int,
    forced: Sequence[Tensor] | None = None,
    **of_engine: Any,
) -> Run:
    """Decode greedily, or along the tokens of another run, in ``engine_of``."""
    run = Run()
    with engine_of(folder, calls, **of_engine) as engine:
        runner = engine.model_runner
        run.counts["graphs"] = len(getattr(runner, "graphs", ()))
        run.counts["decode while capturing"] = calls.counts["decode"]
        runner.sampler = Sampler(run, forced)
        params = importlib.import_module("nanovllm").SamplingParams(
            max_tokens=num_new, ignore_eos=True
        )
        found = engine.generate(prompts, params, use_tqdm=False)
        run.tokens = [each["token_ids"] for each in found]
    run.counts.update(calls.counts)
    return run


def gpu_configs() -> list[PlannerConfig]:
    """What tests/gpu/test_nano_vllm.py launches, for a bundle."""
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return [
        PlannerConfig(**heads, **dtypes, page_size=page_size, page_table=page_table)
        for dtypes in ({}, {"q_dtype": "float16", "kv_dtype": "float16"})
        for page_size, page_table in ((BLOCK, "shared"), (None, "ragged"))
    ]
