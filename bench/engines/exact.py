"""Attention in float32 as a backend of vLLM, for what others are measured against.

One request after the other, without kernels of jitattn; its metadata are jitattn's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from bench.engines.vllm_session import EXACT_AS
from jitattn.integrations.vllm.backend import JitattnBackend, JitattnMetadataBuilder


def register() -> None:
    """Let vLLM know it."""
    register_backend(AttentionBackendEnum[EXACT_AS], f"{__name__}.ExactBackend")


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the causal attention of one request's last tokens.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_kv_heads, kv_len, head_dim].
        value: likewise.
        scale: multiplies scores.

    Returns:
        float32 [num_tokens, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, kv_len, _ = key.shape
    q = query.float().view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("tkgd,ksd->kgts", q, key.float()) * scale
    positions = torch.arange(kv_len, device=query.device)
    last = positions[kv_len - num_tokens :, None]
    scores.masked_fill_(positions > last, -torch.inf)
    out = torch.einsum("kgts,ksd->tkgd", scores.softmax(-1), value.float())
    return out.reshape(num_tokens, num_heads, head_dim)


class ExactImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of a layer without windows, caps and sinks."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: None,
        sliding_window: None,
        kv_cache_dtype: str,
        logits_soft_cap: None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Refuse all that a Llama has not."""
        if any((alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name)):
            raise ValueError("alibi_slopes, sliding_window, logits_soft_cap or sharing is given")
        if kv_cache_dtype != "auto" or attn_type != "decoder":
            raise ValueError(f"kv_cache_dtype is {kv_cache_dtype}, attn_type {attn_type}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write K and V; see ``jitattn.integrations.vllm.layer.Layer``."""
        del layer
        num_tokens, page_size = slot_mapping.shape[0], kv_cache.shape[2]
        # Slots of -1 are not written: they go where page 0 is, which vLLM gives to nobody.
        slots = slot_mapping.clamp(min=0)
        both = torch.cat((key[:num_tokens], value[:num_tokens]), dim=-1).to(kv_cache.dtype)
        kv_cache.transpose(1, 2)[slots // page_size, slots % page_size] = both

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; see ``jitattn.integrations.vllm.layer.Layer``."""
        del layer, key, value, output_scale, output_block_scale
        output.zero_()
        if attn_metadata is None:
            return output
        step, table = attn_metadata.step, attn_metadata.pages.table
        starts, lengths = step.qo_indptr.tolist(), step.seq_lens.tolist()
        page_size = kv_cache.shape[2]
        for row, kv_len in enumerate(lengths):
            begin, end = starts[row], starts[row + 1]
            if begin == end:
                continue
            pages = table[row, : -(-kv_len // page_size)].long()
            kv = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :kv_len]
            k, v = kv.split(self.head_size, dim=-1)
            output[begin:end] = attend(query[begin:end], k, v, self.scale).to(output.dtype)
        return output


class ExactMetadataBuilder(JitattnMetadataBuilder):
    """Batches without graphs: lengths are read on the host."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class ExactBackend(JitattnBackend):
    """The backend that takes the place of one that has no attention."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Return the member's name."""
        return EXACT_AS

    @staticmethod
    def get_impl_cls() -> type[ExactImpl]:
        """Return the class of layers."""
        return ExactImpl

    @staticmethod
    def get_builder_cls() -> type[ExactMetadataBuilder]:
        """Return the class that makes metadata."""
        return ExactMetadataBuilder
