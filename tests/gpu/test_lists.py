"""Attention over lists of tokens and of pages on a card: random examples, bits, graphs.

JITATTN_TEST_EXAMPLES says how many examples there are; those of a shard are every tenth.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.support.harness import same_bits
from tests.support.lists import (
    GPU_CASES,
    NUM_EXAMPLES,
    ListCase,
    ListInputs,
    check_lists,
    extra_inputs,
    make_inputs,
    random_case,
)

_NUM_SHARDS = 10


@pytest.mark.parametrize("shard", range(_NUM_SHARDS))
def test_random_examples(shard: int) -> None:
    for seed in range(shard, NUM_EXAMPLES, _NUM_SHARDS):
        case = random_case(seed)
        inputs = make_inputs(case, DEVICE)
        try:
            check_lists(inputs, inputs.run(case.planner(DEVICE)))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}") from error


@pytest.mark.parametrize("name", GPU_CASES)
def test_cases(name: str) -> None:
    inputs = make_inputs(GPU_CASES[name], DEVICE)
    planner = GPU_CASES[name].planner(DEVICE)
    first = inputs.run(planner)
    check_lists(inputs, first)
    for _ in range(3):
        assert _same(first, inputs.run(planner))


def _same(one: Any, other: Any) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def _moved(inputs: ListInputs) -> ListInputs:
    """The same lists of the same tokens, which lie elsewhere."""
    case = inputs.case
    num_slots, size = case.num_pages * case.page_size, case.page_size
    generator = torch.Generator(DEVICE).manual_seed(1)
    order = torch.randperm(num_slots, generator=generator, device=DEVICE)
    slots = inputs.lists.slots
    is_slot = (slots >= 0) & (slots < num_slots)
    moved = torch.where(is_slot, order[slots.clamp(0, num_slots - 1).long()], slots).int()
    kv = torch.empty_like(inputs.kv)
    sources = torch.arange(num_slots, device=DEVICE)
    bits, given = kv.view(torch.uint8), inputs.kv.view(torch.uint8)
    if case.latent:
        bits[order // size, order % size] = given[sources // size, sources % size]
    else:
        bits[order // size, :, order % size] = given[sources // size, :, sources % size]
    return replace(inputs, lists=jitattn.IndexLists(moved, inputs.lists.counts), kv=kv)


@pytest.mark.parametrize("name", ["grouped", "8 bits", "8 heads", "128 heads", "rows"])
def test_placement_changes_no_bit(name: str) -> None:
    case = GPU_CASES[name]
    inputs, planner = make_inputs(case, DEVICE), case.planner(DEVICE)
    assert _same(inputs.run(planner), _moved(inputs).run(planner))


@pytest.mark.parametrize("name", ["grouped", "8 heads", "pages"])
def test_a_graph_follows_lists_and_counts(name: str) -> None:
    case = GPU_CASES[name]
    inputs, planner = make_inputs(case, DEVICE), case.planner(DEVICE)
    kv, plan = planner.bind(inputs.kv, **inputs.scales), inputs.plan(planner)
    arguments = {} if inputs.sinks is None else {"sinks": inputs.sinks}
    out, lse = inputs.run(planner, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh()
        plan.run(*inputs.queries, kv, out=out, lse=lse, **arguments)
    for seed in (1, 2):
        other = make_inputs(replace(case, seed=seed), DEVICE)
        for mine, new in zip(inputs.lists.tensors, other.lists.tensors, strict=True):
            mine.copy_(new)
        if inputs.seq_lens is not None:
            inputs.seq_lens.copy_(other.seq_lens)
        out.fill_(math.nan)
        graph.replay()
        assert _same((out, lse), inputs.run(planner))


@pytest.mark.parametrize("name", ["grouped", "8 heads", "rows"])
def test_extra_lists(name: str) -> None:
    case = GPU_CASES[name]
    inputs, other = extra_inputs(replace(case, outside=()), DEVICE)
    planner = case.planner(DEVICE)
    plan, kv = inputs.plan(planner), planner.bind(other.kv, **other.scales)
    result = inputs.run(planner, plan, extra=(other.lists, kv))
    check_lists(inputs, result, other)
    own, out = planner.bind(inputs.kv, **inputs.scales), torch.full_like(result[0], math.nan)
    arguments = {} if inputs.sinks is None else {"sinks": inputs.sinks}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh()
        plan.run(*inputs.queries, own, out=out, extra=(other.lists, kv), **arguments)
    graph.replay()
    assert same_bits(out, result[0])


def test_two_lists_are_one() -> None:
    """Of one cache, in one list or in two."""
    case = replace(GPU_CASES["8 heads"], counts=None, outside=(), k=2000, out_dtype="float32")
    inputs, planner = make_inputs(case, DEVICE), case.planner(DEVICE)
    first, second = (
        jitattn.IndexLists(part.contiguous()) for part in inputs.lists.slots.split(1000, 1)
    )
    out, lse = inputs.run(planner)
    parts = replace(inputs, lists=first)
    two, two_lse = parts.run(planner, extra=(second, inputs.kv))
    torch.testing.assert_close(two, out, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(two_lse, lse, rtol=0, atol=1e-4)


def test_a_prefill_of_many_query_tokens() -> None:
    """More than plans are kept for."""
    case = ListCase(latent=16, num_tokens=5000, k=64, page_size=64, num_pages=50, counts=None)
    inputs = make_inputs(case, DEVICE)
    check_lists(inputs, inputs.run(case.planner(DEVICE)))
