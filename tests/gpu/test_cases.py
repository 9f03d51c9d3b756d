"""The handed cases, reduced from public bug reports: each with the answer that was wrong.

Names and numbers follow the list of cases; every one is varied beyond the numbers of its report.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import (
    D64,
    D128,
    D128_FP16,
    D128_PAGE_3,
    D128_PAGE_32,
    D128_SEPARATE,
    D256,
    PAGE_1,
    SOFT_CAP,
    Case,
)
from tests.support.inputs import address_probe, make_inputs, random_tokens, uniform_probe

# --- C01: K and V interleaved inside each page ----------------------------------------------------


@pytest.mark.parametrize("target", [0, 15, 16, 36])
@pytest.mark.parametrize("cache", ["interleaved", "layer_inside", "one_hnd", "unequal", "packed"])
def test_c01_interleaved_pools(cache: str, target: int) -> None:
    case = replace(D64, cache=cache, lengths=(37,), seed=target)
    tokens = address_probe(case, DEVICE, [target])
    inputs = make_inputs(case, DEVICE, tokens)
    result = harness.attend(inputs)
    assert torch.equal(result[0], harness.target_rows(inputs, [target]))
    plain = replace(case, cache="pair_nhd")
    harness.assert_same(result, harness.attend(make_inputs(plain, DEVICE, tokens)))


# --- C02: int64 where int32 is expected -----------------------------------------------------------


def test_c02_two_requests_with_int64_lengths() -> None:
    case = replace(D128, lengths=(5, 9))
    tokens = random_tokens(case, DEVICE)
    want = harness.attend(make_inputs(case, DEVICE, tokens))
    wide = replace(case, lengths_dtype="int64", rows="int64")
    harness.assert_same(harness.attend(make_inputs(wide, DEVICE, tokens)), want)
    with pytest.raises(TypeError, match="int64"):
        jitattn.BlockTable(torch.zeros(2, 1, dtype=torch.int64, device=DEVICE))


# --- C04: size-1 dimensions with arbitrary strides ------------------------------------------------


@pytest.mark.parametrize("head_stride", [64, 0, 3, 2**40])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_c04_one_kv_head(kv_layout: str, head_stride: int) -> None:
    case = replace(D64, num_kv_heads=1, lengths=(50, 16, 7), kv_layout=kv_layout)
    harness.check_head_stride(make_inputs(case, DEVICE), head_stride)


@pytest.mark.parametrize("stride", [7, 2**40])
def test_c04_one_token_pages(stride: int) -> None:
    inputs = make_inputs(replace(PAGE_1, lengths=(50, 1, 7)), DEVICE)
    want = harness.attend(inputs)
    page, _, head, dim = inputs.cache[0].stride()
    inputs.cache = tuple(x.as_strided(x.shape, (page, stride, head, dim)) for x in inputs.cache)
    harness.assert_same(harness.attend(inputs), want)


@pytest.mark.parametrize("stride", [0, 7, 2**40])
def test_c04_a_pool_of_one_page(stride: int) -> None:
    inputs = make_inputs(replace(D128, lengths=(11,)), DEVICE)
    want = harness.attend(inputs)
    live = int(inputs.table[0, 0])
    cache = tuple(x[live : live + 1] for x in inputs.cache)
    inputs.cache = tuple(
        x.as_strided(x.shape, (stride, *x.stride()[1:]), x.storage_offset()) for x in cache
    )
    inputs.table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    harness.assert_same(harness.attend(inputs), want)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_c04_q_of_a_fused_projection(batch_size: int) -> None:
    case = replace(D128, num_kv_heads=8, lengths=(77,) * batch_size)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    fused = torch.full((batch_size, 4608), math.nan, dtype=torch.bfloat16, device=DEVICE)
    fused[:, :4096] = inputs.q.flatten(1)
    inputs.q = fused.as_strided((batch_size, 32, 128), (4608, 128, 1))
    harness.assert_same(harness.attend(inputs), want)


@pytest.mark.parametrize("strides", [(4608, 128, 1), (1, 3, 1), (0, 0, 1), (2**40, 2**41, 1)])
def test_c04_one_token_and_one_head(strides: tuple[int, int, int]) -> None:
    case = replace(D128, num_kv_heads=1, group_size=1, lengths=(40,))
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    inputs.q = inputs.q.as_strided(inputs.q.shape, strides)
    out = torch.full_like(want[0], math.nan).as_strided(want[0].shape, strides)
    harness.assert_same(harness.attend(inputs, out=out), want)


def test_c04_one_table_row_and_one_length() -> None:
    inputs = make_inputs(replace(D128, lengths=(50,)), DEVICE)
    want = harness.attend(inputs)
    inputs.table = inputs.table.contiguous()[:, :4].as_strided((1, 4), (123, 1))
    inputs.seq_lens = inputs.seq_lens.as_strided((1,), (77,))
    harness.assert_same(harness.attend(inputs), want)


# --- C07: page offsets beyond 32 bits -------------------------------------------------------------


def large_case(batch_size: int) -> Case:
    return replace(D128, num_kv_heads=8, group_size=4, lengths=(32,) * batch_size)


@pytest.mark.parametrize("naming", ["one tensor", "pair"])
@pytest.mark.parametrize("target", [3, 16, 31])
def test_c07_high_page_ids(large_pool: Tensor, target: int, naming: str) -> None:
    """The target is in the high page or in the low one after it."""
    case = replace(D128, group_size=4)
    found = harness.check_high_pages(case, target, None, large_pool, as_pair=naming == "pair")
    assert found == len(harness.HIGH_PAGES)


def test_c07_few_pages_far_apart(large_pool: Tensor) -> None:
    """8 pages with a page stride of 2**29 + 64 elements: one layer's view of a large allocation."""
    case = large_case(4)
    targets = [1, 15, 16, 30]
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, targets))
    inputs.spread(large_pool, 2**29 + 64)
    out, _ = harness.attend(inputs)
    assert torch.equal(out, harness.target_rows(inputs, targets))


