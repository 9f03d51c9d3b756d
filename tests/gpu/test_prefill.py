"""The handed cases of tests/gpu/test_cases.py at every query length, and prompts cut in chunks.

Lengths are chosen for both kernels: a few query tokens fill a decode tile, more take the other.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE
from tests.support import cases, harness
from tests.support.inputs import address_probe, make_inputs, random_tokens, uniform_probe
from tests.support.queries import Rows, request_and_place

FAMILIES = (
    cases.D64,
    cases.D128,
    cases.D128_FP16,
    cases.D128_SEPARATE,
    cases.D128_PAGE_3,
    cases.PAGE_1,
    cases.WIDE,
    cases.D192X128,
    cases.D256,
    cases.D512,
)


def check_counts(case: cases.Case, lse: Tensor) -> None:
    """exp(lse) of a uniform probe is the number of keys that each row sees."""
    counted = lse.double().exp()
    want = Rows.of(case, lse.device).num_keys.double()[:, None].expand_as(counted)
    torch.testing.assert_close(counted, want, rtol=1e-5, atol=0)


# --- C01: K and V interleaved inside each page ----------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 4, 37])
@pytest.mark.parametrize("target", [0, 15, 16, 36])
@pytest.mark.parametrize("cache", ["interleaved", "layer_inside", "one_hnd", "unequal", "packed"])
def test_c01_interleaved_pools(cache: str, target: int, q_len: int) -> None:
    case = replace(cases.of(cases.D64, (q_len, 37), (2 * q_len, 60)), cache=cache, seed=target)
    tokens = address_probe(case, DEVICE, [target, target])
    inputs = make_inputs(case, DEVICE, tokens)
    result = harness.attend(inputs)
    assert harness.check_addresses(inputs, result[0], [target, target]) > 0
    plain = replace(case, cache="pair_nhd")
    harness.assert_same(result, harness.attend(make_inputs(plain, DEVICE, tokens)))


# --- C04: size-1 dimensions with arbitrary strides ------------------------------------------------


@pytest.mark.parametrize("head_stride", [64, 0, 3, 2**40])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_c04_one_kv_head(kv_layout: str, head_stride: int) -> None:
    case = cases.of(cases.D64, (5, 50), (70, 90), (1, 7))
    case = replace(case, num_kv_heads=1, kv_layout=kv_layout)
    harness.check_head_stride(make_inputs(case, DEVICE), head_stride)


@pytest.mark.parametrize("q_len", [1, 5, 100])
def test_c04_one_request(q_len: int) -> None:
    """Q of a fused projection; strides of the batch mean nothing."""
    case = replace(cases.of(cases.D128, (q_len, 110)), num_kv_heads=8)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    fused = torch.full((q_len, 4608), math.nan, dtype=torch.bfloat16, device=DEVICE)
    fused[:, :4096] = inputs.q.flatten(1)
    inputs.q = fused.as_strided((q_len, 32, 128), (4608, 128, 1))
    inputs.table = inputs.table.contiguous()[:, :7].as_strided((1, 7), (123, 1))
    inputs.seq_lens = inputs.seq_lens.as_strided((1,), (77,))
    harness.assert_same(harness.attend(inputs), want)


# --- C07: page offsets beyond 32 bits -------------------------------------------------------------


@pytest.mark.parametrize("q_len", [2, 5, 32])
@pytest.mark.parametrize("target", [3, 16])
def test_c07_high_page_ids(large_pool: Tensor, target: int, q_len: int) -> None:
    """The target is in the high page or in the low one after it."""
    assert harness.check_high_pages(cases.D128, target, q_len, large_pool) > 0


# --- C08: garbage in unused table entries ---------------------------------------------------------


@pytest.mark.parametrize("window_left", [-1, 30])
@pytest.mark.parametrize("q_len", [1, 3, 64])
@pytest.mark.parametrize(
    "case",
    [cases.D128, cases.D128_SEPARATE, cases.D128_PAGE_3, cases.D128_CSR, cases.D128_TOKEN],
    ids=str,
)
def test_c08_unused_entries(case: cases.Case, q_len: int, window_left: int) -> None:
    lengths = (1, 16, 17, 95, 9000)  # the last is split
    case = replace(cases.of(case, *((q_len, n) for n in lengths)), window_left=window_left)
    inputs = make_inputs(case, DEVICE)
    for cache in inputs.cache:  # a page of Inf, which no request owns
        cache[inputs.dead_page] = torch.inf
    table, unit = inputs.table, case.page_size if case.page_table == "token" else 1
    inputs.table = table.masked_fill(inputs.garbage, 0)
    want = harness.attend(inputs)
    harness.check(case, *want, harness.expected(inputs))
    pool_size = inputs.cache[0].shape[0]
    for garbage in (-1, 2**31 - 1, pool_size * unit, inputs.dead_page * unit):
        inputs.table = table.masked_fill(inputs.garbage, garbage)
        harness.assert_same(harness.attend(inputs), want)


# --- C10: separate K and V page tables ------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 4, 90])
@pytest.mark.parametrize("cache", ["pair_nhd", "twice"])
def test_c10_out_is_the_v_id(cache: str, q_len: int) -> None:
    """V page p holds p in every element; one live page a request."""
    case = cases.of(cases.D128_SEPARATE, (q_len, 16), (q_len, 1), (q_len, 13))
    case = replace(case, num_kv_heads=2, cache=cache, causal=False)
    inputs = make_inputs(case, DEVICE, uniform_probe(case, DEVICE))
    v = inputs.cache[1]
    live = inputs.table[:, 1, 0].long()
    v[live] = live.to(v.dtype)[:, None, None, None].expand(-1, *v.shape[1:])
    out, lse = harness.attend(inputs)
    rows = live.to(out.dtype).repeat_interleave(q_len)
    assert torch.equal(out, rows[:, None, None].expand_as(out))
    check_counts(case, lse)


@pytest.mark.parametrize("q_len", [1, 4, 90])
def test_c10_batch_stride(q_len: int) -> None:
    """B 3, M 5, strides (17, 6, 1) cut out of a larger table."""
    case = cases.of(cases.D128_SEPARATE, (q_len, 70), (q_len, 1), (q_len, 33))
    inputs = make_inputs(replace(case, num_kv_heads=2), DEVICE)
    large = torch.full((60,), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    cut = large.as_strided((3, 2, 5), (17, 6, 1), 2)
    cut.copy_(inputs.table[..., :5])
    inputs.table = cut
    harness.check(inputs.case, *harness.attend(inputs), harness.expected(inputs))


# --- C12: lanes after the end enter the softmax ---------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len", [1, 5, 64, 200])
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_c12_lengths_that_are_no_multiple(case: cases.Case, q_len: int, causal: bool) -> None:
    lengths = (1, 17, 63, 64, 65, 127, 129, 255, 257, 1025)
    case = replace(cases.of(case, *((q_len, n) for n in lengths)), causal=causal)
    q, k, v = uniform_probe(case, DEVICE)
    out, lse = harness.attend(make_inputs(case, DEVICE, (q, k, torch.ones_like(v))))
    sees = Rows.of(case, DEVICE).num_keys > 0
    assert bool((out[sees] == 1).all())
    assert bool((out[~sees] == 0).all())
    check_counts(case, lse)


# --- C13: NaN in slots that must not count --------------------------------------------------------


@pytest.mark.parametrize("window_left", [-1, 20])
@pytest.mark.parametrize("q_len", [1, 4, 64])
@pytest.mark.parametrize("case", [*FAMILIES, cases.SOFT_CAP, cases.RAGGED], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_c13_dead_slots(case: cases.Case, q_len: int, window_left: int, poison: float) -> None:
    case = cases.of(case, (q_len, 13), (q_len, 17), (q_len, 70), (q_len, 3001))
    inputs = make_inputs(replace(case, window_left=window_left), DEVICE)
    harness.assert_dead_slots_do_not_count(inputs, poison)


@pytest.mark.parametrize("q_len", [1, 4, 64, 257])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_c13_tokens_that_left_the_window(poison: float, q_len: int) -> None:
    """(c) The first key that the first row sees shares page and tile with dead ones."""
    case = replace(cases.of(cases.D128_PAGE_32, (q_len, 4352)), num_kv_heads=2)
    first = max(0, 4352 - q_len - 4094)
    for dead in (range(first - 1, first), range(first), range(first // 32 * 32)):
        if first > 0:
            harness.check_left_tokens(case, dead, poison, DEVICE)


# --- C15: sinks with a tiny window, and their dtype -----------------------------------------------


@pytest.mark.parametrize("num_sms", [None, 1, 4])
@pytest.mark.parametrize("q_len", [1, 3, 100])
@pytest.mark.parametrize("window_left", [-1, 0, 3, 127])
def test_c15_every_score_is_minus_200(window_left: int, q_len: int, num_sms: int | None) -> None:
    case = cases.of(cases.D64, *((q_len, n) for n in (1, 5, 200, 4000)))
    case = replace(case, window_left=window_left, sm_scale=0.125, num_kv_heads=2, sinks="float32")
    lse = harness.check_scores_of_minus_200(case, DEVICE, num_sms)
    without_sink = Rows.of(case, DEVICE).num_keys.double().log() - 200
    torch.testing.assert_close(lse[:, 6].double(), without_sink, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "bfloat16-column"])
def test_c15_sink_dtypes_are_converted_exactly(dtype: str) -> None:
    case = replace(cases.of(cases.D64, (70, 90), (3, 40), (9, 0), (1, 3)), sinks=dtype)
    inputs = make_inputs(case, DEVICE)
    got = harness.attend(inputs)
    inputs.sinks = inputs.sinks.float().contiguous()
    harness.assert_same(harness.attend(inputs), got)
    harness.check(inputs.case, *got, harness.expected(inputs))


def test_c15_minus_infinity_is_no_sink() -> None:
    case = replace(cases.of(cases.D64, (70, 90), (3, 9000), (9, 0)), sinks="float32")
    inputs = make_inputs(case, DEVICE)
    inputs.sinks = torch.full_like(inputs.sinks, -torch.inf)
    got = harness.attend(inputs)
    inputs.case, inputs.sinks = replace(inputs.case, sinks=None), None
    harness.assert_same(harness.attend(inputs), got)


# --- C16: what window_left means ------------------------------------------------------------------

WINDOWS = (-1, 0, 1, 15, 16, 63, 64, 127, 128, 298, 299, 300, 10**9, 2**31 - 1, 2**31)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", WINDOWS)
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_c16_visible_keys(case: cases.Case, window_left: int, causal: bool) -> None:
    case = cases.of(case, (300, 300), (5, 300), (1, 64))
    case = replace(case, window_left=window_left, causal=causal)
    inputs, out, lse = harness.uniform(case, DEVICE)
    check_counts(case, lse)
    if causal:
        position = torch.arange(300, device=DEVICE, dtype=torch.float64)
        want = position + 1 if window_left < 0 else position.clamp(max=window_left) + 1
        counted = lse[:300].double().exp()
        torch.testing.assert_close(counted, want[:, None].expand_as(counted), rtol=1e-5, atol=0)
    if window_left == 0 and causal:
        own = inputs.v[:300].repeat_interleave(case.group_size, dim=1)
        assert torch.equal(out[:300], own)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_c16_a_window_of_every_key_is_none(case: cases.Case) -> None:
    case = cases.of(case, (300, 300), (5, 300), (1, 64))
    tokens = random_tokens(case, DEVICE)
    want = harness.attend(make_inputs(case, DEVICE, tokens))
    for window_left in (299, 300, 10**9, 2**31 - 1):
        windowed = replace(case, window_left=window_left)
        harness.assert_same(harness.attend(make_inputs(windowed, DEVICE, tokens)), want)


@pytest.mark.parametrize("window_left", [-1, 0, 16, 127])
@pytest.mark.parametrize("case", [*FAMILIES, cases.SOFT_CAP], ids=str)
def test_c16_decode_at_a_position_is_the_prompts_row(case: cases.Case, window_left: int) -> None:
    """300 decode requests of the same pages, one for each length, and one prompt of 300."""
    case = replace(cases.of(case, (300, 300)), window_left=window_left, sinks="float32")
    inputs = make_inputs(case, DEVICE)
    if window_left >= 0:  # decode at position 0 sees token 0
        inputs = make_inputs(replace(case, window_left=-1), DEVICE)
        inputs.case = case
    want = harness.expected(inputs)
    harness.check(case, *harness.attend(inputs), want)
    planner = harness.planner_for(case, DEVICE)
    lengths = torch.arange(1, 301, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(300, dtype=torch.int32, device=DEVICE)
    plan = planner.plan(jitattn.BlockTable(inputs.table, rows=rows), lengths)
    result = plan.run(inputs.q, planner.bind(inputs.given), return_lse=True, sinks=inputs.sinks)
    harness.check(case, *result, want)


# --- C18: causal alignment when q_len and kv_len differ -------------------------------------------

ALIGNMENTS = ((3, 128), (2, 5), (5, 2), (1, 1), (64, 65), (130, 129), (7, 0))


@pytest.mark.parametrize("case", [*FAMILIES, *cases.EVERY_LAYOUT], ids=str)
def test_c18_alignment_in_one_batch(case: cases.Case) -> None:
    case = cases.of(case, *ALIGNMENTS)
    inputs, out, lse = harness.uniform(case, DEVICE)
    check_counts(case, lse)
    rows = Rows.of(case, DEVICE)
    place = request_and_place(case, DEVICE)[1]
    q_len, kv_len = (torch.tensor(x, device=DEVICE) for x in zip(*ALIGNMENTS, strict=True))
    counts = (kv_len[rows.request] - q_len[rows.request] + place + 1).clamp(min=0)
    counted = lse.double().exp()
    torch.testing.assert_close(counted, counts.double()[:, None].expand_as(lse), rtol=1e-5, atol=0)
    assert bool((out[counts == 0] == 0).all())
    assert bool((lse[counts == 0] == -torch.inf).all())
    harness.check(case, out, lse, harness.expected(inputs))


@pytest.mark.parametrize("pair", ALIGNMENTS, ids=str)
@pytest.mark.parametrize("case", [cases.D128, cases.D64, cases.D256], ids=str)
def test_c18_alignment_alone(case: cases.Case, pair: tuple[int, int]) -> None:
    case = cases.of(case, pair)
    inputs, out, lse = harness.uniform(case, DEVICE)
    check_counts(case, lse)
    harness.check(case, out, lse, harness.expected(inputs))


# --- C20: the base of lse -------------------------------------------------------------------------


@pytest.mark.parametrize("num_sms", [None, 1])
@pytest.mark.parametrize("q_len", [1, 2, 4, 65])
@pytest.mark.parametrize("case", [*FAMILIES, cases.SOFT_CAP, *cases.EVERY_LAYOUT], ids=str)
def test_c20_lse_is_natural(case: cases.Case, q_len: int, num_sms: int | None) -> None:
    case = replace(cases.of(case, (q_len, 1), (q_len, 10), (q_len, 1600)), causal=False)
    inputs = make_inputs(case, DEVICE, uniform_probe(case, DEVICE))
    _, lse = harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms))
    for request, want in enumerate((0.0, 2.302585, 7.377759)):
        rows = lse[request * q_len : (request + 1) * q_len]
        torch.testing.assert_close(rows, torch.full_like(rows, want), rtol=0, atol=1e-5)


@pytest.mark.parametrize("q_len", [2, 64])
@pytest.mark.parametrize("case", [cases.D128, cases.D256, cases.D512], ids=str)
def test_c20_two_parts_merge_to_the_whole(case: cases.Case, q_len: int) -> None:
    """Prefix of 4096 tokens and suffix of 64, merged by their lse, against one pass."""
    case = replace(cases.of(case, (q_len, 4160)), num_kv_heads=1, call="returned")
    inputs = make_inputs(case, DEVICE)
    whole = harness.attend(inputs)
    parts = []
    for table, length in ((inputs.table[:, :256], 4096), (inputs.table[:, 256:260], 64)):
        # All keys of the prefix come before the queries.
        planner = harness.planner_for(replace(case, causal=length == 64), DEVICE)
        lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        pages = jitattn.BlockTable(table)
        plan = planner.plan(pages, lengths, inputs.qo_indptr, max_q_len=q_len)
        parts.append(plan.run(inputs.q, inputs.given, return_lse=True))
    out, lse = jitattn.merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    torch.testing.assert_close(lse, whole[1], rtol=0, atol=1e-3)
    torch.testing.assert_close(out.double(), whole[0].double(), rtol=0, atol=2**-6)


# --- prompts in chunks ----------------------------------------------------------------------------

PROMPT = 1500


def chunkings() -> dict[str, list[int]]:
    """Ways to cut the prompt: the tokens of each chunk."""
    rng = random.Random(7)
    cuts = sorted(rng.sample(range(1, PROMPT), 12))
    edges = [0, *cuts, PROMPT]
    return {
        "one shot": [PROMPT],
        "512": [512, 512, 476],
        "all but one": [PROMPT - 1, 1],
        "one first": [1, PROMPT - 1],
        "100": [100] * 15,
        "2": [2] * 20 + [PROMPT - 40],
        "page borders": [16, 32, 48, 1404],
        "random": [b - a for a, b in itertools.pairwise(edges)],
    }


@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize(
    "case",
    [
        cases.D128,
        cases.D128_SEPARATE,
        cases.D64,
        cases.WIDE,
        cases.D192X128,
        cases.D256,
        cases.D512,
    ],
    ids=str,
)
def test_any_chunking_is_one_shot(case: cases.Case, window_left: int) -> None:
    """A chunk sees the cache that the ones before it have filled, and of its own the past."""
    case = replace(cases.of(case, (PROMPT, PROMPT)), num_kv_heads=1, sinks="float32")
    inputs = make_inputs(case, DEVICE)
    case = inputs.case = replace(case, window_left=window_left)
    want = harness.expected(inputs)
    planner = harness.planner_for(case, DEVICE)
    kv = planner.bind(inputs.given)
    for sizes in chunkings().values():
        outs, lses, end = [], [], 0
        for size in sizes:
            begin, end = end, end + size
            lengths = torch.tensor([end], dtype=torch.int32, device=DEVICE)
            offsets = torch.tensor([0, size], dtype=torch.int32, device=DEVICE)
            plan = planner.plan(inputs.pages(), lengths, offsets, max_q_len=size)
            q = inputs.q[begin:end]
            out, lse = plan.run(q, kv, return_lse=True, sinks=inputs.sinks)
            outs.append(out)
            lses.append(lse)
        harness.check(case, torch.cat(outs), torch.cat(lses), want)


def test_a_prompts_chunks_share_a_batch_with_others() -> None:
    """The chunks of one prompt as requests of one batch: they read the same pages."""
    case = cases.of(cases.D128, (PROMPT, PROMPT))
    inputs = make_inputs(case, DEVICE)
    sizes = chunkings()["random"]
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    offsets = torch.cat((ends.new_zeros(1), ends))
    rows = torch.zeros_like(ends)
    planner = harness.planner_for(case, DEVICE)
    pages = jitattn.BlockTable(inputs.table, rows=rows)
    plan = planner.plan(pages, ends, offsets, max_q_len=PROMPT)
    harness.check(
        case, *plan.run(inputs.q, inputs.given, return_lse=True), harness.expected(inputs)
    )


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_sms", [None, 1, 2, 7, 50, 1000])
@pytest.mark.parametrize(
    "case", [cases.D128, cases.D64, cases.WIDE, cases.D192X128, cases.D256, cases.D512], ids=str
)
def test_few_queries_over_long_caches(
    case: cases.Case, num_sms: int | None, batch_invariant: bool
) -> None:
    """From no split at all to as many as there are CTAs, in both kernels of a plan."""
    case = cases.of(
        case, (2, 20_000), (16, 9000), (33, 4097), (1, 12_000), (70, 70), (0, 300), (5, 3)
    )
    case = replace(case, num_kv_heads=1, sinks="float32", batch_invariant=batch_invariant)
    inputs = make_inputs(case, DEVICE)
    harness.check(
        case,
        *harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms)),
        harness.expected(inputs),
    )


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_address_of_a_long_request(case: cases.Case) -> None:
    """Address probes at page and tile borders, for few and many query rows."""
    edges = (0, 1, 15, 16, 31, 63, 64, 127, 128, 255, 1023, 1024, 4095, 4096, 5000)
    pairs = [(q_len, 5001) for q_len in (2, 20, 130)] * 5
    case = replace(cases.of(case, *pairs), num_kv_heads=1)
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, list(edges)))
    assert harness.check_addresses(inputs, harness.attend(inputs)[0], edges) > 0


# --- repeats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [cases.D128, cases.D128_SEPARATE, cases.D256, cases.D512], ids=str)
def test_repeated_runs(case: cases.Case) -> None:
    """Splits finish in any order and are merged in one."""
    case = cases.of(case, (3, 9000), (40, 7000), (1, 5000), (200, 300))
    inputs = make_inputs(replace(case, num_kv_heads=1), DEVICE)
    planner = harness.planner_for(inputs.case, DEVICE)
    plan, kv = harness.plan_of(inputs, planner), planner.bind(inputs.given)
    want = plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs))
    harness.check(inputs.case, *want, harness.expected(inputs))
    for repeat in range(20):
        if repeat % 5 == 0:
            plan.refresh()
        harness.assert_same(plan.run(inputs.q, kv, return_lse=True, **harness.extras(inputs)), want)
