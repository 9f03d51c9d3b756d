"""Graphs, streams and the host: what is captured, what a replay reads, and that nothing waits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import D128, D128_CSR, D192X128, EVERY_LAYOUT, RAGGED, Case, of
from tests.support.inputs import Inputs, make_inputs

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="graphs and streams are the device's")


@dataclass
class Layer:
    """A plan, the buffers that its captured run reads, and those it writes."""

    inputs: Inputs
    planner: jitattn.AttentionPlanner
    plan: jitattn.types.Plan
    kv: object
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Layer:
        planner = harness.planner_for(inputs.case, DEVICE)
        plan = harness.plan_of(inputs, planner)
        kv = inputs.bind(planner)
        return cls(inputs, planner, plan, kv, inputs.new_out(), inputs.new_lse())

    def run(self) -> None:
        inputs = self.inputs
        self.plan.run(inputs.q, self.kv, out=self.out, lse=self.lse, **harness.extras(inputs))

    def step(self) -> None:
        self.plan.refresh()
        self.run()

    def eager(self) -> harness.Result:
        """A new plan of the same tensors, run now."""
        return harness.attend(self.inputs, self.planner)

    def forget(self) -> None:
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)


def captured(*layers: Layer) -> torch.cuda.CUDAGraph:
    """Capture refresh and run of each layer; warmed up once, so that nothing is left to load."""

    def step() -> None:
        for layer in layers:
            layer.step()

    return harness.captured(step)


def roomy(case: Case, batch_size: int, longest: int) -> Inputs:
    """Inputs of ``batch_size`` requests of ``longest`` tokens each: replays use less."""
    return make_inputs(replace(case, lengths=(longest,) * batch_size), DEVICE)


# --- replays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c31_captured_short_replayed_long(case: Case, batch_invariant: bool) -> None:
    """Captured at 2 tokens a request; then the longest, splits in between, padding, random."""
    case = replace(case, num_kv_heads=1, batch_invariant=batch_invariant, sinks="float32")
    inputs = roomy(case, 8, 8192)
    inputs.seq_lens.fill_(2)
    layer = Layer.of(inputs)
    graph = captured(layer)
    rng = torch.Generator().manual_seed(31)
    replays = [
        [1, 2, 16, 17, 4000, 8191, 8192, 5],
        [1] * 8,
        [0] * 8,
        [8192] * 8,
        [-1, 0, 8192, 0, -(2**31), 0, 0, 0],
        [2**31 - 1, 3, 8192, 0, 8193 + 10**6, 1, 2, 3],  # too long: NaN
        *(torch.randint(0, 8193, (8,), generator=rng).tolist() for _ in range(10)),
    ]
    for lengths in replays:
        inputs.seq_lens.copy_(torch.tensor(lengths))
        layer.forget()
        spoil_schedule(layer)
        graph.replay()
        harness.assert_same((layer.out, layer.lse), layer.eager())


def spoil_schedule(layer: Layer) -> None:
    """Overwrite what the last schedule left: a refresh must write all that a run reads."""
    for part in layer.plan.backend.launches:
        part.memory.fill_(0x7F)


def test_500_steps_of_growing_requests() -> None:
    """Requests grow by a token a step, finish, leave padding, and others take their rows.

    Two layers in one graph, with tables and lengths of their own batch; every step is bit-equal
    to an eager call, and every 50th within tolerance of the reference.
    """
    steps, batch_size, width = 500, 12, 64
    case = replace(D128, num_kv_heads=2, rows="int64")
    layers = [Layer.of(roomy(replace(case, seed=seed), batch_size, width * 16)) for seed in (0, 1)]
    lengths = layers[0].inputs.seq_lens
    layers[1].inputs.seq_lens = lengths
    layers[1] = Layer.of(layers[1].inputs)
    lengths.zero_()
    graph = captured(*layers)
    rng = torch.Generator().manual_seed(500)
    host = torch.zeros(batch_size, dtype=torch.int64)
    for step in range(steps):
        live = host > 0
        host[live] += 1
        finished = live & ((torch.rand(batch_size, generator=rng) < 0.02) | (host >= width * 16))
        host[finished] = 0
        started = (host == 0) & (torch.rand(batch_size, generator=rng) < 0.1)
        host[started] = torch.randint(1, 900, (int(started.sum()),), generator=rng)
        lengths.copy_(host)
        for layer in layers:
            exchange_rows(layer.inputs, step)
            layer.inputs.q.normal_()
            layer.forget()
        graph.replay()
        for layer in layers:
            harness.assert_same((layer.out, layer.lse), layer.eager())
            if step % 50 == 49:
                check_against_reference(layer, host.tolist())


def exchange_rows(inputs: Inputs, step: int) -> None:
    """Two requests swap their table rows: their row indices, or the rows themselves."""
    a, b = step % len(inputs.rows), (3 * step + 1) % len(inputs.rows)
    if step % 2:
        inputs.rows[[a, b]] = inputs.rows[[b, a]]
    else:
        first, second = inputs.rows[a], inputs.rows[b]
        row = inputs.table[first].clone()
        inputs.table[first] = inputs.table[second]
        inputs.table[second] = row


def check_against_reference(layer: Layer, lengths: list[int]) -> None:
    """Gather each request's tokens by its table, and compare."""
    inputs = layer.inputs
    pieces: list[list[Tensor]] = [[], []]
    for b, length in enumerate(lengths):
        ids = inputs.table[inputs.rows[b], : -(-length // 16)].long()
        for piece, cache in zip(pieces, inputs.cache, strict=True):
            piece.append(cache[ids].flatten(0, 1)[:length])
    k, v = (torch.cat(piece) for piece in pieces)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    case = replace(inputs.case, lengths=tuple(lengths))
    now = replace(inputs, case=case, k=k, v=v, kv_indptr=starts)
    harness.check(case, layer.out, layer.lse, harness.expected(now))


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_replays_read_the_tables_of_the_moment(case: Case) -> None:
    """Tables, caches, q and sinks are overwritten in place between replays."""
    case = replace(case, lengths=(3000, 17, 0, 800), sinks="float32", seed=2)
    layer = Layer.of(make_inputs(case, DEVICE))
    graph = captured(layer)
    mine = layer.inputs
    for seed in (4, 6, 8):  # even like 2: the same strides
        other = make_inputs(replace(case, seed=seed), DEVICE)
        if case.page_table in ("csr", "ragged"):
            # Random room between requests: bring the other one's tensors to the captured size.
            size = min(mine.table.shape[0], other.table.shape[0])
            rows = min(mine.cache[0].shape[0], other.cache[0].shape[0])
            if other.indptr[-1] > mine.indptr[-1] + 60 or rows < int(other.indptr[-1]):
                continue
            mine.table[:size].copy_(other.table[:size])
            mine.indptr.copy_(other.indptr)
        else:
            rows = mine.cache[0].shape[0]
            mine.table.copy_(other.table)
        for target, source in zip(mine.cache, other.cache, strict=True):
            target[:rows].copy_(source[:rows])
        mine.q.copy_(other.q)
        mine.sinks.copy_(other.sinks)
        layer.forget()
        graph.replay()
        harness.check(case, layer.out, layer.lse, harness.expected(other))


def test_two_plans_in_one_graph_and_two_graphs_in_turn() -> None:
    """Plans of one stream share partials and counters; each owns its schedule."""
    cases = [
        replace(D128, lengths=(5000, 17, 900), seed=0),
        replace(RAGGED, lengths=(1, 0, 7000, 3), seed=1, sinks="float32"),
        replace(D192X128, lengths=(4000, 100), seed=2, batch_invariant=True),
        replace(D128_CSR, lengths=(64,) * 40, seed=3),
    ]
    layers = [Layer.of(make_inputs(case, DEVICE)) for case in cases]
    wants = [layer.eager() for layer in layers]
    together = captured(*layers)
    apart = [captured(layer) for layer in layers]
    for graphs in ([together], apart, [*apart[::-1], together], [*apart, *apart]):
        for layer in layers:
            layer.forget()
        for graph in graphs:
            graph.replay()
        for layer, want in zip(layers, wants, strict=True):
            harness.assert_same((layer.out, layer.lse), want)


def test_two_plans_interleaved_eagerly() -> None:
    layers = [
        Layer.of(make_inputs(replace(D128, lengths=lengths, seed=seed), DEVICE))
        for seed, lengths in enumerate([(5000, 17), (3, 9000)])
    ]
    wants = [layer.eager() for layer in layers]
    for layer in layers:
        layer.plan.refresh()
    for layer in layers * 2:
        layer.forget()
        layer.run()
    for layer, want in zip(layers, wants, strict=True):
        harness.assert_same((layer.out, layer.lse), want)


def test_a_graph_without_refresh_keeps_its_lengths() -> None:
    case = replace(D128, lengths=(3000, 17, 0))
    layer = Layer.of(make_inputs(case, DEVICE))
    want = layer.eager()
    layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
    layer.inputs.seq_lens.fill_(5)
    layer.forget()
    graph.replay()
    harness.assert_same((layer.out, layer.lse), want)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_a_plan_snapshots_lengths(case: Case, batch_invariant: bool) -> None:
    """Lengths, offsets of a plan change after it: nothing happens until refresh."""
    case = replace(case, lengths=(3000, 17, 0, 64), batch_invariant=batch_invariant)
    layer = Layer.of(make_inputs(case, DEVICE))
    want = layer.eager()
    before = layer.inputs.seq_lens.clone()
    for garbage in (0, 1, 2**31 - 1, -5):
        layer.inputs.seq_lens.fill_(garbage)
        layer.forget()
        layer.run()
        harness.assert_same((layer.out, layer.lse), want)
    layer.inputs.seq_lens.copy_(before - 1)
    layer.step()
    shorter = replace(case, lengths=tuple(n - 1 for n in case.lengths))
    inputs = layer.inputs
    harness.assert_same((layer.out, layer.lse), harness.attend(replace(inputs, case=shorter)))


def test_the_length_tensor_may_be_freed_after_the_plan() -> None:
    """The plan keeps what refresh() reads, and the tables."""
    inputs = make_inputs(replace(D128, lengths=(3000, 17, 0)), DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(inputs.case, DEVICE)
    plan = planner.plan(jitattn.BlockTable(inputs.table.clone()), inputs.seq_lens.clone())
    junk = [torch.full((3,), 77, dtype=torch.int32, device=DEVICE) for _ in range(100)]
    plan.refresh()
    harness.assert_same(plan.run(inputs.q, planner.bind(inputs.given), return_lse=True), want)
    del junk


# --- streams --------------------------------------------------------------------------------------


def on_another_stream(test: Callable[[Case, str], None]) -> Any:
    """A test of requests in every layout on ``streams()[which]``."""
    cases = [replace(case, lengths=(3000, 17, 0, 800)) for case in EVERY_LAYOUT]
    test = pytest.mark.parametrize("case", cases, ids=list(map(str, EVERY_LAYOUT)))(test)
    return pytest.mark.parametrize("which", ["side", "external"])(test)


def streams() -> dict[str, torch.cuda.Stream]:
    own = torch.cuda.Stream()
    return {"side": own, "external": torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)}


@on_another_stream
def test_c29_everything_on_the_callers_stream(case: Case, which: str) -> None:
    """Values arrive on the stream behind a long wait: only work of that stream sees them."""
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    targets = [inputs.q, *inputs.cache, inputs.table, inputs.seq_lens]
    targets += [inputs.indptr] if inputs.indptr is not None else []
    filled = [x.clone() for x in targets]
    for tensor in targets:
        tensor.zero_()
    stream = streams()[which]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        harness.attend(inputs)  # allocates the stream's workspace, which may wait for the device
        torch.cuda._sleep(100_000_000)  # 50 ms and more
        for tensor, value in zip(targets, filled, strict=True):
            tensor.copy_(value)
        layer = Layer.of(inputs)
        layer.run()
    stream.synchronize()
    harness.assert_same((layer.out, layer.lse), want)


@pytest.mark.parametrize("which", ["side", "external"])
def test_c29_merge_on_the_callers_stream(which: str) -> None:
    outs = torch.randn(3, 50, 4, 64, device=DEVICE)
    lses = torch.randn(3, 50, 4, device=DEVICE)
    want = jitattn.merge_states(outs, lses)
    filled = outs.clone(), lses.clone()
    outs.zero_()
    lses.zero_()
    stream = streams()[which]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        outs.copy_(filled[0])
        lses.copy_(filled[1])
        got = jitattn.merge_states(outs, lses)
    stream.synchronize()
    harness.assert_same(got, want)


@on_another_stream
def test_c29_captured_on_another_stream(case: Case, which: str) -> None:
    """The plan was made here; the capture, its delay and its replays are on another stream."""
    inputs = make_inputs(case, DEVICE)
    layer = Layer.of(inputs)
    want = layer.eager()
    layer.step()
    stream = streams()[which]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.cuda._sleep(20_000_000)
        layer.step()
    q = inputs.q.clone()
    inputs.q.zero_()
    layer.forget()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs.q.copy_(q)
        graph.replay()
        result = layer.out.clone(), layer.lse.clone()
    stream.synchronize()
    harness.assert_same(result, want)


def test_c29_merge_in_a_graph() -> None:
    outs = torch.randn(3, 50, 4, 64, device=DEVICE)
    lses = torch.randn(3, 50, 4, device=DEVICE)
    jitattn.merge_states(outs, lses)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = jitattn.merge_states(outs, lses)
    outs.normal_()
    lses[1] = -torch.inf
    graph.replay()
    harness.assert_same(got, jitattn.merge_states(outs, lses))


def test_streams_side_by_side_have_workspaces_of_their_own() -> None:
    """Two streams, a plan on each, split requests on both, delays on one or the other."""
    layers, wants, sides = [], [], [torch.cuda.Stream(), torch.cuda.Stream()]
    for seed, stream in enumerate(sides):
        inputs = make_inputs(replace(D128, lengths=(20_000, 17, 900), seed=seed), DEVICE)
        wants.append(harness.attend(inputs))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            layers.append(Layer.of(inputs))
    torch.cuda.synchronize()
    for repeat in range(20):
        for layer, stream in zip(layers, sides, strict=True):
            with torch.cuda.stream(stream):
                layer.forget()
                if repeat % 3:
                    torch.cuda._sleep(100_000 * (repeat % 7))
                layer.step()
    torch.cuda.synchronize()
    for layer, want in zip(layers, wants, strict=True):
        harness.assert_same((layer.out, layer.lse), want)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "case", [replace(D128, lengths=(3000, 17)), of(D128, (100, 3000), (1, 5000))], ids=str
)
def test_a_plan_may_be_dropped_while_another_stream_runs_it(case: Case, own: bool) -> None:
    """Its memory is not given to the next tensors of the stream that it was made on."""
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    workspace = jitattn.Workspace(DEVICE) if own else None
    planner = jitattn.AttentionPlanner(
        **case.planner_arguments(), device=DEVICE, workspace=workspace
    )
    plan, kv = harness.plan_of(inputs, planner), planner.bind(inputs.given)
    out, lse = inputs.new_out(), inputs.new_lse()
    sizes = {part.memory.numel() for part in plan.backend.launches}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # 50 ms and more
        plan.run(inputs.q, kv, out=out, lse=lse)
    del plan, planner, workspace
    junk = [
        torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in sizes for _ in range(20)
    ]
    side.synchronize()
    harness.assert_same((out, lse), want)
    del junk


def test_a_workspace_given() -> None:
    inputs = make_inputs(replace(D128, lengths=(5000, 17)), DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(inputs.case, DEVICE, workspace=jitattn.Workspace(DEVICE))
    harness.assert_same(harness.attend(inputs, planner), want)


# --- the host -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_nothing_waits_for_the_device(case: Case, batch_invariant: bool) -> None:
    case = replace(
        case,
        lengths=(5000, 17, 900),
        sinks="bfloat16",
        rows="int64" if case.has_rows else None,
        batch_invariant=batch_invariant,
    )
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(case, DEVICE)
    out, lse = inputs.new_out(), inputs.new_lse()
    with harness.forbid_waiting():
        plan = planner.plan(inputs.pages(), inputs.seq_lens)
        kv = planner.bind(inputs.given)
        plan.refresh()
        plan.run(inputs.q, kv, out=out, lse=lse, sinks=inputs.sinks)
        plan.run(inputs.q, kv, pages=inputs.pages(), out=out, lse=lse, sinks=inputs.sinks)
    harness.assert_same((out, lse), want)


def test_merging_waits_for_nothing() -> None:
    outs, lses = torch.randn(3, 5, 4, 64, device=DEVICE), torch.randn(3, 5, 4, device=DEVICE)
    want = jitattn.merge_states(outs, lses)
    with harness.forbid_waiting():
        got = jitattn.merge_states(outs, lses)
    harness.assert_same(got, want)


def test_the_check_leaves_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """JITATTN_CHECK=1 waits for the device, so a capture goes without it."""
    monkeypatch.setenv("JITATTN_CHECK", "1")
    inputs = make_inputs(replace(D128, lengths=(3000, 17, 0)), DEVICE)
    planner = jitattn.AttentionPlanner(**inputs.case.planner_arguments(), device=DEVICE)
    plan, kv = planner.plan(inputs.pages(), inputs.seq_lens), planner.bind(inputs.given)
    layer = Layer(inputs, planner, plan, kv, inputs.new_out(), inputs.new_lse())
    want = layer.eager()
    graph = captured(layer)
    layer.forget()
    graph.replay()
    harness.assert_same((layer.out, layer.lse), want)


# --- threads --------------------------------------------------------------------------------------


def test_threads_share_a_planner() -> None:
    """Each thread plans and runs on a stream of its own, 50 times."""
    cases = [replace(D128, lengths=(3000 + 100 * i, 0, 17 * i), seed=i) for i in range(8)]
    layers = [make_inputs(case, DEVICE) for case in cases]
    wants = [harness.attend(inputs) for inputs in layers]
    planner = harness.planner_for(cases[0], DEVICE)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(inputs: Inputs, want: harness.Result) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(50):
                    result = harness.attend(inputs, planner)
                    stream.synchronize()
                    harness.assert_same(result, want)
        except BaseException as error:
            failures.append(error)

    in_threads([(work, inputs, want) for inputs, want in zip(layers, wants, strict=True)])
    assert not failures, failures[0]


def test_threads_construct_and_bind_at_once() -> None:
    """The first kernels of a planner, and the plain loader's, from many threads together."""
    inputs = make_inputs(replace(D192X128, lengths=(300, 17), cache="odd_strides"), DEVICE)
    want = harness.attend(inputs)
    torch.cuda.synchronize()
    results: list[harness.Result] = []
    shared = jitattn.AttentionPlanner(**inputs.case.planner_arguments(), device=DEVICE)

    def work(is_shared: bool) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            own = jitattn.AttentionPlanner(**inputs.case.planner_arguments(), device=DEVICE)
            results.append(harness.attend(inputs, shared if is_shared else own))
            torch.cuda.current_stream().synchronize()

    in_threads([(work, bool(i % 2)) for i in range(8)])
    assert len(results) == 8
    for result in results:
        harness.assert_same(result, want)


def in_threads(calls: list[tuple]) -> None:
    threads = [threading.Thread(target=call, args=arguments) for call, *arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
