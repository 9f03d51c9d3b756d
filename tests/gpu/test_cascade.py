"""Attention in levels on a card: random trees, and levels in a graph."""

from __future__ import annotations

import random

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.support.cascades import HEADS, Tree, check_tree, planner_config


@pytest.mark.parametrize("table", ["shared", "csr"])
@pytest.mark.parametrize("num_levels", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_trees(table: str, num_levels: int, seed: int) -> None:
    rng = random.Random(10 * num_levels + seed)
    tree = Tree.of(rng, num_levels=num_levels, max_q_len=40, max_kv_len=700)
    check_tree(
        tree, device=DEVICE, table=table, seed=seed, use_sinks=seed % 2 == 0,
        logits_soft_cap=5.0 if seed < 2 else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_graph_follows_lengths_and_tables(seed: int) -> None:
    """Captured with one tree, replayed with others of its shape, bit for bit an eager call."""
    config = vars(planner_config()).copy()
    for name in ("variant", "skip_softmax_threshold"):
        config.pop(name)
    planner = jitattn.cascade.CascadePlanner(**config, device=DEVICE)
    tree = Tree.of(random.Random(seed), num_levels=3, max_q_len=1, max_kv_len=300)
    levels = tree.levels("shared", DEVICE)
    shape = tree.num_pages, 2, 4, config["num_kv_heads"], config["head_dim"]
    cache = torch.randn(shape, device=DEVICE).bfloat16()
    bound = planner.bind(cache)
    q = torch.randn(tree.num_tokens, HEADS, config["head_dim"], device=DEVICE).bfloat16()
    plan = planner.plan(levels)
    plan.run(q, bound)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh()
        out, lse = plan.run(q, bound, return_lse=True)
    for step in range(3):
        q.normal_()
        for level in levels:
            level.seq_lens.copy_(torch.clamp(level.seq_lens - step, min=0))
        graph.replay()
        expected = planner.plan(levels).run(q, bound, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
