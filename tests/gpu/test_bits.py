"""What must not change a single bit of the result."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import jitattn
from jitattn.kernels.attention.config import wide_row_tile
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import (
    CACHES_SHARED,
    D64,
    D128,
    D128_PAGE_3,
    D128_SEPARATE,
    D192X128,
    D256,
    DRAFTS,
    E4M3,
    EVERY_LAYOUT,
    MASKED_D64,
    MASKED_D128,
    RAGGED,
    SOFT_CAP,
    TWINS,
    WIDE,
    Case,
    of,
)
from tests.support.inputs import ROW_VIEWS, Inputs, make_inputs
from tests.support.layouts import check_every_table

LENGTHS = (4097, 1, 0, 16, 255, 12000, 33)


def bits_of(case: Case) -> tuple[Inputs, harness.Result]:
    inputs = make_inputs(case, DEVICE)
    return inputs, harness.attend(inputs)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window_left", [-1, 500])
@pytest.mark.parametrize("case", TWINS, ids=str)
def test_every_table_layout(case: Case, window_left: int, batch_invariant: bool) -> None:
    case = replace(case, lengths=LENGTHS)
    check_every_table(case, DEVICE, window_left=window_left, batch_invariant=batch_invariant)


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_room_between_requests(case: Case) -> None:
    """Seeds place pages, tokens and the room that CSR and ragged requests don't use."""
    harness.check_placement(replace(case, lengths=LENGTHS), DEVICE)


@pytest.mark.parametrize("case", [D128, D128_PAGE_3, D256], ids=str)
def test_page_placement(case: Case) -> None:
    harness.check_placement(replace(case, lengths=LENGTHS), DEVICE)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", [*CACHES_SHARED, "twice"])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D64], ids=str)
def test_cache_strides(case: Case, cache: str, kv_layout: str) -> None:
    harness.check_cache_strides(replace(case, lengths=LENGTHS), DEVICE, cache, kv_layout)


@pytest.mark.parametrize("view", ROW_VIEWS)
def test_q_and_out_strides(view: str) -> None:
    harness.check_variation(replace(D128, lengths=LENGTHS), DEVICE, q_view=view, out_view=view)


@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("case", [D128, D128_SEPARATE, SOFT_CAP], ids=str)
def test_garbage_table_entries(case: Case, window_left: int) -> None:
    inputs, want = bits_of(replace(case, lengths=LENGTHS, window_left=window_left))
    for garbage in (0, -1, 2**31 - 1, -(2**31), 10**6, inputs.dead_page):
        inputs.table = inputs.table.masked_fill(inputs.garbage, garbage)
        harness.assert_same(harness.attend(inputs), want)


def test_width_of_the_table_and_maxima() -> None:
    inputs, want = bits_of(replace(D128, lengths=LENGTHS))
    planner = harness.planner_for(inputs.case, DEVICE)
    kv = planner.bind(inputs.given)
    wide = torch.full((len(LENGTHS), 5000), -1, dtype=torch.int32, device=DEVICE)
    wide[:, : inputs.table.shape[1]] = inputs.table
    for table, limit in ((inputs.table, 12000), (wide, None), (wide, 70_000)):
        plan = planner.plan(jitattn.BlockTable(table), inputs.seq_lens, max_kv_len=limit)
        harness.assert_same(plan.run(inputs.q, kv, return_lse=True), want)


@pytest.mark.parametrize("case", [D128, D128_SEPARATE, D256], ids=str)
def test_repeated_runs(case: Case) -> None:
    """Splits finish in any order and are merged in one."""
    case = replace(case, lengths=(*LENGTHS, 30_000), sinks="float32")
    inputs, want = bits_of(case)
    planner = harness.planner_for(case, DEVICE)
    plan = planner.plan(jitattn.BlockTable(inputs.table), inputs.seq_lens)
    kv = planner.bind(inputs.given)
    for repeat in range(20):
        if repeat % 5 == 0:
            plan.refresh()
        result = plan.run(inputs.q, kv, sinks=inputs.sinks, return_lse=True)
        harness.assert_same(result, want)


def test_integer_types_rows_and_strided_lengths() -> None:
    inputs, want = bits_of(replace(D128, lengths=LENGTHS, rows="int32"))
    for dtype in (torch.int32, torch.int64):
        for step in (1, 2, 77):
            wide = torch.full((2, len(LENGTHS), step), 2**31 - 1, dtype=dtype, device=DEVICE)
            wide[0, :, 0], wide[1, :, 0] = inputs.seq_lens, inputs.rows
            inputs.seq_lens, inputs.rows = wide[0, :, 0], wide[1, :, 0]
            harness.assert_same(harness.attend(inputs), want)


def test_a_window_as_long_as_the_request_is_none() -> None:
    case = replace(D128, lengths=LENGTHS)
    _, want = bits_of(case)
    for window_left in (max(LENGTHS) - 1, max(LENGTHS), 10**9, 2**31 - 1):
        harness.assert_same(bits_of(replace(case, window_left=window_left))[1], want)