# --- C08: garbage in unused table entries ---------------------------------------------------------


@pytest.mark.parametrize("window_left", [-1, 30])
@pytest.mark.parametrize("lengths", [(1, 16, 17, 95), (1, 9000, 17, 4099)], ids=["report", "split"])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D128_PAGE_3], ids=str)
def test_c08_unused_entries(case: Case, lengths: tuple[int, ...], window_left: int) -> None:
    case = replace(case, lengths=lengths, window_left=window_left)
    inputs = make_inputs(case, DEVICE)
    for cache in inputs.cache:  # a page of Inf, which no request owns
        cache[inputs.dead_page] = torch.inf
    table = inputs.table
    inputs.table = table.masked_fill(inputs.garbage, 0)
    want = harness.attend(inputs)
    harness.check(case, *want, harness.expected(inputs))
    pool_size = inputs.cache[0].shape[0]
    for garbage in (-1, 2**31 - 1, pool_size, inputs.dead_page):
        inputs.table = table.masked_fill(inputs.garbage, garbage)
        harness.assert_same(harness.attend(inputs), want)


# --- C10: separate K and V page tables ------------------------------------------------------------


@pytest.mark.parametrize("cache", ["pair_nhd", "twice"])
def test_c10_out_is_the_v_id(cache: str) -> None:
    """V page p holds p in every element; one live page a request."""
    case = replace(D128_SEPARATE, lengths=(16, 1, 13), num_kv_heads=2, cache=cache)
    inputs = make_inputs(case, DEVICE, uniform_probe(case, DEVICE))
    v = inputs.cache[1]
    live = inputs.table[:, 1, 0].long()
    v[live] = live.to(v.dtype)[:, None, None, None].expand(-1, *v.shape[1:])
    if cache == "pair_nhd":  # in a shared pool these pages hold keys
        v[inputs.table[:, 0, 0].long()[~torch.isin(inputs.table[:, 0, 0].long(), live)]] = math.nan
    out, lse = harness.attend(inputs)
    assert torch.equal(out, live.to(out.dtype)[:, None, None].expand_as(out))
    torch.testing.assert_close(lse.exp()[:, 0], inputs.seq_lens.float())


