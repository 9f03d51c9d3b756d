"""Ranks that each have a page manager, make the same calls, and keep their part of the tokens."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import jitattn
from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig, PageIndexMode
from jitattn.parallel import ContextParallel

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 4
VOCABULARY = torch.randn(2, 50, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
"""K and V of a token, wherever it stands."""
LAYER = LayerConfig(layer_id=0, num_kv_heads=KV_HEADS, head_dim=DIM)
PLANNER = {
    "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE,
    "device": "cpu",
}  # fmt: skip


def query(step: int, num_tokens: int) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(num_tokens, HEADS, DIM, generator=rng).bfloat16()


class Conductor:
    """One rank's manager, and random steps that are the same on every rank."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        config = KVCacheConfig(
            page_size=PAGE, gpu_bytes=60 * 2 * KV_HEADS * PAGE * DIM * 2,
            host_bytes=20 * 2 * KV_HEADS * PAGE * DIM * 2, layers=[LAYER], num_ranks=num_ranks,
        )  # fmt: skip
        self.manager = KVCacheManager(config, device="cpu")
        self.view = self.manager.layer_view(0, PageIndexMode.SHARED)
        self.rng = random.Random(seed)
        self.running: list[tuple[KVSequence, list[int]]] = []
        self.prompts: list[list[int]] = []

    def begin(self) -> None:
        """Add a sequence, now and then with a prompt that another began with, or a fork."""
        if self.running and self.rng.random() < 0.3:
            seq, tokens = self.rng.choice(self.running)
            self.running.append((seq.fork(), list(tokens)))
            return
        prompt = [self.rng.randrange(50) for _ in range(self.rng.randint(1, 40))]
        if self.prompts and self.rng.random() < 0.6:
            other = self.rng.choice(self.prompts)
            prompt = other[: self.rng.randint(1, len(other))] + prompt[:5]
        self.prompts.append(prompt)
        seq = self.manager.create_sequence(prompt[:-1])
        assert seq.resume()
        self.running.append((seq, prompt))

    def step(self) -> tuple[list[KVSequence], list[list[int]], list[int]]:
        """Make room for up to five tokens of each; return sequences, tokens, and how many new."""
        if self.rng.random() < 0.6 or not self.running:
            self.begin()
        elif self.rng.random() < 0.4:
            self.running.pop(self.rng.randrange(len(self.running)))[0].close()
        counts, step = [], []
        for seq, tokens in self.running:
            while len(tokens) <= seq.history_len:
                tokens.append(self.rng.randrange(50))
            new = min(len(tokens) - seq.history_len, 5)
            while not seq.resize(seq.history_len + new):
                raise AssertionError("the pool is too small for this test")
            counts.append(new)
            step.append(tokens[: seq.history_len + new])
        return [seq for seq, _ in self.running], step, counts

    def end(self, tokens: list[list[int]]) -> None:
        for (seq, _), all_tokens in zip(self.running, tokens, strict=True):
            seq.commit(all_tokens[seq.num_committed_tokens :])
        while len(self.running) > 4:
            self.running.pop(0)[0].close()


def serve_on_ranks(
    rank: int, num_ranks: int, seed: int, num_steps: int
) -> tuple[list[Tensor], int]:
    """Return out of this rank's heads of every step, and how many tokens were reused."""
    cp = ContextParallel(page_size=PAGE)
    conductor = Conductor(num_ranks, seed)
    planner = jitattn.AttentionPlanner(**PLANNER)  # type: ignore[arg-type]
    outs = []
    for step in range(num_steps):
        seqs, tokens, counts = conductor.step()
        if not seqs:
            continue
        pages = conductor.view.block_table(seqs)
        lens = torch.tensor([len(each) for each in tokens])
        info = jitattn.batch_info(
            lens, torch.tensor(counts), num_tokens=sum(counts), pages=pages,
            page_size=conductor.manager.config.block_len,
        )  # fmt: skip
        assert info.slots is not None
        new = [t for each, n in zip(tokens, counts, strict=True) for t in each[-n:]]
        k, v = VOCABULARY[:, new].bfloat16()
        jitattn.append_kv(k, v, conductor.view.kv_cache, slots=cp.local_slots(info.slots))
        plan = cp.plan(planner, pages, lens, info.qo_indptr, max_q_len=5)
        q = query(step, sum(counts))[:, rank * HEADS // num_ranks : (rank + 1) * HEADS // num_ranks]
        out = plan.run(q, conductor.view.kv_cache)
        assert isinstance(out, Tensor)
        outs.append(out)
        conductor.end(tokens)
    return outs, conductor.manager.stats().reused_tokens


def serve_alone(num_ranks: int, seed: int, num_steps: int) -> list[Tensor]:
    """Return out of all heads of every step, over K and V of the tokens themselves."""
    from jitattn.kernels.attention.reference import attention

    conductor, outs = Conductor(num_ranks, seed), []
    for step in range(num_steps):
        seqs, tokens, counts = conductor.step()
        if not seqs:
            continue
        k, v = VOCABULARY[:, [t for each in tokens for t in each]].bfloat16()
        starts = [0]
        for each in tokens:
            starts.append(starts[-1] + len(each))
        indptr = [sum(counts[:i]) for i in range(len(counts) + 1)]
        outs.append(
            attention(
                query(step, sum(counts)), k, v, indptr, starts,
                causal=True, window_left=-1, logits_soft_cap=0.0, sm_scale=DIM**-0.5,
            )[0]
        )  # fmt: skip
        conductor.end(tokens)
    return outs
