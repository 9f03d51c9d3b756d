"""Random trees of prefixes, in levels, and what attention over them is by definition."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.attention.reference import attention
from jitattn.spec.config import PlannerConfig

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 32, 4


@dataclass
class Tree:
    """Keys of requests in levels.

    ``groups[level]`` are (first request, requests, pages, length); the last level has one request
    each. ``q_lens`` are query tokens, ``num_tokens`` those and padding.
    """

    groups: list[list[tuple[int, int, list[int], int]]]
    q_lens: list[int]
    num_tokens: int
    num_pages: int

    @classmethod
    def of(cls, rng: random.Random, *, num_levels: int, max_q_len: int, max_kv_len: int) -> Tree:
        """Split requests into groups, level by level; some have no keys at some levels."""
        batch_size = rng.randint(1, 7)
        q_lens = [rng.choice([1, 1, rng.randint(1, max_q_len)]) for _ in range(batch_size)]
        num_pages = 0
        groups, bounds = [], [0, batch_size]
        for level in range(num_levels):
            is_last = level == num_levels - 1
            inner = range(batch_size + 1) if is_last else rng.sample(range(batch_size + 1), 1)
            bounds = sorted({*bounds, *inner})
            found = []
            for begin, end in itertools.pairwise(bounds):
                kv_len = rng.choice([0, rng.randint(0, max_kv_len)])
                if is_last and q_lens[begin] > 1:
                    kv_len = max(kv_len, q_lens[begin])
                pages = list(range(num_pages, num_pages - (-kv_len // PAGE_SIZE)))
                num_pages += len(pages)
                found.append((begin, end - begin, pages, kv_len))
            groups.append(found)
        shuffled = list(range(num_pages))
        rng.shuffle(shuffled)
        groups = [
            [(b, n, [shuffled[p] for p in pages], kv_len) for b, n, pages, kv_len in level]
            for level in groups
        ]
        return cls(groups, q_lens, sum(q_lens) + rng.choice([0, 3]), max(num_pages, 1))

    @property
    def offsets(self) -> list[int]:
        found = [0]
        for q_len in self.q_lens:
            found.append(found[-1] + q_len)
        return found

    def levels(self, table: str, device: str) -> list[jitattn.cascade.CascadeLevel]:
        found = []
        for groups in self.groups:
            ends = [self.offsets[b] for b, _, _, _ in groups] + [self.offsets[-1]]
            lens = [kv_len for _, _, _, kv_len in groups]
            found.append(
                jitattn.cascade.CascadeLevel(
                    _table(table, [pages for _, _, pages, _ in groups], device),
                    torch.tensor(lens, dtype=torch.int32, device=device),
                    torch.tensor(ends, dtype=torch.int32, device=device),
                    max_q_len=max(b - a for a, b in itertools.pairwise(ends)),
                )
            )
        return found

    def slots(self) -> list[list[int]]:
        """The slots of all keys that each request sees, in order."""
        rows: list[list[int]] = [[] for _ in self.q_lens]
        for groups in self.groups:
            for begin, count, pages, kv_len in groups:
                slots = [pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(kv_len)]
                for row in rows[begin : begin + count]:
                    row += slots
        return rows


def _table(kind: str, rows: list[list[int]], device: str) -> jitattn.BlockTable | jitattn.CsrPages:
    if kind == "csr":
        ends = [0]
        for row in rows:
            ends.append(ends[-1] + len(row))
        ids = [page for row in rows for page in row] or [0]
        return jitattn.CsrPages(
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.tensor(ids, dtype=torch.int32, device=device),
        )
    width = max(map(len, rows)) or 1
    table = torch.tensor(
        [row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32, device=device
    )
    return jitattn.BlockTable(table if kind == "shared" else torch.stack([table, table], dim=1))


def planner_config(**others: object) -> PlannerConfig:
    """What all cascades of tests/gpu have."""
    base: dict[str, object] = {
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "page_size": PAGE_SIZE,
    }
    return PlannerConfig.from_arguments(base | others)


def gpu_configs() -> list[PlannerConfig]:
    """What tests/gpu/test_cascade.py launches, for a bundle."""
    tables = "shared", "csr"
    return [
        planner_config(page_table=table, logits_soft_cap=cap) for table in tables for cap in (0, 5)
    ]


def defined(
    tree: Tree, q: Tensor, cache: Tensor, sinks: Tensor | None, **arguments: object
) -> tuple[Tensor, Tensor]:
    """Out and lse over all keys of each request in order, by the float64 definition."""
    rows = tree.slots()
    slots = torch.tensor([slot for row in rows for slot in row], dtype=torch.int64)
    k, v = cache.cpu().transpose(1, 2).flatten(0, 1)[slots].unbind(1)
    config = planner_config(**arguments)
    return attention(
        q.cpu(), k, v, tree.offsets, [0, *itertools.accumulate(map(len, rows))],
        causal=config.causal, window_left=config.window_left,
        logits_soft_cap=config.logits_soft_cap,
        sm_scale=HEAD_DIM**-0.5 if config.sm_scale is None else config.sm_scale,
        sinks=None if sinks is None else sinks.cpu(),
    )  # fmt: skip


def check_tree(
    tree: Tree,
    *,
    device: str,
    table: str = "shared",
    seed: int = 0,
    tolerance: float = 2e-2,
    **arguments: object,
) -> None:
    """Attention in levels is that over all keys of a request in order."""
    generator = torch.Generator().manual_seed(seed)
    shape = tree.num_pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM
    cache = torch.randn(shape, generator=generator).bfloat16().to(device)
    q = torch.randn((tree.num_tokens, HEADS, HEAD_DIM), generator=generator).bfloat16().to(device)
    sinks = None
    if arguments.get("use_sinks"):
        sinks = torch.randn(HEADS, generator=generator).to(device)
    expected, expected_lse = defined(tree, q, cache, sinks, **arguments)
    common = dict(vars(planner_config(**arguments)), device=device)
    for name in ("variant", "skip_softmax_threshold"):
        common.pop(name)
    planner = jitattn.cascade.CascadePlanner(**(common | {"page_table": table}))
    plan = planner.plan(tree.levels(table, device))
    out, lse = plan.run(q, planner.bind(cache), return_lse=True, sinks=sinks)
    torch.testing.assert_close(out, expected.to(out), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse.to(lse), rtol=1e-3, atol=1e-3)
    assert (lse[sum(tree.q_lens) :] == -torch.inf).all()
    plan.refresh()
    wide = torch.full((tree.num_tokens, HEADS, 2 * HEAD_DIM), torch.nan, device=device)
    strided = wide.to(out.dtype)[..., :HEAD_DIM]
    turned = torch.empty(HEADS, tree.num_tokens, device=device).T
    assert plan.run(q, cache, out=strided, lse=turned, sinks=sinks) is strided
    assert torch.equal(strided, out)
    assert torch.equal(turned, lse)