@pytest.mark.parametrize("cache", ["pair_nhd", "twice", "one_hnd"])
def test_c10_batch_stride(cache: str) -> None:
    """B 3, M 5, strides (17, 6, 1) cut out of a larger table."""
    case = replace(D128_SEPARATE, lengths=(70, 1, 33), num_kv_heads=2, cache=cache)
    inputs = make_inputs(case, DEVICE)
    large = torch.full((60,), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    cut = large.as_strided((3, 2, 5), (17, 6, 1), 2)
    cut.copy_(inputs.table[..., :5])
    inputs.table = cut
    harness.check(case, *harness.attend(inputs), harness.expected(inputs))


def test_c10_rank_decides() -> None:
    case = replace(D128_SEPARATE, lengths=(20, 30))
    inputs = make_inputs(case, DEVICE)
    inputs.table = inputs.table[..., :2].contiguous()  # [2, 2, 2]
    harness.check(case, *harness.attend(inputs), harness.expected(inputs))
    shared = harness.planner_for(replace(case, page_table="shared"), DEVICE)
    with pytest.raises(ValueError, match="page_table"):
        shared.plan(jitattn.BlockTable(inputs.table), inputs.seq_lens)
    separate = harness.planner_for(case, DEVICE)
    with pytest.raises(ValueError, match="page_table"):
        separate.plan(jitattn.BlockTable(inputs.table[:, 0]), inputs.seq_lens)


# --- C12: lanes after the end enter the softmax ---------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [D128, D128_FP16, D64, D256], ids=str)
def test_c12_lengths_that_are_no_multiple(case: Case, causal: bool) -> None:
    lengths = (1, 17, 63, 64, 65, 127, 129, 255, 257, 1023, 1025, 8193)
    case = replace(case, lengths=lengths, causal=causal, num_kv_heads=2)
    q, k, v = uniform_probe(case, DEVICE)
    out, lse = harness.attend(make_inputs(case, DEVICE, (q, k, torch.ones_like(v))))
    assert bool((out == 1).all())
    counts = torch.tensor(lengths, dtype=torch.float32, device=DEVICE)
    torch.testing.assert_close(lse.exp(), counts[:, None].expand_as(lse), rtol=1e-4, atol=0)


# --- C13: NaN in slots that must not count --------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        replace(D128_PAGE_3, lengths=(13, 1, 8)),  # (a) in the last of small pages
        replace(D128, lengths=(17, 1, 31)),  # (b)
        replace(D128, lengths=(17, 9001), sinks="float32"),  # split
        replace(SOFT_CAP, lengths=(63, 65, 1000)),
        replace(D256, lengths=(17, 250, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_c13_dead_slots(case: Case, poison: float) -> None:
    harness.assert_dead_slots_do_not_count(make_inputs(case, DEVICE), poison)


@pytest.mark.parametrize("dead", [range(256, 257), range(257), range(256)], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_c13_tokens_that_left_the_window(dead: range, poison: float) -> None:
    """(c) 4095 of 4352 keys are visible; the first, 257, shares page and tile with dead ones."""
    case = replace(D128_PAGE_32, lengths=(4352,), num_kv_heads=2)
    harness.check_left_tokens(case, dead, poison, DEVICE)


# --- C15: sinks with a tiny window, and their dtype -----------------------------------------------


@pytest.mark.parametrize("num_sms", [None, 1, 4])
@pytest.mark.parametrize("window_left", [-1, 0, 3, 127])
def test_c15_every_score_is_minus_200(window_left: int, num_sms: int | None) -> None:
    lengths = (1, 5, 200, 4000)
    case = replace(
        D64,
        lengths=lengths,
        window_left=window_left,
        sm_scale=0.125,
        num_kv_heads=2,
        sinks="float32",
    )
    lse = harness.check_scores_of_minus_200(case, DEVICE, num_sms)
    counts = [n if window_left < 0 else min(n, window_left + 1) for n in lengths]
    without_sink = torch.tensor([math.log(n) - 200 for n in counts], device=DEVICE)
    torch.testing.assert_close(lse[:, 6], without_sink, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "bfloat16-column"])
def test_c15_sink_dtypes_are_converted_exactly(dtype: str) -> None:
    inputs = make_inputs(replace(D64, lengths=(40, 0, 3), sinks=dtype), DEVICE)
    got = harness.attend(inputs)
    inputs.sinks = inputs.sinks.float().contiguous()
    harness.assert_same(harness.attend(inputs), got)
    harness.check(inputs.case, *got, harness.expected(inputs))


def test_c15_minus_infinity_is_no_sink() -> None:
    inputs = make_inputs(replace(D64, lengths=(40, 9000, 0), sinks="float32"), DEVICE)
    inputs.sinks = torch.full_like(inputs.sinks, -torch.inf)
    got = harness.attend(inputs)
    inputs.case, inputs.sinks = replace(inputs.case, sinks=None), None
    harness.assert_same(harness.attend(inputs), got)


# --- C16: what window_left means ------------------------------------------------------------------


@pytest.mark.parametrize(
    "window_left", [-1, 0, 1, 15, 16, 63, 64, 127, 128, 298, 299, 300, 10**9, 2**31 - 1, 2**31]
)
@pytest.mark.parametrize("case", [D128, D64, D128_PAGE_3], ids=str)
def test_c16_visible_keys(case: Case, window_left: int) -> None:
    case = replace(case, lengths=(300, 1, 64), window_left=window_left)
    inputs, out, lse = harness.uniform(case, DEVICE)
    for row, length in zip(lse, case.lengths, strict=True):
        count = length if window_left < 0 else min(length - 1, window_left) + 1
        counted = row.double().exp()
        torch.testing.assert_close(counted, torch.full_like(counted, count), rtol=1e-5, atol=0)
    if window_left == 0:
        assert torch.equal(
            out, harness.target_rows(inputs, [length - 1 for length in case.lengths])
        )


@pytest.mark.parametrize("window_left", [-2, -(2**31)])
def test_c16_negative_windows(window_left: int) -> None:
    with pytest.raises(ValueError, match="window_left"):
        harness.planner_for(replace(D128, window_left=window_left), DEVICE)


# --- C18: causal alignment, with one query --------------------------------------------------------


@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D256], ids=str)
def test_c18_the_query_is_the_last_token(case: Case) -> None:
    lengths = (128, 5, 2, 1, 65, 129, 0)
    inputs, out, lse = harness.uniform(replace(case, lengths=lengths), DEVICE)
    counts = torch.tensor(lengths, dtype=torch.float64, device=DEVICE)[:, None].expand_as(lse)
    torch.testing.assert_close(lse.double().exp(), counts, rtol=1e-5, atol=0)
    assert bool((out[-1] == 0).all())
    assert bool((lse[-1] == -torch.inf).all())
    harness.check(inputs.case, out, lse, harness.expected(inputs))


# --- C20: the base of lse -------------------------------------------------------------------------


@pytest.mark.parametrize("num_sms", [None, 1])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D64, SOFT_CAP], ids=str)
def test_c20_lse_is_natural(case: Case, num_sms: int | None) -> None:
    case = replace(case, lengths=(1, 10, 1600))
    inputs = make_inputs(case, DEVICE, uniform_probe(case, DEVICE))
    _, lse = harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms))
    for row, want in zip(lse.tolist(), (0.0, 2.302585, 7.377759), strict=True):
        assert row == pytest.approx([want] * len(row), abs=1e-5)


