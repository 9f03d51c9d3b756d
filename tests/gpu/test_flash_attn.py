"""Functions that plan for themselves, captured: a replay gives the bits of a call made then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.gpu.device import DEVICE
from tests.support.flash_attn_calls import FUNCTIONS, LENS, Function, Tensors, results
from tests.support.harness import forbid_waiting

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="graphs are the device's")


class Graph:
    """Calls of a function over tensors of their own, one after the other in a graph."""

    def __init__(self, function: Function, tensors: Sequence[Tensors], pool: object = None) -> None:
        self.function, self.tensors = function, tensors
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outs = [results(function, given) for given in tensors]

    def replay(self) -> list[Tensor]:
        """All results."""
        for outs in self.outs:
            for out in outs:
                out.fill_(float("nan"))
        self.graph.replay()
        return [out.clone() for outs in self.outs for out in outs]


def eager(function: Function, tensors: Sequence[Tensors]) -> list[Tensor]:
    return [out for given in tensors for out in results(function, given)]


def copied(tensors: Tensors) -> Tensors:
    other = Tensors(tensors.max_q_len, DEVICE)
    other.copy_from(tensors)
    return other


@pytest.mark.parametrize("name", FUNCTIONS)
def test_replays_give_what_calls_give(name: str) -> None:
    function = FUNCTIONS[name]
    tensors = [Tensors(function.max_q_len, DEVICE) for _ in range(2)]
    tensors[1].k_cache.mul_(0.5)
    for given in tensors:
        given.set_step(0)
    others = [copied(given) for given in tensors]
    eager(function, others)  # loads kernels
    with forbid_waiting():
        eager(function, others)
    graph = Graph(function, tensors)
    for step in (*range(len(LENS)), 0):
        for given in tensors:
            given.set_step(step)
        others = [copied(given) for given in tensors]
        want = eager(function, others)
        found = graph.replay()
        assert len(found) == len(want)
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)
            assert b.isfinite().any()
        for given, other in zip(tensors, others, strict=True):
            for a, b in zip(given.parts().values(), other.parts().values(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["new token", "cached", "chunks without blocks", "trtllm"])
def test_calls_give_the_definition(name: str) -> None:
    """Of the same call on the CPU."""
    function = FUNCTIONS[name]
    tensors, on_cpu = Tensors(function.max_q_len, DEVICE), Tensors(function.max_q_len, "cpu")
    for step in range(len(LENS)):
        for given in (tensors, on_cpu):
            given.set_step(step)
        pairs = zip(results(function, tensors), results(function, on_cpu), strict=True)
        for found, want in pairs:
            torch.testing.assert_close(found.cpu(), want, atol=2e-2, rtol=2e-2)


def test_graphs_of_one_pool_take_turns_with_calls() -> None:
    """As engines keep a graph for each batch size: they share memory, and calls have their own."""
    function = FUNCTIONS["cached"]
    tensors = [Tensors(function.max_q_len, DEVICE) for _ in range(3)]
    for given in tensors:
        given.set_step(0)
        results(function, given)
    first = Graph(function, tensors[:1])
    second = Graph(function, tensors[1:2], first.graph.pool())
    for step in (1, 2, 0):
        for given in tensors:
            given.set_step(step)
        want = [eager(function, [given]) for given in tensors]
        for graph, expected in ((second, want[1]), (first, want[0]), (second, want[1])):
            between = results(function, tensors[2])
            assert torch.equal(graph.replay()[0], expected[0])
            assert torch.equal(between[0], want[2][0])


def test_a_capture_that_would_load_kernels_says_so() -> None:
    function = FUNCTIONS["cached"]
    tensors = Tensors(function.max_q_len, DEVICE)
    tensors.set_step(0)
    tensors.q = tensors.q[..., :96]  # no such planner yet
    tensors.k_cache, tensors.v_cache = tensors.k_cache[..., :96], tensors.v_cache[..., :96]
    with (
        pytest.raises(ValueError, match="make such a call before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        tensors.lens.add_(0)  # torch warns of an empty graph
        results(function, tensors)
    torch.cuda.synchronize()
    assert torch.ones(1, device=DEVICE).item() == 1
