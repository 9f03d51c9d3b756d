"""What vLLM's common code of latent attention calls of its compiled parts, in torch for the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COMMON = "vllm.model_executor.layers.attention.mla_attention"


def gather(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Tensor,
    seq_starts: Tensor,
) -> None:
    """Copy a chunk of each request's tokens out of the cache, as values."""
    rows = token_to_seq[: int(num_tokens)].long()
    places = torch.arange(len(rows)) - cu_seq_lens[rows] + seq_starts[rows]
    pages = block_table[rows, places // src_cache.shape[1]].long()
    found = src_cache[pages, places % src_cache.shape[1]].float()
    dst[: len(rows)] = found * scale if kv_cache_dtype.startswith("fp8") else found


def merge(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    """Merge two states with natural lse of [num_heads, num_tokens], some tokens' or all."""
    end = output.shape[0] if prefill_tokens_with_context is None else prefill_tokens_with_context
    lses = torch.stack([prefix_lse, suffix_lse])
    merged = torch.logsumexp(lses.double(), dim=0)
    parts = torch.exp(lses - merged.masked_fill(merged == -torch.inf, 0)).transpose(1, 2)
    outs = torch.stack([prefix_output, suffix_output]).double()
    found = (outs * parts[..., None]).sum(0)
    output[:end], output[end:] = found[:end].to(output.dtype), suffix_output[end:]
    if output_lse is not None:
        output_lse[:, :end], output_lse[:, end:] = merged[:, :end].float(), suffix_lse[:, end:]


def mask_empty(lse: Tensor, output: Tensor, starts: Tensor, context_starts: Tensor) -> None:
    """Give rows of requests without keys in a chunk out 0 and lse -inf."""
    lens = starts.diff().long()
    is_empty = torch.repeat_interleave(context_starts.diff() == 0, lens)
    output[is_empty], lse[:, is_empty] = 0.0, -torch.inf


def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make host memory that no card reads."""

    def call(*given: Any, pin_memory: bool = False, **others: Any) -> Tensor:
        del pin_memory
        return make(*given, **others)

    return call


class Platform:
    """VLLM's platform, which is no CPU for its common code: that gathers 16 bits alone there."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False


def install(patch: Any) -> None:
    """Replace them by ``patch.setattr``, of a MonkeyPatch or one like it."""
    common, ops = (importlib.import_module(name) for name in (COMMON, "vllm._custom_ops"))
    patch.setattr(ops, "gather_and_maybe_dequant_cache", gather)
    patch.setattr(common, "current_platform", Platform(common.current_platform))
    patch.setattr(common, "merge_attn_states", merge)
    if hasattr(common, "mask_empty_context"):
        patch.setattr(common, "mask_empty_context", mask_empty)
    if hasattr(common, "PIN_MEMORY"):
        for module in (common, importlib.import_module("vllm.utils.torch_utils")):
            patch.setattr(module, "PIN_MEMORY", False)
    else:
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, unpinned(getattr(torch, name)))
