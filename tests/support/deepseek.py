"""A DeepSeek-V2-Lite-shaped model of transformers with random weights, through `MLAPlanner`.

The model's own attention multiplies latents out to keys and values of every head. Here it doesn't:
queries are multiplied with the projection of keys, and outputs with that of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.spec.config import MLAConfig

PAGE_SIZE = 16
NUM_HEADS = 16
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64


def gpu_configs() -> list[MLAConfig | PreprocessConfig]:
    """What tests/gpu/test_deepseek.py launches, for a bundle: latents are K, and rope parts V."""
    attention = MLAConfig(
        num_heads=NUM_HEADS,
        kv_lora_rank=KV_LORA_RANK,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM,
        page_size=PAGE_SIZE,
    )
    writer = PreprocessConfig(
        head_dim=KV_LORA_RANK, head_dim_vo=QK_ROPE_HEAD_DIM, page_size=PAGE_SIZE, pairing="none"
    )
    return [attention, writer]


def make_model(device: str, num_layers: int) -> Any:
    """The attention of DeepSeek-V2-Lite, in a smaller model."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        q_lora_rank=None,
        kv_lora_rank=KV_LORA_RANK,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        initializer_range=0.08,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return DeepseekV2ForCausalLM(config).to(device, torch.bfloat16).eval()


@dataclass
class Latents:
    """The caches of a model's layers, and the batch that they are read for."""

    caches: list[Tensor]
    table: Tensor
    planner: jitattn.MLAPlanner
    lengths: Tensor  # of all requests
    requests: slice = field(default_factory=lambda: slice(0, 0))
    plan: jitattn.types.MLAPlan | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(cls, model: Any, num_requests: int, most_tokens: int) -> Latents:
        """Empty ones, whose pages are dealt at random."""
        device = str(model.device)
        pages = -(-most_tokens // PAGE_SIZE)
        ids = torch.randperm(num_requests * pages, dtype=torch.int32)
        width = KV_LORA_RANK + QK_ROPE_HEAD_DIM
        planner = jitattn.MLAPlanner(
            sm_scale=model.model.layers[0].self_attn.scaling,
            num_heads=NUM_HEADS,
            kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=QK_ROPE_HEAD_DIM,
            page_size=PAGE_SIZE,
            device=device,
        )
        shape = (num_requests * pages, PAGE_SIZE, width)
        caches = [
            torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
            for _ in model.model.layers
        ]
        table = ids.view(num_requests, pages).to(device)
        return cls(caches, table, planner, torch.zeros(num_requests, dtype=torch.int32).to(device))

    def begin(self, requests: slice, q_len: int) -> Tensor:
        """Plan a step of so many new tokens each; the positions of these."""
        self.requests = requests
        self.lengths[requests] += q_len
        lengths = self.lengths[requests]
        count = lengths.shape[0]
        self.offsets = torch.arange(count + 1, dtype=torch.int32, device=lengths.device) * q_len
        self.plan = self.planner.plan(self.pages(), lengths, self.offsets, max_q_len=q_len)
        steps = torch.arange(q_len, device=lengths.device)
        return lengths.long()[:, None] - q_len + steps

    def pages(self) -> jitattn.BlockTable:
        return jitattn.BlockTable(self.table[self.requests])

    def attend(self, layer: int, q: Tensor, q_pe: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """Append the tokens of a layer, and attend to all of their requests."""
        cache, rank = self.caches[layer], latent.shape[-1]
        assert self.plan is not None
        jitattn.append_kv(
            latent.unsqueeze(1),
            rope.unsqueeze(1),
            (cache[..., None, :rank], cache[..., None, rank:]),
            pages=self.pages(),
            seq_lens=self.lengths[self.requests],
            qo_indptr=self.offsets,
        )
        out = self.plan.run(q, q_pe, cache)
        assert isinstance(out, Tensor)
        return out


@contextmanager
def attention_through(latents: Latents) -> Iterator[None]:
    """Have the attention of every layer read and write ``latents``."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek

    def forward(
        self: Any, hidden_states: Tensor, *, position_embeddings: Tensor, **_: object
    ) -> tuple[Tensor, None]:
        batch_size, q_len = hidden_states.shape[:2]
        heads, rank = self.num_heads, self.kv_lora_rank
        q = self.q_proj(hidden_states).view(batch_size, q_len, heads, -1).transpose(1, 2)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, rope = self.kv_a_proj_with_mqa(hidden_states).split([rank, q_pe.shape[-1]], dim=-1)
        q_pe, rope = deepseek.apply_rotary_emb(q_pe, rope.unsqueeze(1), position_embeddings)
        latent = self.kv_a_layernorm(latent)
        weight = self.kv_b_proj.weight.view(heads, -1, rank)
        of_keys, of_values = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        num_tokens = batch_size * q_len
        out = latents.attend(
            self.layer_idx,
            torch.einsum("bhsd,hdr->bshr", q_nope, of_keys).reshape(num_tokens, heads, rank),
            q_pe.transpose(1, 2).reshape(num_tokens, heads, -1),
            latent.reshape(num_tokens, rank),
            rope.reshape(num_tokens, -1),
        )
        values = torch.einsum("thr,hvr->thv", out, of_values)
        return self.o_proj(values.reshape(batch_size, q_len, -1)), None

    with mock.patch.object(deepseek.DeepseekV2Attention, "forward", forward):
        yield


@torch.no_grad()
def check_tokens(device: str, *, num_layers: int, lengths: tuple[int, ...], num_new: int) -> int:
    """Follow eager's greedy tokens, and compare what follows each; how many were compared.

    Another token is taken for the same where eager's logits of both differ by less than bfloat16
    rounds logits of their size.
    """
    model = make_model(device, num_layers)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(512, (n,), generator=generator).to(device) for n in lengths]
    wanted = [
        model.generate(p[None], max_new_tokens=num_new, do_sample=False, use_cache=True)[0]
        for p in prompts
    ]
    eager = [model(tokens[None], use_cache=False).logits[0].float() for tokens in wanted]
    latents = Latents.of(model, len(prompts), max(lengths) + num_new)
    found: list[list[Tensor]] = [[] for _ in prompts]
    with attention_through(latents):
        for b, prompt in enumerate(prompts):
            positions = latents.begin(slice(b, b + 1), prompt.shape[0])
            found[b].append(
                model(prompt[None], position_ids=positions, use_cache=False).logits[0, -1]
            )
        for step in range(num_new - 1):
            tokens = torch.stack([w[n + step] for w, n in zip(wanted, lengths, strict=True)])
            positions = latents.begin(slice(0, len(prompts)), 1)
            logits = model(tokens[:, None], position_ids=positions, use_cache=False).logits[:, 0]
            for b, row in enumerate(logits):
                found[b].append(row)
    are_same = [
        compare(row.float(), want[length - 1 + step])
        for rows, want, length in zip(found, eager, lengths, strict=True)
        for step, row in enumerate(rows)
    ]
    assert len({int(w[-1]) for w in wanted}) > 1, "the tokens of a useless model don't vary"
    assert sum(are_same) >= 0.9 * len(are_same)
    return len(are_same)


def compare(found: Tensor, want: Tensor) -> bool:
    """Whether the best token is the same; else eager's logits of both must be close."""
    size = float(want.abs().max())
    # What bfloat16 makes of a few layers.
    assert float((found - want).abs().max()) <= 2**-4 * size
    best = int(found.argmax())
    assert float(want.max() - want[best]) <= 2**-6 * size
    return best == int(want.argmax())
