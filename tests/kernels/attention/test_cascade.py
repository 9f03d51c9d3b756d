"""Attention in levels against one level, on the reference backend, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import jitattn
from tests.support.cascades import HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, Tree, check_tree

COMMON: dict[str, Any] = {
    "num_qo_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "page_size": PAGE_SIZE,
    "device": "cpu",
}


@pytest.mark.parametrize("num_levels", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_trees(num_levels: int, seed: int) -> None:
    rng = random.Random(100 * num_levels + seed)
    tree = Tree.of(rng, num_levels=num_levels, max_q_len=4, max_kv_len=21)
    check_tree(
        tree, device="cpu", seed=seed, tolerance=1e-4, out_dtype="float32",
        table=rng.choice(["shared", "csr", "separate"]),
        logits_soft_cap=rng.choice([0.0, 2.0]),
        use_sinks=rng.random() < 0.5,
        causal=rng.random() < 0.8,
        sm_scale=rng.choice([None, 0.3]),
    )  # fmt: skip


def test_outputs_are_rounded_to_their_type() -> None:
    tree = Tree.of(random.Random(7), num_levels=3, max_q_len=5, max_kv_len=30)
    check_tree(tree, device="cpu")


def test_no_keys_at_all() -> None:
    tree = Tree([[(0, 2, [], 0)], [(0, 1, [], 0), (1, 1, [], 0)]], [1, 1], 4, 1)
    check_tree(tree, device="cpu")
    check_tree(tree, device="cpu", use_sinks=True)


def test_one_query_whose_own_token_is_shared() -> None:
    tree = Tree([[(0, 2, [0, 1], 6)], [(0, 1, [], 0), (1, 1, [2], 1)]], [1, 1], 2, 3)
    check_tree(tree, device="cpu")


def decode_levels() -> list[jitattn.cascade.CascadeLevel]:
    """Two requests that share four keys, with a token of their own each."""
    shared = jitattn.BlockTable(torch.tensor([[0]], dtype=torch.int32))
    own = jitattn.BlockTable(torch.tensor([[1], [2]], dtype=torch.int32))
    return [
        jitattn.cascade.CascadeLevel(
            shared, torch.tensor([4], dtype=torch.int32),
            torch.tensor([0, 2], dtype=torch.int32), max_q_len=2,
        ),
        jitattn.cascade.CascadeLevel(own, torch.tensor([1, 1], dtype=torch.int32)),
    ]  # fmt: skip


def some_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(3, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
    return torch.randn(2, HEADS, HEAD_DIM, generator=generator).bfloat16(), cache


def test_lengths_are_read_again() -> None:
    planner = jitattn.cascade.CascadePlanner(**COMMON)
    q, cache = some_inputs()
    levels = decode_levels()
    plan = planner.plan(levels)
    levels[0].seq_lens.fill_(2)
    before = plan.run(q, cache)
    plan.refresh()
    after = plan.run(q, cache)
    assert torch.equal(after, planner.plan(levels).run(q, cache))
    assert not torch.equal(before, after)


def test_a_planner_is_shared_where_levels_are_alike() -> None:
    planner = jitattn.cascade.CascadePlanner(**COMMON, causal=False)
    assert planner.prefix is planner.last
    q, cache = some_inputs()
    bound = planner.bind(cache)
    assert bound.prefix is bound.last
    out = planner.plan(decode_levels()).run(q, bound)
    assert torch.equal(
        out, jitattn.cascade.CascadePlanner(**COMMON).plan(decode_levels()).run(q, cache)
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    planner = jitattn.cascade.CascadePlanner(**COMMON)
    q, cache = some_inputs()
    bound = planner.bind(cache)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda plan, q: plan.run(q, bound, return_lse=True), fullgraph=True, backend=counter
    )
    for kv_len in (4, 3, 1):
        levels = decode_levels()
        levels[0].seq_lens.fill_(kv_len)
        plan = planner.plan(levels)
        found, expected = compiled(plan, q), plan.run(q, bound, return_lse=True)
        assert all(map(torch.equal, found, expected))
    assert counter.frame_count == 1


def test_the_merge_is_as_declared() -> None:
    import jitattn.kernels.torch_ops  # noqa: F401 - it defines it

    outs, lses = torch.randn(3, 2, HEADS, HEAD_DIM), torch.randn(3, 2, HEADS)
    arguments = outs, lses, torch.empty(outs.shape[1:]), torch.empty(lses.shape[1:])
    torch.library.opcheck(torch.ops.jitattn.merge_states.default, arguments)
    with pytest.raises(ValueError, match="out has shape"):
        torch.ops.jitattn.merge_states(outs, lses, arguments[2][:1], arguments[3])


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument", [{"window_left": 0}, {"use_custom_mask": True}, {"batch_invariant": True}]
)
def test_what_no_cascade_can_do(argument: dict[str, Any]) -> None:
    with pytest.raises(jitattn.ConfigError, match=f"{next(iter(argument))}=.* in a cascade"):
        jitattn.cascade.CascadePlanner(**COMMON, **argument)
    with pytest.raises(jitattn.ConfigError, match="head_dim=24"):
        jitattn.cascade.CascadePlanner(**(COMMON | {"head_dim": 24}))


def test_queries_before_shared_keys() -> None:
    """Two queries and one key at the last level: the first query would see what follows it."""
    planner = jitattn.cascade.CascadePlanner(**COMMON)
    levels = decode_levels()
    levels[1] = jitattn.cascade.CascadeLevel(
        jitattn.BlockTable(torch.tensor([[1]], dtype=torch.int32)),
        torch.tensor([1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32), max_q_len=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"request 0 has 2 query tokens and 1 keys .*levels\[0\]"):
        planner.plan(levels)
    jitattn.cascade.CascadePlanner(**COMMON, causal=False).plan(levels)
    levels[0].seq_lens.zero_()
    plan = planner.plan(levels)
    levels[0].seq_lens.fill_(3)
    with pytest.raises(ValueError, match="request 0 has 2 query tokens"):
        plan.refresh()


def test_bad_levels() -> None:
    planner = jitattn.cascade.CascadePlanner(**COMMON)
    first, last = decode_levels()
    with pytest.raises(TypeError, match="at least one CascadeLevel"):
        planner.plan([])
    with pytest.raises(TypeError, match=r"levels\[1\] is a tuple"):
        planner.plan([first, (last.pages, last.seq_lens)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"levels\[0\]: seq_lens has dtype float32"):
        planner.plan([replace(first, seq_lens=first.seq_lens.float()), last])
    with pytest.raises(ValueError, match=r"levels\[0\]: max_q_len is None"):
        planner.plan([replace(first, max_q_len=None), last])
    with pytest.raises(ValueError, match=r"levels\[0\]: pages is .* planner has page_table"):
        wrong = jitattn.TokenTable(torch.zeros(1, 4, dtype=torch.int32))
        planner.plan([replace(first, pages=wrong), last])


def test_bad_calls() -> None:
    planner = jitattn.cascade.CascadePlanner(**COMMON)
    plan = planner.plan(decode_levels())
    q, cache = some_inputs()
    with pytest.raises(TypeError, match="q has dtype float32"):
        plan.run(q.float(), cache)
    with pytest.raises(ValueError, match="q has shape"):
        plan.run(q[:1], cache)
    with pytest.raises(ValueError, match="q has shape"):
        plan.run(q[0], cache)
    with pytest.raises(ValueError, match="sinks are given"):
        plan.run(q, cache, sinks=torch.zeros(HEADS))
    with pytest.raises(ValueError, match="out has shape"):
        plan.run(q, cache, out=torch.empty_like(q)[:1])
    with pytest.raises(ValueError, match="share memory"):
        plan.run(q, cache, lse=torch.empty(1, HEADS).expand(2, HEADS))
    with pytest.raises(TypeError, match="return_lse"):
        plan.run(q, cache, return_lse=1)  # type: ignore[arg-type]
    other = jitattn.cascade.CascadePlanner(**COMMON, sm_scale=2.0)
    with pytest.raises(ValueError, match="another configuration"):
        plan.run(q, other.bind(cache))
