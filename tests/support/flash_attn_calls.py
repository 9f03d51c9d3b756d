"""Calls of functions that plan for themselves, over tensors that other steps overwrite in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import jitattn
from jitattn.compat import flash_attn, flashinfer
from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.spec.config import MLAConfig, PlannerConfig

BATCH, HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 8, 2, 128, 64, 40
WIDTH = 8  # pages of a request
LATENT, ROPE, LATENT_HEADS, LATENT_PAGE = 512, 64, 4, 4
LENS = ((70, 0, 500, 3), (1, 511, 2, 0), (200, 63, 64, 65))
"""Tokens of each request at each step, those of the step not counted; 0 is none or padding."""


@dataclass(frozen=True)
class Function:
    """One kind of call, of requests with at most ``max_q_len`` query tokens."""

    max_q_len: int
    call: Callable[[Tensors], Tensor | tuple[Tensor, ...]]


class Tensors:
    """What a call reads, and what it writes besides its result."""

    def __init__(self, max_q_len: int, device: str) -> None:
        generator = torch.Generator().manual_seed(max_q_len)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.max_q_len = max_q_len
        self.q = random(BATCH, max_q_len, HEADS, HEAD_DIM)
        self.k, self.v = (random(BATCH, max_q_len, KV_HEADS, HEAD_DIM) for _ in "kv")
        self.k_cache, self.v_cache = (random(PAGES, PAGE, KV_HEADS, HEAD_DIM) for _ in "kv")
        self.latents = random(BATCH * 130, LATENT_PAGE, LATENT + ROPE)
        self.q_latent = random(BATCH, 1, LATENT_HEADS, LATENT + ROPE)
        order = torch.randperm(PAGES, generator=generator)[: BATCH * WIDTH]
        self.table = order.view(BATCH, WIDTH).int().to(device)
        self.latent_table = (
            torch.randperm(BATCH * 130, generator=generator).view(BATCH, 130).int().to(device)
        )
        self.workspace = torch.zeros(1, dtype=torch.uint8, device=device)
        self.lens, self.all_lens = ints(BATCH), ints(BATCH)
        self.qo_indptr, self.kv_indptr = ints(BATCH + 1), ints(BATCH + 1)

    def set_step(self, step: int) -> None:
        """Overwrite lengths and offsets; requests have 1 to ``max_q_len`` query tokens."""
        lens = torch.tensor(LENS[step], dtype=torch.int32)
        q_lens = 1 + (torch.arange(BATCH) + step) % self.max_q_len
        self.lens.copy_(lens)
        self.all_lens.copy_((lens + q_lens).clamp(max=WIDTH * PAGE))
        self.qo_indptr[1:].copy_(q_lens.cumsum(0))
        self.kv_indptr[1:].copy_(self.all_lens.cumsum(0))

    def parts(self) -> Mapping[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def copy_from(self, other: Tensors) -> None:
        for name, tensor in self.parts().items():
            tensor.copy_(other.parts()[name])


def _appending(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    lens = t.lens.clamp(max=WIDTH * PAGE - t.max_q_len)
    return flash_attn.flash_attn_with_kvcache(
        t.q, t.k_cache, t.v_cache, t.k, t.v, cache_seqlens=lens, block_table=t.table,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip


def _cached(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    return flash_attn.flash_attn_with_kvcache(
        t.q, t.k_cache, t.v_cache, cache_seqlens=t.lens, block_table=t.table, causal=True
    )


def _rows(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    k, v = (x.view(5, WIDTH * PAGE, KV_HEADS, HEAD_DIM)[:BATCH] for x in (t.k_cache, t.v_cache))
    return flash_attn.flash_attn_with_kvcache(t.q, k, v, cache_seqlens=t.lens, causal=True)


def _varlen(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    return flash_attn.flash_attn_varlen_func(
        t.q.flatten(0, 1), t.k_cache, t.v_cache, t.qo_indptr, t.kv_indptr,
        t.max_q_len, WIDTH * PAGE, causal=True, block_table=t.table, return_attn_probs=True,
    )[:2]  # fmt: skip


def _ragged(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    k, v = (x.flatten(0, 1) for x in (t.k_cache, t.v_cache))
    return flash_attn.flash_attn_varlen_func(
        t.q.flatten(0, 1), k, v, t.qo_indptr, t.kv_indptr, t.max_q_len, WIDTH * PAGE, causal=True
    )


def _attention(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    cache = t.k_cache, t.v_cache
    return jitattn.attention(t.q[:, 0], cache, jitattn.BlockTable(t.table), t.lens)


def _trtllm(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    return flashinfer.trtllm_batch_decode_with_kv_cache(
        t.q[:, 0], (t.k_cache, t.v_cache), t.workspace, t.table, t.lens, WIDTH * PAGE,
        bmm1_scale=HEAD_DIM**-0.5, kv_layout="NHD",
    )  # fmt: skip


def _trtllm_latents(t: Tensors) -> Tensor | tuple[Tensor, ...]:
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        t.q_latent, t.latents, t.workspace, 128, LATENT, ROPE, t.latent_table,
        t.lens, 130 * LATENT_PAGE, bmm1_scale=0.1,
    )  # fmt: skip


FUNCTIONS = {
    "new token": Function(1, _appending),
    "new tokens": Function(3, _appending),
    "cached": Function(1, _cached),
    "rows of a cache": Function(1, _rows),
    "chunks over blocks": Function(40, _varlen),
    "chunks without blocks": Function(40, _ragged),
    "attention": Function(1, _attention),
    "trtllm": Function(1, _trtllm),
    "trtllm latents": Function(1, _trtllm_latents),
}


def results(function: Function, tensors: Tensors) -> list[Tensor]:
    """What a call returns, as a list."""
    found = function.call(tensors)
    return [found] if isinstance(found, Tensor) else list(found)


def gpu_configs() -> list[PlannerConfig | PreprocessConfig | MLAConfig]:
    """What tests/gpu/test_flash_attn.py launches, for a bundle."""
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return [
        PlannerConfig(**heads, page_size=PAGE),
        PlannerConfig(**heads, page_size=None, page_table="ragged"),
        PreprocessConfig(head_dim=HEAD_DIM, page_size=PAGE, pairing="none"),
        MLAConfig.from_arguments(
            {"sm_scale": 0.1, "num_heads": LATENT_HEADS, "page_size": LATENT_PAGE}
        ),
    ]
