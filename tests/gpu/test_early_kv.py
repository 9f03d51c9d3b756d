"""early_kv=True: what was complete may be read early, and what the previous kernel writes may not.

The keys and values of this step are NaN until a kernel right before the run writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import (
    D64,
    D128,
    D128_FLOAT,
    D192X128,
    E4M3,
    EVERY_LAYOUT,
    RAGGED,
    Case,
    of,
)
from tests.support.inputs import Inputs, make_inputs


def early(case: Case, **changes: object) -> jitattn.AttentionPlanner:
    return harness.planner_for(case, DEVICE, early_kv=True, **changes)


def slots_of(inputs: Inputs, request: int, positions: Tensor, which: int) -> Tensor:
    """Rows of ``rows_of`` in which positions of a request lie, in K (0) or V (1)."""
    case, size = inputs.case, inputs.case.page_size
    if case.page_table == "ragged":
        return positions + inputs.indptr[request]
    if case.page_table == "csr":
        ids = inputs.table[int(inputs.indptr[request]) :]
    else:
        ids = inputs.table[request]
    if case.page_table == "token":
        return ids[positions].long()
    if case.page_table == "separate":
        ids = ids[which]
    return ids[positions // size].long() * size + positions % size


def rows_of(cache: Tensor) -> Tensor:
    """A cache of contiguous pages, or a ragged one, as [slots, num_kv_heads, head_dim]."""
    return cache if cache.dim() == 3 else cache.flatten(0, 1)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_sms", [None, 5])
@pytest.mark.parametrize("case", [*EVERY_LAYOUT, D64, D192X128, E4M3], ids=str)
def test_results_are_those_without(case: Case, num_sms: int | None, batch_invariant: bool) -> None:
    for some in (
        replace(case, lengths=(5000, 17, 0, 900, 1), window_left=3000),
        of(case, (2, 5000), (1, 17), (0, 3), (100, 300), (3, 3)),
    ):
        inputs = make_inputs(some, DEVICE)
        changes = {"num_sms": num_sms, "batch_invariant": batch_invariant}
        want = harness.attend(inputs, harness.planner_for(some, DEVICE, **changes))
        harness.assert_same(harness.attend(inputs, early(some, **changes)), want)
        harness.check(some, *want, harness.expected(inputs))


# --- what the previous kernel writes --------------------------------------------------------------


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_a_kernel_that_lets_the_next_begin_writes_the_new_tokens(
    case: Case, num_queries: int
) -> None:
    """The outputs of long runs are the new keys and values of the next, which begins beside them.

    So it does what it may before they are done, and has to wait for them in time.
    """
    if case.page_table == "token" and num_queries > 1:
        pytest.skip("the slots of some tokens lie anywhere, and out is one tensor")
    long = of(case, (num_queries, 60_005), group_size=1)
    writer, reader = make_inputs(long, DEVICE), make_inputs(replace(long, seed=2), DEVICE)
    positions = torch.arange(60_005 - num_queries, 60_005, device=DEVICE)
    places = []
    for which, cache in enumerate(reader.cache):
        first = int(slots_of(reader, 0, positions, which)[0])
        places.append(rows_of(cache)[first : first + num_queries])
    results = []
    for planner in (harness.planner_for(long, DEVICE), early(long)):
        plans = [harness.plan_of(inputs, planner) for inputs in (writer, reader)]
        bound = [inputs.bind(planner) for inputs in (writer, reader)]
        out, lse = reader.new_out(), reader.new_lse()
        for _ in range(5 if DEVICE == "cuda" else 1):
            for place in places:
                place.fill_(math.nan)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            for place in places:
                plans[0].run(writer.q, bound[0], out=place)
            plans[1].run(reader.q, bound[1], out=out, lse=lse)
            assert bool(torch.isfinite(out).all())
            results.append((out.clone(), lse.clone()))
    for result in results[1:]:
        harness.assert_same(result, results[0])


def test_the_previous_kernel_writes_the_scales() -> None:
    """A tensor is read when the kernel runs, and no promise says that it was complete before."""
    writing = of(D128_FLOAT, (1, 60_005), group_size=1)
    reading = replace(E4M3, lengths=(60_005,), scales=None)
    writer, reader = make_inputs(writing, DEVICE), make_inputs(reading, DEVICE)
    scales = writer.new_out()
    assert scales.shape == (1, reading.num_kv_heads, 128)
    results = []
    for planner in (harness.planner_for(reading, DEVICE), early(reading)):
        kv = planner.bind(reader.cache, k_scale=scales[0, :, 0], v_scale=scales[0, :, 1])
        other = harness.planner_for(writing, DEVICE)
        plans, bound = (
            (harness.plan_of(writer, other), harness.plan_of(reader, planner)),
            writer.bind(other),
        )
        for _ in range(5 if DEVICE == "cuda" else 1):
            scales.fill_(math.nan)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            plans[0].run(writer.q, bound, out=scales)
            results.append(plans[1].run(reader.q, kv, return_lse=True))
    assert bool(torch.isfinite(results[0][0]).all())
    for result in results[1:]:
        harness.assert_same(result, results[0])


# --- layers in a graph ----------------------------------------------------------------------------

LONGEST, NUM_LAYERS = 3000, 4


@dataclass
class Layer:
    """A layer's tensors, the keys and values that each step brings, and where they belong."""

    inputs: Inputs
    kv: jitattn.types.BoundCache
    staged: tuple[Tensor, Tensor]
    slots: tuple[Tensor, Tensor]
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, inputs: Inputs, planner: jitattn.AttentionPlanner) -> Layer:
        count = sum(inputs.case.queries)
        rows = [rows_of(cache) for cache in inputs.cache]
        staged = tuple(torch.zeros_like(x[:1]).repeat(count, 1, 1) for x in rows)
        slots = tuple(torch.zeros(count, dtype=torch.int64, device=DEVICE) for _ in rows)
        kv = inputs.bind(planner)
        return cls(inputs, kv, staged, slots, inputs.new_out(), inputs.new_lse())

    def run(self, plan: jitattn.types.Plan) -> None:
        """Write this step's keys and values, and attend to them."""
        for cache, slots, staged in zip(self.inputs.cache, self.slots, self.staged, strict=True):
            rows_of(cache).index_copy_(0, slots, staged)
        plan.run(self.inputs.q, self.kv, out=self.out, lse=self.lse, **harness.extras(self.inputs))

    def prepare(self, lengths: list[int]) -> None:
        """Stage a step's keys and values; their slots hold NaN until it runs."""
        queries = self.inputs.case.queries
        for which, cache in enumerate(self.inputs.cache):
            pieces = [
                slots_of(self.inputs, b, torch.arange(n - q, n, device=DEVICE), which)
                for b, (q, n) in enumerate(zip(queries, lengths, strict=True))
            ]
            self.slots[which].copy_(torch.cat(pieces))
            self.staged[which].normal_()
            rows_of(cache)[self.slots[which]] = math.nan
        self.inputs.q.normal_()
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """What does ``step`` again: a graph, or itself where there are none."""
    if DEVICE != "cuda":
        step()
        return step
    return harness.captured(step).replay


