"""Batches that mix one, a few, hundreds and thousands of query tokens: values, bits and graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.gpu.test_graphs import Layer, captured
from tests.support import harness
from tests.support.cases import (
    CACHES_SHARED,
    D64,
    D128,
    D128_SEPARATE,
    D192X128,
    D256,
    D512,
    EVERY_LAYOUT,
    MASKED_D128,
    RAGGED,
    TWINS,
    WIDE,
    Case,
    mixed_cases,
)
from tests.support.inputs import ROW_VIEWS, Inputs, make_inputs
from tests.support.layouts import check_every_table
from tests.support.queries import row_starts

on_the_device = pytest.mark.skipif(DEVICE != "cuda", reason="the CPU refuses or has no graphs")
# Both kernels, splits in both, padding and requests without queries.
PAIRS = (
    *((1, 4097), (1, 1), (3, 0), (1, 16), (0, 255), (64, 12_000), (300, 333)),
    *((2, 5000), (90, 90), (5, 3), (1, -1)),
)


def of(case: Case, pairs: Sequence[tuple[int, int]] = PAIRS, **changes: object) -> Case:
    """The case with these (q_len, kv_len)."""
    q_lens, lengths = zip(*pairs, strict=True)
    return replace(case, q_lens=q_lens, lengths=lengths, **changes)


@pytest.mark.parametrize("case", mixed_cases(), ids=str)
def test_mixed(case: Case) -> None:
    harness.check_case(case, DEVICE)


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 8, 13, 16, 17, 40, 71])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 64, 65])
def test_where_the_kernels_take_over(q_len: int, group_size: int) -> None:
    """Rows of a decode tile, one more and one less, for every group size."""
    case = {True: D128, False: WIDE}[group_size <= 8]
    pairs = [(q_len, 40), (q_len, 700), (q_len, 3)]
    harness.check_case(of(case, pairs, group_size=group_size, num_kv_heads=1), DEVICE)


# --- tables, strides, placement: the same bits ----------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window_left", [-1, 500])
@pytest.mark.parametrize("case", TWINS, ids=str)
def test_every_table_layout(case: Case, window_left: int, batch_invariant: bool) -> None:
    check_every_table(of(case), DEVICE, window_left=window_left, batch_invariant=batch_invariant)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", [*CACHES_SHARED, "twice"])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D64], ids=str)
def test_cache_strides(case: Case, cache: str, kv_layout: str) -> None:
    harness.check_cache_strides(of(case), DEVICE, cache, kv_layout)


@pytest.mark.parametrize("case", [*EVERY_LAYOUT, D256, D512], ids=str)
def test_placement(case: Case) -> None:
    harness.check_placement(of(case, num_kv_heads=1), DEVICE)


@pytest.mark.parametrize("view", ROW_VIEWS)
def test_q_and_out_strides(view: str) -> None:
    harness.check_variation(of(D128, spare_rows=3), DEVICE, q_view=view, out_view=view)


def test_lse_strides() -> None:
    inputs = make_inputs(of(D128), DEVICE)
    want = harness.attend(inputs)
    lse = torch.full((16, inputs.q.shape[0], 2), 7.0, device=DEVICE)
    view = lse[: inputs.case.num_qo_heads, :, 0].T
    harness.attend(inputs, lse=view)
    assert harness.same_bits(view, want[1])
    assert bool((lse[..., 1] == 7).all())


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_maxima_do_not_matter(case: Case, batch_invariant: bool) -> None:
    case = of(case, batch_invariant=batch_invariant)
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE)
    kv = planner.bind(inputs.given)
    want = harness.attend(inputs)
    for max_q_len in (300, 301, 1000, 20_000):
        for max_kv_len in (12_000, 2**31 - 1):
            plan = planner.plan(
                *(inputs.pages(), inputs.seq_lens, inputs.qo_indptr),
                max_q_len=max_q_len,
                max_kv_len=max_kv_len,
            )
            harness.assert_same(
                plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs)), want
            )


def test_one_token_each_with_offsets_or_without() -> None:
    case = replace(D128, lengths=(4097, 1, 0, 16, 9000), sinks="float32")
    want = harness.attend(make_inputs(case, DEVICE))
    harness.assert_same(harness.attend(make_inputs(replace(case, q_lens=(1,) * 5), DEVICE)), want)


# --- rows that are no request's, and requests that are too long -----------------------------------


@pytest.mark.parametrize("spare_rows", [1, 3, 64, 5000])
@pytest.mark.parametrize("case", [D128, D64, D192X128, D512, MASKED_D128, RAGGED], ids=str)
def test_rows_past_the_last_request(case: Case, spare_rows: int) -> None:
    """Out 0 and lse -inf, whatever q holds, and with a sink too."""
    case = of(case, spare_rows=spare_rows, sinks="float32")
    inputs = make_inputs(case, DEVICE)
    out, lse = harness.attend(inputs)
    harness.check(case, out, lse, harness.expected(inputs))
    end = sum(case.queries)
    assert bool((out[end:] == 0).all())
    assert bool((lse[end:] == -torch.inf).all())


def test_a_batch_of_nothing() -> None:
    """Requests without queries, requests without keys, and no request at all."""
    for pairs in ([(0, 0)], [(0, 100), (0, -1)], [(4, 0)], [(0, 300)] * 200):
        harness.check_case(of(D128, pairs, spare_rows=7), DEVICE)
        harness.check_case(of(D128, pairs, spare_rows=7, sinks="float32"), DEVICE)


@on_the_device
@pytest.mark.parametrize("num_missing", [1, 5, 80, 200, 463])
def test_rows_that_q_lacks(num_missing: int) -> None:
    """The device can't refuse offsets beyond q: what is there is right, nothing else is written."""
    inputs = make_inputs(of(D128), DEVICE)
    want = harness.attend(inputs)
    num_tokens = inputs.q.shape[0] - num_missing
    wide = torch.full_like(want[0], -1234.0)
    lse = torch.full_like(want[1], -1234.0)
    plan = harness.plan_of(inputs, harness.planner_for(inputs.case, DEVICE))
    plan.run(inputs.q[:num_tokens], inputs.given, out=wide[:num_tokens], lse=lse[:num_tokens])
    harness.assert_same(
        (wide[:num_tokens], lse[:num_tokens]), (want[0][:num_tokens], want[1][:num_tokens])
    )
    assert bool((wide[num_tokens:] == -1234).all())
    assert bool((lse[num_tokens:] == -1234).all())


