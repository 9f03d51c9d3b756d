"""vLLM's latent attention on a device: numbers, graphs, and that the host never waits.

vLLM is not needed: layers and prompts are those that its classes hand over to.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitattn.integrations.vllm.latents import Latents
from tests.gpu.device import DEVICE
from tests.support import engines
from tests.support.harness import forbid_waiting
from tests.support.vllm_latent_runs import (
    DECODE,
    DEEPSEEK,
    MIXED,
    SCALE,
    VERIFIED,
    Case,
    Run,
    attend,
    check,
    decode_of,
    heads_of,
    layer_of,
    prompts_of,
    queries_of,
    write,
)

SLACK = 3.0  # what a kernel's probabilities are rounded to, and its output


def run_of(lens: dict[str, tuple[int, ...]], **given: Any) -> Run:
    return Run(Case(lens, dims=DEEPSEEK, device=DEVICE, **given))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("lens", [DECODE, VERIFIED, MIXED], ids=["decode", "verified", "mixed"])
def test_decode_steps(
    lens: dict[str, tuple[int, ...]], kv_cache_dtype: str, page_size: int
) -> None:
    run = run_of(lens, kv_cache_dtype=kv_cache_dtype, page_size=page_size, padding=3)
    layer, q = layer_of(run), queries_of(run)
    layer.need_to_return_lse_for_decode = True
    write(layer, run)
    check(run, q, *attend(layer, run, q, decode_of(run)), slack=SLACK)


def prompts_and_chunk(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts of 20, 1 and 300 tokens, among themselves or behind 40, 0 and 500."""
    starts, keys = ([0, 20, 21, 321], [0, 40, 40, 540])
    offsets, key_offsets = (torch.tensor(x, dtype=torch.int32, device=DEVICE)
                            for x in (starts, keys))  # fmt: skip
    prompts = prompts_of(DEEPSEEK)
    prompts.prepare_metadata(SimpleNamespace(query_start_loc=offsets, max_query_len=300))
    if causal:
        out, lse = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=True)
    else:
        chunk = SimpleNamespace(
            index=0, query_start_loc=offsets, max_query_len=300, cu_seq_lens=key_offsets
        )
        out, lse = prompts.run_prefill_context_chunk(q=q, k=k, v=v, chunk=chunk)
    bounds = zip(itertools.pairwise(starts), itertools.pairwise(starts if causal else keys),
                 strict=True)  # fmt: skip
    for (begin, end), (first, last) in bounds:
        scores = engines.Scores(SCALE, causal=causal)
        want, want_lse, size = engines.defined(q[begin:end], k[first:last], v[first:last], scores)
        engines.check_rows(out[begin:end], want, size, slack=SLACK)
        torch.testing.assert_close(lse.T[begin:end].double(), want_lse, rtol=1e-4, atol=1e-4)
    return out, lse


@pytest.mark.parametrize("causal", [True, False], ids=["prompts", "what is before them"])
def test_prompts(causal: bool) -> None:
    q = heads_of(321, DEEPSEEK, torch.bfloat16, DEVICE)[0]
    k, v = heads_of(321 if causal else 540, DEEPSEEK, torch.bfloat16, DEVICE)
    prompts_and_chunk(causal, q, k, v)


def test_the_host_never_waits() -> None:
    run = run_of(VERIFIED)
    layer, q = layer_of(run), queries_of(run)
    write(layer, run)
    attend(layer, run, q, decode_of(run))
    q_heads = heads_of(10, DEEPSEEK, torch.bfloat16, DEVICE)[0]
    k, v = heads_of(10, DEEPSEEK, torch.bfloat16, DEVICE)
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32, device=DEVICE)
    prompts = prompts_of(DEEPSEEK)
    new = SimpleNamespace(query_start_loc=offsets, max_query_len=6)
    given = {"q": q_heads, "k": k, "v": v, "return_softmax_lse": True}
    parts = q[..., : DEEPSEEK.rank], q[..., DEEPSEEK.rank :]
    for _ in range(2):
        prompts.prepare_metadata(new)
        prompts.run_prefill_new_tokens(**given)
        metadata = SimpleNamespace(decode=decode_of(run))
        slots = run.slots
        with forbid_waiting():
            prompts.prepare_metadata(new)
            prompts.run_prefill_new_tokens(**given)
            layer.do_kv_cache_update(*run.new, run.handed_over, slots, "auto", run.scale)
            layer.forward_mqa(parts, run.handed_over, metadata, run.layer())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_graphs_replay_other_batches(kv_cache_dtype: str, num_tokens: int) -> None:
    """Captured with short requests; replayed with others, padding among them, in place."""
    lens = ((100, 1, 17, 32), (5, 64, 0, 0), (2, 2, 2, 2), (33, 16, 15, 0))
    runs = [run_of({"kv_lens": n, "q_lens": tuple(min(x, num_tokens) for x in n)},
                   kv_cache_dtype=kv_cache_dtype, seed=i)
            for i, n in enumerate(lens)]  # fmt: skip
    pool = torch.zeros(max(len(run.cache) for run in runs), *runs[0].cache.shape[1:])
    cache = pool.to(DEVICE, runs[0].kv_dtype)
    rows = 4 * num_tokens
    q = torch.zeros(rows, DEEPSEEK.num_heads, DEEPSEEK.width, device=DEVICE, dtype=torch.bfloat16)
    first, layer = runs[0], layer_of(runs[0])
    decode = decode_of(
        first,
        seq_lens=first.ints([num_tokens] * 4),
        query_start_loc=first.ints([i * num_tokens for i in range(5)]),
        block_table_tensor=torch.zeros(4, 9, dtype=torch.int32, device=DEVICE),
        max_query_len=num_tokens,
    )
    layer.plan(decode, Latents(DEEPSEEK.num_heads, torch.bfloat16, 16, q.device))
    parts = q[..., : DEEPSEEK.rank], q[..., DEEPSEEK.rank :]
    scale = first.layer()

    def step() -> Tensor:
        return layer.forward_mqa(parts, cache, SimpleNamespace(decode=decode), scale)[0]

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for run in runs:
        write(layer_of(run), run)
        cache[: len(run.cache)] = run.cache
        found, live = queries_of(run), decode_of(run)
        q.fill_(float("nan"))
        q[: len(found)] = found
        decode.step.seq_lens.copy_(live.step.seq_lens)
        decode.step.qo_indptr.copy_(live.step.qo_indptr)
        table = live.pages.table[:, :9]
        decode.pages.table[:, : table.shape[1]] = table
        out.fill_(float("nan"))
        graph.replay()
        check(run, found, out, slack=SLACK)