def test_buffers_or_not() -> None:
    case = replace(D128, lengths=LENGTHS)
    _, want = bits_of(case)
    harness.assert_same(bits_of(replace(case, call="returned"))[1], want)
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE)
    plan = planner.plan(jitattn.BlockTable(inputs.table), inputs.seq_lens)
    assert harness.same_bits(plan.run(inputs.q, inputs.given), want[0])


# --- the most query tokens ------------------------------------------------------------------------

# Many splits, more than a kernel merges at a time, and few.
TOKENS = (40_000, 1, 0, 16, 255, 12_000, -1, 33)
MAXIMA = (1, 2, 4, 16, 17, 200) if DEVICE == "cuda" else (200,)


def assert_maxima_do_not_matter(case: Case, **changes: object) -> None:
    """Plans of any ``max_q_len`` that the batch allows: decode of both row tiles, and prefill."""
    inputs = make_inputs(case, DEVICE)
    planner = harness.planner_for(case, DEVICE, **changes)
    kv = inputs.bind(planner)
    longest, has_wide = max(case.queries), wide_row_tile(case.config()) > 0
    is_short = 0 <= case.window_left < 10_000 or "num_sms" in changes
    seen = {}
    for max_q_len in sorted({longest, *(n for n in MAXIMA if n > longest)}):
        plan = harness.plan_of(inputs, planner, max_q_len=max_q_len)
        arguments = {"out": inputs.new_out(), "lse": inputs.new_lse()} | harness.extras(inputs)
        plan.run(inputs.q, kv, **arguments)
        seen[max_q_len] = arguments["out"], arguments["lse"]
        if DEVICE == "cuda":
            roles = [part.role for part in plan.backend.launches]
            assert ("decode_multi_token" in roles) == (max_q_len * case.group_size > 8 and has_wide)
            assert is_short or num_slots(plan) > 16, "too few splits"
    want = seen[longest]
    harness.check(case, *want, harness.expected(inputs))
    for got in seen.values():
        harness.assert_same(got, want)


def num_slots(plan: jitattn.types.Plan) -> int:
    """How many slots of work the decode kernel has: the long request has most of them."""
    (decode,) = (part for part in plan.backend.launches if part.role.startswith("decode"))
    return int(decode.memory[:4].view(torch.int32))


def ones(case: Case, **changes: object) -> Case:
    """Requests of one query token, through qo_indptr, of one KV head: so that there are splits."""
    pairs = [(1, length) for length in TOKENS]
    return of(replace(case, num_kv_heads=1, spare_rows=3), *pairs, **changes)


@pytest.mark.parametrize("cache", ["pair_nhd", "odd_strides"])
@pytest.mark.parametrize("case", [*DRAFTS, WIDE, D256, D192X128], ids=str)
def test_max_q_len_of_one_token_each(case: Case, cache: str) -> None:
    assert_maxima_do_not_matter(ones(case, cache=cache))


@pytest.mark.parametrize("sinks", [None, "float32"])
@pytest.mark.parametrize("window_left", [0, 100, 30_000])
@pytest.mark.parametrize("case", [D128, D64, D128_SEPARATE, RAGGED, SOFT_CAP, E4M3], ids=str)
def test_max_q_len_with_windows_and_sinks(case: Case, window_left: int, sinks: str | None) -> None:
    pairs = [(1, length) for length in (40_000, 35_000, 1, 0, 300)]
    case = of(case, *pairs, num_kv_heads=1, window_left=window_left, sinks=sinks, causal=False)
    assert_maxima_do_not_matter(case)


@pytest.mark.parametrize("form", ["bool", "packed", "ragged"])
@pytest.mark.parametrize("cache", ["pair_nhd", "odd_strides"])
@pytest.mark.parametrize("case", [MASKED_D128, MASKED_D64], ids=str)
def test_max_q_len_with_masks(case: Case, cache: str, form: str) -> None:
    assert_maxima_do_not_matter(ones(case, cache=cache, mask=form, mask_width=1000))


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("row_tile", [8, 16])
@pytest.mark.parametrize("case", [D128, D64, RAGGED, E4M3], ids=str)
def test_max_q_len_of_requests_that_fill_a_row_tile(
    case: Case, row_tile: int, group_size: int
) -> None:
    """Requests that the narrow kernel takes as well, and those that only the wide one does."""
    most = row_tile // group_size
    pairs = [(most, 40_000), (1, 9000), (min(2, most), 33), (most, most), (0, 40), (most, -1)]
    pairs += [(q_len, 700 * q_len) for q_len in range(1, most + 1)]
    case = of(case, *pairs, num_kv_heads=1, group_size=group_size, sinks="float32")
    assert_maxima_do_not_matter(case)


@pytest.mark.parametrize(
    "changes", [{"early_kv": True}, {"num_sms": 1}, {"num_sms": 7}, {"num_sms": 60}], ids=str
)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("case", [D128, D64, D128_SEPARATE, SOFT_CAP], ids=str)
def test_max_q_len_over_shares_of_the_card(
    case: Case, num_kv_heads: int, changes: dict[str, object]
) -> None:
    """Rounds of slots, of which CTAs claim the later ones."""
    pairs = [(1, 40_000), (2, 30_000), (1, 20_000), (1, 17), (0, 3), (2, 9000)]
    case = of(case, *pairs, num_kv_heads=num_kv_heads)
    assert_maxima_do_not_matter(case, **changes)


