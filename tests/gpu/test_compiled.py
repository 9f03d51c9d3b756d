"""Layers under ``torch.compile`` on a card: the bits of eager calls, one graph, and captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.support.compiled import Case, layer, mla_case, new_planner


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(function: Callable[..., Any], backend: str) -> tuple[Callable[..., Any], Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    if backend == "inductor":
        pytest.importorskip("triton")
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("cache", ["tensor", "fp8-tensors"])
@pytest.mark.parametrize("max_q_len", [1, 5])
def test_a_layer(backend: str, cache: str, max_q_len: int) -> None:
    call, counter = compiled(layer, backend)
    case = Case.of(cache=cache, max_q_len=max_q_len, seed=1, device=DEVICE)
    planner = new_planner(case)
    twin = case.copied()
    bounds = [planner.bind(c.cache, k_scale=c.k_scale, v_scale=c.v_scale) for c in (case, twin)]
    plans = []
    for _ in range(4):
        plan = planner.plan(case.pages, case.seq_lens, case.qo_indptr, max_q_len=case.max_q_len)
        plans.append(plan)
        found = call(case.x, case.weights, case, bounds[0], plan)
        expected = layer(case.x, case.weights, twin, bounds[1], plan)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        if backend == "aot_eager":
            assert torch.equal(found, expected)
            assert torch.equal(case.bytes(), twin.bytes())
        case.seq_lens.add_(1).clamp_(max=12)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_layer_in_a_graph() -> None:
    """Plans are refreshed and compiled layers captured together; replays read other lengths."""
    call, _ = compiled(layer, "inductor")
    case = Case.of(seed=2, device=DEVICE)
    planner = new_planner(case)
    kv = planner.bind(case.cache)
    plan = planner.plan(case.pages, case.seq_lens)
    call(case.x, case.weights, case, kv, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh()
        out = call(case.x, case.weights, case, kv, plan)
    for _ in range(3):
        case.x.normal_()
        case.seq_lens.add_(1).clamp_(max=12)
        graph.replay()
        plan.refresh()
        assert torch.equal(out, call(case.x, case.weights, case, kv, plan))


@pytest.mark.parametrize("kind", ["one", "fp8"])
def test_latent_attention(kind: str) -> None:
    planner, plan, q, _, _, cache, _, scale = mla_case(kind, DEVICE)
    call, _ = compiled(lambda plan, kv: plan.run(*q, kv, return_lse=True), "aot_eager")
    expected = plan.run(*q, planner.bind(copy.deepcopy(cache), k_scale=scale), return_lse=True)
    found = call(plan, planner.bind(cache, k_scale=scale))
    assert all(map(torch.equal, found, expected))


def test_operators_are_as_declared() -> None:
    import jitattn.kernels.torch_ops  # noqa: F401 - it defines them

    case = Case.of(max_q_len=3, seed=3, device=DEVICE)
    plan = new_planner(case).plan(case.pages, case.seq_lens, case.qo_indptr, max_q_len=3)
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device=DEVICE)
    arguments = (
        plan.handle, case.q, [case.cache], None, None, None, [case.pages.table], "shared", None,
        None, None, out, lse,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.jitattn.attention.default, arguments)
