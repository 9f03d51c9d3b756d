"""A step of each well-known model, on the CPU, asks for no kernel beside those of its bundle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.bundles.model_config import Model, model_of
from jitattn.bundles.model_kernels import Serving, needs_of
from jitattn.kernels.registry import specs_of
from tests.support.asked import ARCH, Asked
from tests.support.model_configs import MODELS

NUM_TOKENS = 3
LENGTHS = torch.tensor([NUM_TOKENS], dtype=torch.int32)
OFFSETS = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)


@pytest.mark.parametrize("table", ["shared", "separate"])
@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith(("deepseek", "glm-5"))]
)
def test_a_step_finds_its_kernels(name: str, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(MODELS[name])
    asked = Asked(monkeypatch)
    dtype = getattr(torch, model.dtype)
    width = model.num_qo_heads + 2 * model.num_kv_heads
    for has_bias in model.biases:
        run(model, MODELS[name], torch.zeros(NUM_TOKENS, width * model.head_dim, dtype=dtype),
            table, has_bias)  # fmt: skip
    assert not missing(asked, model)


def run(model: Model, fields: dict[str, Any], qkv: Tensor, table: str, has_bias: bool) -> None:
    """Take tokens in, by pages and by slots, then attend, once for each kind of layer."""
    shape = (2, 2, 16, model.num_kv_heads, model.head_dim)
    kv_cache = torch.zeros(shape, dtype=qkv.dtype)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    pages = jitattn.BlockTable(ids if table == "shared" else torch.stack((ids, ids + 1), 1))
    slots = torch.arange(NUM_TOKENS, dtype=torch.int32)
    heads = (model.num_qo_heads, model.num_kv_heads, model.head_dim)
    norm = torch.ones(model.head_dim, dtype=qkv.dtype) if model.norms[0] else None
    given: dict[str, Any] = {
        "num_qo_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": heads[2],
        "bias": torch.zeros(qkv.shape[1], dtype=qkv.dtype) if has_bias else None,
        "q_norm": norm,
        "k_norm": norm,
        "rope": jitattn.Rope.from_hf_config(fields),
        "seq_lens": LENGTHS,
        "qo_indptr": OFFSETS,
    }
    _, k, v = (
        part.view(NUM_TOKENS, -1, heads[2])
        for part in qkv.split([heads[0] * heads[2], *[heads[1] * heads[2]] * 2], 1)
    )
    cache = kv_cache if table == "shared" else (kv_cache[:, 0], kv_cache[:, 1])
    q = jitattn.preprocess_qkv(qkv, cache, pages=pages, **given)
    jitattn.append_kv(k, v, cache, pages=pages, seq_lens=LENGTHS, qo_indptr=OFFSETS)
    jitattn.preprocess_qkv(qkv, cache, slots=slots, **given)
    jitattn.append_kv(k, v, cache, slots=slots)
    sinks = torch.zeros(heads[0]) if model.use_sinks else None
    for window in model.windows:
        planner = jitattn.AttentionPlanner(
            num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], page_size=16,
            q_dtype=model.dtype, kv_dtype=model.dtype, page_table=table, window_left=window,
            logits_soft_cap=model.logits_soft_cap, sm_scale=model.sm_scale,
            use_sinks=model.use_sinks, device="cpu",
        )  # fmt: skip
        plan = planner.plan(pages, LENGTHS, OFFSETS, max_q_len=NUM_TOKENS)
        assert plan.run(q, planner.bind(cache), sinks=sinks).isfinite().all()


def missing(asked: Asked, model: Model, **serving: Any) -> set[str]:
    assert asked.configs
    needs = needs_of(model, Serving(**serving))
    there = {spec for need in needs for spec in specs_of(need.config, ARCH)}
    wanted = {spec for config in dict.fromkeys(asked.configs) for spec in specs_of(config, ARCH)}
    return {spec.symbol for spec in wanted - there}


DEEPSEEK = MODELS["deepseek-v2-lite"]
LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK | {"model_type": "deepseek_v3"},
    "neox": DEEPSEEK | {"model_type": "deepseek_v3", "rope_interleave": False},
    "kimi_k2": DEEPSEEK | {"model_type": "kimi_k2"},
}


@pytest.mark.parametrize("table", ["shared", "separate"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", LATENTS)
def test_a_step_of_latent_attention_finds_its_kernels(
    name: str, kv_dtype: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of docs/latent-attention.md, by pages and by slots."""
    model = model_of(LATENTS[name])
    assert model.latent is not None
    asked = Asked(monkeypatch)
    sizes = (model.latent.kv_lora_rank, model.latent.qk_rope_head_dim)
    cache = torch.zeros(1, 64, sum(sizes), dtype=torch.bfloat16).to(getattr(torch, kv_dtype))
    ids = torch.zeros(1, 1, dtype=torch.int32)
    pages = jitattn.BlockTable(ids if table == "shared" else torch.stack((ids, ids), 1))
    latent, k_pe = (torch.zeros(NUM_TOKENS, 1, size, dtype=torch.bfloat16) for size in sizes)
    q_pe = torch.zeros(NUM_TOKENS, model.num_qo_heads, sizes[1], dtype=torch.bfloat16)
    latents, rope_parts = (part.unsqueeze(2) for part in cache.split(sizes, -1))
    rope = jitattn.Rope.from_hf_config(LATENTS[name])
    heads = {"num_qo_heads": model.num_qo_heads, "num_kv_heads": 1, "head_dim": sizes[1]}
    tokens = {"pages": pages, "seq_lens": LENGTHS, "qo_indptr": OFFSETS}
    slots = {"slots": torch.arange(NUM_TOKENS, dtype=torch.int32)}
    for where, given in ((tokens, {}), (slots, {"positions": torch.arange(NUM_TOKENS)})):
        jitattn.preprocess_qkv(
            (q_pe, k_pe, latent), (rope_parts, latents), **heads, rope=rope, **where, **given
        )  # fmt: skip
        jitattn.append_kv(latent, k_pe, (latents, rope_parts), **where)
    jitattn.MLAPlanner(
        num_heads=model.num_qo_heads, kv_lora_rank=sizes[0], qk_rope_head_dim=sizes[1],
        page_size=64, sm_scale=model.sm_scale, kv_dtype=kv_dtype, page_table=table, device="cpu",
    )  # fmt: skip
    jitattn.AttentionPlanner(
        num_qo_heads=16, num_kv_heads=16, head_dim=192, head_dim_vo=128, page_size=None,
        page_table="ragged", sm_scale=model.sm_scale, device="cpu",
    )  # fmt: skip
    assert not missing(asked, model, kv_dtypes=(kv_dtype,))