@on_the_device
@pytest.mark.parametrize("spare_rows", [0, 9])
@pytest.mark.parametrize("max_q_len", [1, 2, 3, 4, 5, 63, 64, 299])
@pytest.mark.parametrize("case", [D128, WIDE, D64, D256, D512, MASKED_D128, RAGGED], ids=str)
def test_too_many_queries_are_nan_and_harm_nobody(
    case: Case, max_q_len: int, spare_rows: int
) -> None:
    case = of(case, spare_rows=spare_rows, num_kv_heads=1)
    inputs = make_inputs(case, DEVICE)
    want = harness.expected(inputs)
    planner = harness.planner_for(case, DEVICE)
    plan = harness.plan_of(inputs, planner, max_q_len=max_q_len)
    out, lse = plan.run(inputs.q, inputs.given, return_lse=True, **harness.extras(inputs))
    starts = row_starts(case)
    for request, q_len in enumerate(case.queries):
        if q_len > max_q_len:
            rows = slice(starts[request], starts[request + 1])
            assert bool(torch.isnan(out[rows]).all())
            assert bool(torch.isnan(lse[rows]).all())
            out[rows], lse[rows] = want.out[rows].to(out.dtype), want.lse[rows].float()
    harness.check(case, out, lse, want)


@on_the_device
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_too_long_requests_are_nan_and_harm_nobody(case: Case) -> None:
    """A length beyond the table, for each query length in turn."""
    case = of(case, num_kv_heads=1)
    inputs = make_inputs(case, DEVICE)
    want = harness.expected(inputs)
    starts, lengths = row_starts(case), inputs.seq_lens.clone()
    for request, q_len in enumerate(case.queries):
        for length in (2**31 - 1, 1_000_000):
            inputs.seq_lens = lengths.clone()
            inputs.seq_lens[request] = length
            out, lse = harness.attend(inputs)
            rows = slice(starts[request], starts[request + 1])
            assert bool(torch.isnan(out[rows]).all()) or q_len == 0
            assert bool(torch.isnan(lse[rows]).all()) or q_len == 0
            out[rows], lse[rows] = want.out[rows].to(out.dtype), want.lse[rows].float()
            harness.check(case, out, lse, want)