def test_c20_two_parts_merge_to_the_whole() -> None:
    """Prefix of 4096 tokens and suffix of 64, merged by their lse, against one pass."""
    case = replace(D128, lengths=(4160,), out_dtype=None)
    inputs = make_inputs(case, DEVICE)
    whole = harness.attend(inputs)
    parts = []
    for table, length in ((inputs.table[:, :256], 4096), (inputs.table[:, 256:260], 64)):
        part = replace(case, lengths=(length,))
        planner = harness.planner_for(part, DEVICE)
        lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        plan = planner.plan(jitattn.BlockTable(table), lengths)
        parts.append(plan.run(inputs.q, planner.bind(inputs.given), return_lse=True))
    lse = torch.logaddexp(parts[0][1].double(), parts[1][1].double())
    out = sum(o.double() * (part - lse).exp()[..., None] for o, part in parts)
    torch.testing.assert_close(lse, whole[1].double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(out, whole[0].double(), rtol=0, atol=2**-6)


# --- C29: the caller's stream ---------------------------------------------------------------------


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE], ids=str)
def test_c29_side_stream(case: Case, external: bool) -> None:
    """The values are written on the side stream behind a long wait: only that stream sees them."""
    case = replace(case, lengths=(3000, 17, 0, 800))
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(case, DEVICE)
    filled = [x.clone() for x in (inputs.q, *inputs.cache, inputs.table, inputs.seq_lens)]
    for tensor in (inputs.q, *inputs.cache, inputs.table, inputs.seq_lens):
        tensor.zero_()
    own_stream = stream = torch.cuda.Stream()
    if external:
        stream = torch.cuda.ExternalStream(own_stream.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        harness.attend(inputs)  # allocates the stream's workspace, which may wait for the device
        torch.cuda._sleep(100_000_000)  # 50 ms and more
        targets = (inputs.q, *inputs.cache, inputs.table, inputs.seq_lens)
        for tensor, value in zip(targets, filled, strict=True):
            tensor.copy_(value)
        kv = planner.bind(inputs.given)
        plan = planner.plan(jitattn.BlockTable(inputs.table), inputs.seq_lens)
        result = plan.run(inputs.q, kv, return_lse=True)
    stream.synchronize()
    harness.assert_same(result, want)