# --- batch_invariant ------------------------------------------------------------------------------

INVARIANT = (
    D128,
    WIDE,
    D256,
    D192X128,
    RAGGED,
    replace(D128, page_table="csr"),
    replace(D128, page_table="token"),
    replace(D128, page_table="separate", sinks="float32"),
    replace(D64, window_left=1000),
)
# Around one split, the most splits (16), and where splits grow longer.
OF_INTEREST = (
    *(1, 16, 255, 256, 257, 300, 511, 512, 513, 1000, 1024, 1025, 4095, 4096, 4097),
    *(8191, 8192, 8193, 9000, 20_000),
)


def alone(inputs: Inputs, request: int) -> Inputs:
    """A batch of one request of ``inputs``, over the same cache."""
    case = inputs.case
    piece = slice(request, request + 1)
    cut = replace(
        inputs,
        case=replace(case, lengths=case.lengths[piece], out_view="contiguous"),
        q=inputs.q[piece],
        seq_lens=inputs.seq_lens[piece],
    )
    if case.page_table == "csr":
        begin, end = inputs.indptr[request : request + 2].tolist()
        cut.table = inputs.table[begin:end]
        cut.indptr = torch.tensor([0, end - begin], dtype=torch.int32, device=inputs.device)
    elif case.page_table == "ragged":
        begin, end = inputs.indptr[request : request + 2].tolist()
        cut.cache = tuple(x[begin:end] for x in inputs.cache)
        cut.indptr = torch.tensor([0, end - begin], dtype=torch.int32, device=inputs.device)
    else:
        cut.table = inputs.table[piece]
    return cut


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_invariant_requests_alone_and_together(case: Case, num_kv_heads: int) -> None:
    """A request alone has the bits that it has among others, wherever it stands."""
    case = replace(
        case, lengths=(*OF_INTEREST, 0, -1), batch_invariant=True, num_kv_heads=num_kv_heads
    )
    inputs, (out, lse) = bits_of(case)
    for request in range(len(case.lengths)):
        mine = out[request : request + 1], lse[request : request + 1]
        harness.assert_same(harness.attend(alone(inputs, request)), mine)


NUM_BATCHES, NUM_REQUESTS = 200, 60


@pytest.mark.parametrize("case", [D128, WIDE, D192X128, replace(D128, page_table="token")], ids=str)
def test_invariant_over_random_batches_and_orders(case: Case) -> None:
    """200 batches drawn from 60 requests, in any order and with repeats: rows choose the tables."""
    rng = random.Random(200)
    lengths = tuple(rng.choice((rng.randint(0, 300), rng.randint(1, 6000))) for _ in range(60))
    case = replace(case, lengths=lengths, batch_invariant=True)
    inputs, want = bits_of(case)
    planner = harness.planner_for(case, DEVICE)
    kv = planner.bind(inputs.given)
    for _ in range(NUM_BATCHES):
        size = rng.choice((1, 2, 7, 30, 132, 200))
        picks = torch.tensor(rng.choices(range(NUM_REQUESTS), k=size), device=DEVICE)
        pages = type(inputs.pages())(inputs.table, rows=picks)
        plan = planner.plan(pages, inputs.seq_lens[picks])
        got = plan.run(inputs.q[picks], kv, return_lse=True)
        harness.assert_same(got, (want[0][picks], want[1][picks]))


@pytest.mark.parametrize("num_sms", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("case", [D128, D256, WIDE, RAGGED, D192X128], ids=str)
def test_invariant_over_shares_of_the_card(case: Case, num_sms: int) -> None:
    """Splits are cut by the request's length, so not even the number of CTAs matters."""
    case = replace(case, lengths=OF_INTEREST, batch_invariant=True)
    inputs, want = bits_of(case)
    harness.assert_same(
        harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms)), want
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_maxima_do_not_matter(case: Case, batch_invariant: bool) -> None:
    case = replace(case, lengths=LENGTHS, batch_invariant=batch_invariant)
    inputs, want = bits_of(case)
    planner = harness.planner_for(case, DEVICE)
    kv = planner.bind(inputs.given)
    for limit in (max(LENGTHS), max(LENGTHS) + 1, 2**31 - 1, 2**40):
        plan = planner.plan(inputs.pages(), inputs.seq_lens, max_kv_len=limit)
        harness.assert_same(plan.run(inputs.q, kv, return_lse=True), want)


def test_invariant_with_many_requests_in_a_slot() -> None:
    """More requests than CTAs: a slot holds many, and each is merged before the next begins."""
    rng = random.Random(7)
    lengths = tuple(rng.choice((0, 1, 300, 600, 900, 2000)) for _ in range(2000))
    case = replace(D128, num_kv_heads=1, lengths=lengths, batch_invariant=True)
    inputs, want = bits_of(case)
    harness.check(case, *want, harness.expected(inputs))
    for num_sms in (1, 3, 60):
        harness.assert_same(
            harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms)), want
        )