# --- batch_invariant ------------------------------------------------------------------------------

INVARIANT = (
    D128,
    WIDE,
    D64,
    D256,
    D192X128,
    RAGGED,
    MASKED_D128,
    replace(D128, page_table="csr"),
    replace(D128, page_table="token", window_left=1000),
    replace(D128, page_table="separate", sinks="float32"),
)
INVARIANT_PAIRS = (
    *((1, 300), (2, 20_000), (3, 257), (16, 4097), (33, 9000), (64, 64), (65, 65), (300, 1000)),
    *((1, 0), (0, 40), (700, 700), (5, 2), (129, 12_345), (2, 512), (1, 20_000)),
    *((4, 513), (1, 1025), (2, 8193)),
)


def picked(inputs: Inputs, picks: Sequence[int]) -> Inputs:
    """A batch of some requests of ``inputs`` in this order, over the same cache and table."""
    case, device = inputs.case, inputs.device
    starts = row_starts(case)
    rows = [row for b in picks for row in range(starts[b], starts[b + 1])]
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    cut = replace(
        inputs,
        case=replace(
            case,
            lengths=tuple(case.lengths[b] for b in picks),
            q_lens=tuple(case.queries[b] for b in picks),
            out_view="contiguous",
        ),
        q=inputs.q[index],
        seq_lens=inputs.seq_lens[list(picks)],
    )
    lengths = torch.tensor(cut.case.queries, device=device)
    cut.qo_indptr = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    if inputs.mask is not None:
        cut.mask = replace(inputs.mask, given=inputs.mask.given[index])
    if inputs.indptr is None:
        cut.table, cut.rows = inputs.table[list(picks)], None
    else:
        (request,) = picks
        begin, end = inputs.indptr[request : request + 2].tolist()
        cut.indptr = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        if case.page_table == "csr":
            cut.table = inputs.table[begin:end]
        else:
            cut.cache = tuple(x[begin:end] for x in inputs.cache)
    return cut


def rows_of(inputs: Inputs, result: harness.Result, picks: Sequence[int]) -> harness.Result:
    starts = row_starts(inputs.case)
    rows = [row for b in picks for row in range(starts[b], starts[b + 1])]
    return result[0][rows], result[1][rows]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_invariant_requests_alone_and_together(case: Case, num_kv_heads: int) -> None:
    """A request alone has the bits that it has among others, wherever it stands."""
    case = of(case, INVARIANT_PAIRS, batch_invariant=True, num_kv_heads=num_kv_heads)
    inputs = make_inputs(case, DEVICE)
    together = harness.attend(inputs)
    harness.check(case, *together, harness.expected(inputs))
    for request, q_len in enumerate(case.queries):
        if q_len:
            mine = rows_of(inputs, together, [request])
            harness.assert_same(harness.attend(picked(inputs, [request])), mine)


@pytest.mark.parametrize("case", [D128, WIDE, D192X128, D256, MASKED_D128], ids=str)
def test_invariant_over_random_batches_and_orders(case: Case) -> None:
    rng = random.Random(200)
    case = of(case, INVARIANT_PAIRS, batch_invariant=True, num_kv_heads=2)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    for _ in range(40):
        picks = rng.choices(range(len(INVARIANT_PAIRS)), k=rng.choice((2, 3, 7, 20, 50)))
        if max(case.queries[b] for b in picks) == 0:
            continue
        harness.assert_same(harness.attend(picked(inputs, picks)), rows_of(inputs, want, picks))


@pytest.mark.parametrize("num_sms", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("case", [D128, WIDE, D256, RAGGED, D192X128], ids=str)
def test_invariant_over_shares_of_the_card(case: Case, num_sms: int) -> None:
    case = of(case, INVARIANT_PAIRS, batch_invariant=True)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    harness.assert_same(
        harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms)), want
    )


def test_invariant_with_many_requests_in_a_slot() -> None:
    rng = random.Random(7)
    pairs = [(rng.choice((1, 2, 5, 40)), rng.choice((0, 1, 300, 900, 2000))) for _ in range(500)]
    case = of(D128, pairs, num_kv_heads=1, batch_invariant=True)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    harness.check(case, *want, harness.expected(inputs))
    for num_sms in (1, 3, 60):
        harness.assert_same(
            harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms)), want
        )


