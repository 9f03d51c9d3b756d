"""nano-vllm's model on the CPU, where its engine does not run.

Weights, layers, its context of a step and its calls of flash-attn are nano-vllm's own; steps are
made here, and its Triton kernel that writes K and V by slots is a copy by index.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import nano


def store_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[slots.long()] = new


@contextmanager
def model_of(folder: Path, calls: nano.Calls, num_blocks: int, *, compiled: bool) -> Iterator[Any]:
    """A model with a cache, whose attention makes ``calls``."""
    import transformers

    nano.import_engine(compiled=compiled)
    layer: Any = importlib.import_module("nanovllm.layers.attention")
    layer.flash_attn_varlen_func = calls.flash_attn_varlen_func
    layer.flash_attn_with_kvcache = calls.flash_attn_with_kvcache
    layer.store_kvcache = store_kvcache
    config = transformers.AutoConfig.from_pretrained(folder)
    default = torch.get_default_dtype()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", world_size=1, rank=0
    )
    try:
        torch.set_default_dtype(config.dtype)
        model = importlib.import_module("nanovllm.models.qwen3").Qwen3ForCausalLM(config)
        importlib.import_module("nanovllm.utils.loader").load_model(model, str(folder))
        shape = (2, nano.NUM_LAYERS, num_blocks, nano.BLOCK, nano.KV_HEADS, nano.HEAD_DIM)
        k_caches, v_caches = torch.zeros(shape)
        attentions = [m for m in model.modules() if isinstance(m, layer.Attention)]
        for module, k_cache, v_cache in zip(attentions, k_caches, v_caches, strict=True):
            module.k_cache, module.v_cache = k_cache, v_cache
        yield model
    finally:
        torch.set_default_dtype(default)
        torch.distributed.destroy_process_group()


@dataclass
class Request:
    """Tokens, how many of them are in the cache, and the blocks they are in."""

    tokens: list[int]
    blocks: list[int]
    num_cached: int = 0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def found(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def slots(self) -> list[int]:
        """Of the tokens that are not cached."""
        places = range(self.num_cached, len(self.tokens))
        return [self.blocks[n // nano.BLOCK] * nano.BLOCK + n % nano.BLOCK for n in places]


@torch.no_grad()
def step(model: Any, requests: list[Request]) -> None:
    """Append the best next token to each of some requests, by prefill or by decode."""
    context: Any = importlib.import_module("nanovllm.utils.context")

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    new = [request.tokens[request.num_cached :] for request in requests]
    positions = [range(request.num_cached, len(request.tokens)) for request in requests]
    lens = [len(request.tokens) for request in requests]
    width = max(len(request.blocks) for request in requests)
    rows = [request.blocks + [-1] * (width - len(request.blocks)) for request in requests]
    tables = torch.tensor(rows, dtype=torch.int32)
    given: dict[str, Any] = {"slot_mapping": ints([s for r in requests for s in r.slots])}
    is_prefill = any(not request.found for request in requests)
    if is_prefill:
        q_lens = [len(tokens) for tokens in new]
        for name, counts in (("q", q_lens), ("k", lens)):
            given[f"cu_seqlens_{name}"] = ints([0, *torch.tensor(counts).cumsum(0).tolist()])
            given[f"max_seqlen_{name}"] = max(counts)
        if any(request.num_cached for request in requests):
            given["block_tables"] = tables
    else:
        given |= {"context_lens": ints(lens), "block_tables": tables}
    context.set_context(is_prefill, **given)
    hidden = model(
        torch.tensor([token for tokens in new for token in tokens]),
        torch.tensor([place for places in positions for place in places]),
    )
    best = model.compute_logits(hidden).argmax(-1).tolist()
    context.reset_context()
    for request, token in zip(requests, best, strict=True):
        request.num_cached = len(request.tokens)
        request.tokens.append(token)