def exchange_rows(inputs: Inputs) -> None:
    """Two requests change places in the table, if that has rows."""
    if inputs.case.page_table not in ("csr", "ragged"):
        inputs.table[[0, 1]] = inputs.table[[1, 0]]


@pytest.mark.parametrize(
    "q_lens", [(1, 1, 1, 1), (3, 1, 0, 2), (8, 1, 0, 5), (100, 1, 3, 60)], ids=str
)
@pytest.mark.parametrize("case", [*EVERY_LAYOUT, replace(D128, page_size=48)], ids=str)
def test_layers_of_a_graph(case: Case, q_lens: tuple[int, ...]) -> None:
    """Every step has other lengths, another schedule and other tables."""
    case = replace(case, lengths=(LONGEST,) * 4, q_lens=q_lens, group_size=2)
    planner, other = early(case), harness.planner_for(case, DEVICE)
    first = make_inputs(case, DEVICE)
    layers = [Layer.of(first, planner)]
    for _ in range(NUM_LAYERS - 1):  # the tables are those of all layers
        inputs = replace(first, cache=tuple(torch.randn_like(x) for x in first.cache))
        inputs.q = torch.randn_like(first.q)
        layers.append(Layer.of(inputs, planner))
    plan = harness.plan_of(first, planner)

    def step() -> None:
        plan.refresh()
        for layer in layers:
            layer.run(plan)

    replay = captured(step)
    rng = torch.Generator().manual_seed(1)
    for _ in range(6):
        most = torch.randint(100, LONGEST + 1, (4,), generator=rng).tolist()
        lengths = [max(n, q) for n, q in zip(most, q_lens, strict=True)]
        exchange_rows(first)
        first.seq_lens.copy_(torch.tensor(lengths))
        for layer in layers:
            layer.prepare(lengths)
        replay()
        for layer in layers:
            assert bool(torch.isfinite(layer.out).all())
            now = replace(layer.inputs, case=replace(case, lengths=tuple(lengths)))
            harness.assert_same((layer.out, layer.lse), harness.attend(now, other))


def test_schedules_and_runs_of_two_plans() -> None:
    """A schedule is read before the wait, so it has to be complete when a run begins."""
    cases = [
        replace(D128, lengths=(9000, 17, 0), seed=2),
        replace(RAGGED, lengths=(1, 20_000), seed=3),
    ]
    layers = [make_inputs(case, DEVICE) for case in cases]
    wants = [harness.attend(inputs) for inputs in layers]
    planners = [early(case) for case in cases]
    plans = [harness.plan_of(*pair) for pair in zip(layers, planners, strict=True)]
    bound = [inputs.bind(planner) for inputs, planner in zip(layers, planners, strict=True)]
    results = []
    for order in ((0, 1), (1, 0), (0, 0), (1, 1)) * 3:
        for i in order:
            plans[i].refresh()
        for i in order:
            results.append((plans[i].run(layers[i].q, bound[i], return_lse=True), wants[i]))
    for got, want in results:
        harness.assert_same(got, want)