# --- graphs ---------------------------------------------------------------------------------------


def overwrite(inputs: Inputs, pairs: Sequence[tuple[int, int]]) -> None:
    """Write other lengths and offsets in place."""
    q_lens, lengths = (torch.tensor(x) for x in zip(*pairs, strict=True))
    inputs.seq_lens.copy_(lengths)
    inputs.qo_indptr.copy_(torch.cat((q_lens.new_zeros(1), q_lens.cumsum(0))))


def replays_are_eager(layer: Layer, replays: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Each replay has the bits of a new plan that is run now, with the captured maxima."""
    graph = captured(layer)
    inputs = layer.inputs
    max_q_len = max(inputs.case.queries)
    for pairs in replays:
        overwrite(inputs, pairs)
        inputs.q.normal_()
        layer.forget()
        for part in layer.plan.backend.launches:
            part.memory.fill_(0x7F)
        graph.replay()
        plan = harness.plan_of(inputs, layer.planner, max_q_len=max_q_len)
        kv = layer.planner.bind(inputs.given)
        want = plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs))
        harness.assert_same((layer.out, layer.lse), want)
        starts = [0]
        for q_len, _ in pairs:
            starts.append(starts[-1] + max(q_len, 0))
        assert bool((layer.out[starts[-1] :] == 0).all())


def random_split(rng: random.Random, total: int, parts: int) -> list[int]:
    cuts = sorted(rng.randint(0, total) for _ in range(parts - 1))
    edges = [0, *cuts, total]
    return [edges[i + 1] - edges[i] for i in range(parts)]


@on_the_device
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", [*EVERY_LAYOUT, D64, D256, D512, MASKED_D128], ids=str)
def test_c31_prefill_captured_and_replayed(case: Case, batch_invariant: bool) -> None:
    """64 query tokens as 8 x 8; replayed as seven ones and 57, and as anything else."""
    # Room for 57 query tokens a request in the plan, and 8192 keys in the table.
    case = of(
        case, [(57, 8192)] * 8, num_kv_heads=1, batch_invariant=batch_invariant, sinks="float32"
    )
    inputs = make_inputs(case, DEVICE)
    inputs.q = inputs.q[:64].clone()
    if inputs.mask is not None:
        inputs.mask = replace(inputs.mask, given=inputs.mask.given[:64])
    overwrite(inputs, [(8, 8)] * 8)
    layer = Layer.of(inputs)
    rng = random.Random(31)
    lengths = (1, 2, 16, 17, 4000, 8191, 8192, 57)
    replays = [
        [(8, n) for n in lengths],
        list(zip([1] * 7 + [57], lengths, strict=True)),
        [(0, 0)] * 7 + [(57, 8192)],
        [(0, 300)] * 8,
        [(1, 1)] * 8,
        [(8, 8192)] * 8,
        [(8, -1), (0, 0), (56, 3)] + [(0, 5)] * 5,
    ]
    for _ in range(10):
        q_lens = random_split(rng, rng.randint(1, 57), 8)
        replays.append([(q, rng.choice((0, q, rng.randint(0, 8192)))) for q in q_lens])
    replays_are_eager(layer, replays)


@on_the_device
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, WIDE], ids=str)
def test_a_mixed_batch_captured_and_replayed(case: Case) -> None:
    """60 decode requests and 4 prompts of 1k tokens; then others of the batch hold the prompts."""
    rng = random.Random(64)
    batch = [(1, rng.randint(1, 3000)) for _ in range(60)]
    batch += [(1024, 1024), (1024, 3000), (1024, 1025), (1024, 2048)]
    inputs = make_inputs(of(case, [(q, 3000) for q, _ in batch]), DEVICE)
    overwrite(inputs, batch)
    layer = Layer.of(inputs)
    replays = [batch, batch[::-1], [(1, 3000)] * 64, [(1024, 3000)] * 4 + [(0, 0)] * 60]
    for _ in range(8):
        q_lens = random_split(rng, rng.randint(64, 4000), 64)
        replays.append([(min(q, 1024), rng.randint(0, 3000)) for q in q_lens])
    replays_are_eager(layer, replays)


@on_the_device
def test_replays_against_the_reference() -> None:
    """Not only what an eager call gives: the right values."""
    case = of(D128, [(100, 900), (1, 900), (4, 900), (30, 900)], num_kv_heads=2)
    layer = Layer.of(make_inputs(case, DEVICE))
    graph = captured(layer)
    for q_lens in ((100, 1, 4, 30), (1, 100, 30, 4), (0, 3, 100, 2)):
        now = replace(case, q_lens=q_lens, spare_rows=135 - sum(q_lens))
        overwrite(layer.inputs, [(q, 900) for q in q_lens])
        layer.forget()
        graph.replay()
        harness.check(now, layer.out, layer.lse, harness.expected(replace(layer.inputs, case=now)))


@on_the_device
def test_two_plans_in_one_graph() -> None:
    """Decode and mixed plans of one stream share partials and counters."""
    layers = [
        Layer.of(make_inputs(case, DEVICE))
        for case in (
            replace(D128, lengths=(5000, 17, 900)),
            of(D128, seed=1),
            of(D256, num_kv_heads=1, batch_invariant=True),
            of(MASKED_D128, seed=2),
        )
    ]
    wants = [layer.eager() for layer in layers]
    graph = captured(*layers)
    for layer in layers:
        layer.forget()
    graph.replay()
    for layer, want in zip(layers, wants, strict=True):
        harness.assert_same((layer.out, layer.lse), want)


@on_the_device
def test_nothing_waits_for_the_device_and_nothing_is_allocated() -> None:
    inputs = make_inputs(of(MASKED_D128, sinks="bfloat16", spare_rows=3), DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(inputs.case, DEVICE)
    out, lse = inputs.new_out(), inputs.new_lse()
    with harness.forbid_waiting():
        plan = harness.plan_of(inputs, planner)
        kv = planner.bind(inputs.given)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        plan.refresh()
        plan.run(inputs.q, kv, out=out, lse=lse, **harness.extras(inputs))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    harness.assert_same((out, lse), want)


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_a_plan_snapshots_lengths_and_offsets(case: Case) -> None:
    inputs = make_inputs(of(case), DEVICE)
    planner = harness.planner_for(inputs.case, DEVICE)
    plan, kv = harness.plan_of(inputs, planner), planner.bind(inputs.given)
    want = harness.attend(inputs)
    inputs.qo_indptr[1:] = 0
    inputs.seq_lens.fill_(3)
    harness.assert_same(plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs)), want)


@on_the_device
def test_c29_everything_on_the_callers_stream() -> None:
    """Offsets, lengths, tables, masks and values arrive behind a long wait on a side stream."""
    inputs = make_inputs(of(MASKED_D128), DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(inputs.case, DEVICE)
    targets = [inputs.q, *inputs.cache, inputs.table, inputs.seq_lens, inputs.qo_indptr]
    targets.append(inputs.mask.given)
    filled = [x.clone() for x in targets]
    for tensor in targets:
        tensor.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        harness.plan_of(
            inputs, planner
        )  # allocates the stream's workspace, which may wait for the device
        torch.cuda._sleep(100_000_000)  # 50 ms and more
        for tensor, value in zip(targets, filled, strict=True):
            tensor.copy_(value)
        result = harness.attend(inputs, planner)
    stream.synchronize()
    harness.assert_same(result, want)


def test_reference_backend_on_the_device() -> None:
    """Too many queries are NaN there too."""
    case = of(D128, [(3, 40), (1, 300), (9, 9)], num_kv_heads=1, spare_rows=2)
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE, backend="reference")
    harness.check(case, *harness.attend(inputs, planner), harness.expected(inputs))
    if DEVICE == "cuda":
        plan = planner.plan(inputs.pages(), inputs.seq_lens, inputs.qo_indptr, max_q_len=3)
        out = plan.run(inputs.q, inputs.given)
        assert bool(torch.isnan(out[4:13]).all())
        assert bool(torch.isfinite(out[:4]).all())


def test_attention_for_notebooks() -> None:
    case = of(MASKED_D128, sinks="float32", call="returned")
    inputs = make_inputs(case, DEVICE)
    got = jitattn.attention(
        *(inputs.q, inputs.cache, inputs.pages(), inputs.seq_lens, inputs.qo_indptr),
        max_q_len=max(case.queries),
        sinks=inputs.sinks,
        custom_mask=inputs.mask.given,
        return_lse=True,
    )
    harness.assert_same(got, harness.attend(inputs))
