"""Layers that attend to what they chose: all there is gives dense attention, a part that part's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import jitattn
from tests.support import choices
from tests.support.choices import Batch, Index

SIZE = 16
HEADS, KV_HEADS, DIM = 4, 2, 32


def softmax_over(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one query to [n, dim] keys, in float64."""
    return torch.softmax(scale * (k.double() @ q.double()), 0) @ v.double()


def latent_layer(batch: Batch, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, logits, q and latents of a layer as DeepSeek V3.2's, with lists of k tokens."""
    cache, _, _ = choices.index_cache(Index(batch, 8), "cpu")
    pages, lens = batch.pages("cpu"), batch.lens("cpu")
    tokens, queries = batch.num_tokens, batch.queries("cpu")
    index_q = torch.randn(tokens, 8, 128).to(choices.E4M3)
    logits = jitattn.index_logits(
        index_q,
        torch.rand(tokens, 8),
        cache,
        pages,
        lens,
        **queries,  # type: ignore[arg-type]
    )
    lists = jitattn.select_tokens(logits, pages, lens, k, **queries)  # type: ignore[arg-type]
    planner = jitattn.MLAPlanner(
        num_heads=2, kv_lora_rank=256, qk_rope_head_dim=32, page_size=SIZE, sm_scale=0.1,
        page_table="indices", device="cpu",
    )  # fmt: skip
    latents = torch.randn(batch.num_pages, SIZE, 288).bfloat16()
    q = torch.randn(tokens, 2, 288).bfloat16()
    plan = planner.plan(lists, tokens)
    out = plan.run(q[..., :256].contiguous(), q[..., 256:].contiguous(), latents)
    return out, logits, q, latents.flatten(0, 1)


@pytest.mark.parametrize("k", [1, 9, 64, 300])
def test_a_layer_of_chosen_tokens(k: int) -> None:
    batch = Batch(q_lens=(2, 1, 3), kv_lens=(130, 7, 64), page_size=SIZE)
    out, logits, q, latents = latent_layer(batch, k)
    for row, (request, seen) in enumerate(batch.rows()):
        chosen = choices.largest(logits[row, :seen].tolist(), k)
        keys = latents[[batch.slot(request, i) for i in chosen]]
        for head in range(2):
            want = softmax_over(q[row, head], keys, keys[:, :256], 0.1)
            torch.testing.assert_close(out[row, head].double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("k", [2, 4, 20])
def test_a_layer_of_chosen_pages(k: int) -> None:
    batch = Batch(kv_lens=(250, 7, 64), q_lens=(1,) * 3, page_size=SIZE)
    pages, lens = batch.pages("cpu"), batch.lens("cpu")
    cache = torch.randn(batch.num_pages, 2, SIZE, KV_HEADS, DIM).bfloat16()
    q = torch.randn(3, HEADS, DIM).bfloat16()
    bounds = jitattn.page_bounds(cache, pages, lens)
    lists = jitattn.select_pages(q, bounds, pages, lens, k)
    shape = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": SIZE}
    planner = jitattn.AttentionPlanner(**shape, page_table="page_lists", device="cpu")  # type: ignore[arg-type]
    out = planner.plan(lists, lens).run(q, cache)
    tokens = cache.movedim(1, 0).flatten(1, 2)
    for request, kv_len in enumerate(batch.kv_lens):
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            numbers = lists.entries(request, kv_head)[1].tolist()
            seen = [i for n in numbers for i in range(n * SIZE, min((n + 1) * SIZE, kv_len))]
            k_rows, v_rows = tokens[:, [batch.slot(request, i) for i in seen], kv_head]
            want = softmax_over(q[request, head], k_rows, v_rows, DIM**-0.5)
            torch.testing.assert_close(out[request, head].double(), want, rtol=2e-2, atol=2e-2)
    if k == 20:  # every page
        dense = jitattn.AttentionPlanner(**shape, device="cpu")  # type: ignore[arg-type]
        torch.testing.assert_close(dense.plan(pages, lens).run(q, cache), out)
