"""Every page table with the caches that serving engines keep, at their exact strides."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    D192X128,
    EVERY_LAYOUT,
    RAGGED,
    TABLES,
    TWINS,
    Case,
    twins_of,
)
from tests.support.inputs import CACHES, Inputs, address_probe, make_inputs, random_tokens, spread
from tests.support.layouts import attend_through, ragged_inputs, same_pages

Pair = tuple[Tensor, Tensor]
LENGTHS = (4097, 1, 0, 16, 255, 2000, 33)


def nan(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=torch.bfloat16, device=DEVICE)


# --- engine caches: NHD views of K and V, from a number of pages ----------------------------------
# Sizes and strides as engines have them: 8 KV heads, pages of 16 tokens.


def _strides(view: Tensor, *wanted: int) -> Tensor:
    assert view.stride() == wanted, view.stride()
    return view


def cross_layer_hnd(pages: int) -> Pair:
    """One buffer of 16 layers, a layer's view [pages, 2, heads, tokens, 64]."""
    pool = nan(pages, 2, 8, 16, 16, 64)[:, :, :, 5]
    _strides(pool, 262144, 131072, 16384, 64, 1)
    return pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2)


def cross_layer_nhd(pages: int) -> Pair:
    pool = _strides(nan(pages, 16, 2, 16, 8, 64)[:, 5], 262144, 8192, 512, 64, 1)
    return pool[:, 0], pool[:, 1]


def halves_first(pages: int) -> Pair:
    """Shape (2, pages, tokens, heads, 64) over the same memory."""
    pool = nan(pages, 16, 2, 16, 8, 64)[:, 5].transpose(0, 1)
    return _strides(pool, 8192, 262144, 512, 64, 1).unbind(0)


def packed_layers_nhd(pages: int) -> Pair:
    """K|V in one last dimension, layers between pages and tokens."""
    layer = nan(pages, 16, 16, 8, 128)[:, 5]
    _strides(layer.transpose(1, 2), 262144, 128, 1024, 1)
    return layer[..., :64], layer[..., 64:]


def packed_layers_hnd(pages: int) -> Pair:
    """The head stride spans the layers."""
    layer = _strides(nan(pages, 8, 16, 16, 128)[:, :, 5], 262144, 32768, 128, 1).transpose(1, 2)
    return layer[..., :64], layer[..., 64:]


def _named(order: str, dims: str) -> Callable[[int], Pair]:
    """A packed pool [.., 2 * 128] of 4 layers whose axes lie in memory as ``order`` says.

    ``dims`` are the strides of (pages, heads, tokens, last) that the layer's view must have.
    """

    def build(pages: int) -> Pair:
        sizes = {"L": 4, "B": pages, "H": 8, "N": 16, "C": 256}
        pool = nan(*(sizes[axis] for axis in order))
        pool = pool.permute([order.index(axis) for axis in "LBHNC"])[1]
        wanted = [int(eval(part, {"B": pages})) for part in dims.split(",")]
        layer = _strides(pool, *wanted).transpose(1, 2)
        return layer[..., :128], layer[..., 128:]

    return build


def one_local_head(pages: int) -> Pair:
    """One KV head: HND by permutation, and the head's stride is that of a token."""
    pool = _strides(nan(pages, 2, 16, 1, 64).permute(0, 1, 3, 2, 4), 2048, 1024, 64, 64, 1)
    return pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2)


def one_local_head_odd(pages: int) -> Pair:
    """[pages, 1, 128, 128]-like strides: page, then a head stride of one element row."""
    pool = nan(2, pages, 16, 64).as_strided((2, pages, 16, 1, 64), (pages * 1024, 1024, 64, 3, 1))
    return pool[0], pool[1]


def slots_of_one_allocation(pages: int) -> Pair:
    """Token slots, K and V as halves of one allocation, seen as pages."""
    return nan(2, pages * 16, 8, 128).view(2, pages, 16, 8, 128).unbind(0)


def fused_heads(pages: int) -> Pair:
    """K heads then V heads in one row of a token."""
    pool = nan(pages, 16, 16, 128)
    return pool[:, :, :8], pool[:, :, 8:]


def six_dimensions(pages: int) -> Pair:
    """[pages, 2, layers, tokens, heads, dim]."""
    return nan(pages, 2, 3, 16, 8, 128)[:, :, 2].unbind(1)


def layers_outside(pages: int) -> Pair:
    """[2, layers, pages, tokens, heads, dim]."""
    return nan(2, 3, pages, 16, 8, 128)[:, 2].unbind(0)


def other_layers_for_v(pages: int) -> Pair:
    """K and V come from pools of 2 and of 3 layers: their strides differ."""
    return nan(pages, 2, 2, 16, 8, 128)[:, 1, 0], nan(pages, 3, 16, 2, 8, 128)[:, 2, :, 1]


ENGINES: dict[str, tuple[Callable[[int], Pair], int, int]] = {
    "cross_layer_hnd": (cross_layer_hnd, 64, 8),
    "cross_layer_nhd": (cross_layer_nhd, 64, 8),
    "halves_first": (halves_first, 64, 8),
    "packed_layers_nhd": (packed_layers_nhd, 64, 8),
    "packed_layers_hnd": (packed_layers_hnd, 64, 8),
    "LBHNC": (_named("LBHNC", "32768,4096,256,1"), 128, 8),
    "LBNHC": (_named("LBNHC", "32768,256,2048,1"), 128, 8),
    "BLHNC": (_named("BLHNC", "131072,4096,256,1"), 128, 8),
    "BLNHC": (_named("BLNHC", "131072,256,2048,1"), 128, 8),
    "BHLNC": (_named("BHLNC", "131072,16384,256,1"), 128, 8),
    "LHBNC": (_named("LHBNC", "4096,B*4096,256,1"), 128, 8),
    "one_local_head": (one_local_head, 64, 1),
    "one_local_head_odd": (one_local_head_odd, 64, 1),
    "slots_of_one_allocation": (slots_of_one_allocation, 128, 8),
    "fused_heads": (fused_heads, 128, 8),
    "six_dimensions": (six_dimensions, 128, 8),
    "layers_outside": (layers_outside, 128, 8),
    "other_layers_for_v": (other_layers_for_v, 128, 8),
}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_caches(engine: str, kv_layout: str) -> None:
    """Every table over the engine's cache has the bits of the plain pair of pools."""
    build, head_dim, num_kv_heads = ENGINES[engine]
    base = D64 if head_dim == 64 else D128
    case = replace(base, num_kv_heads=num_kv_heads, lengths=(70, 0, 1, 1300, 33), sinks="float32")
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    harness.check(case, *want, harness.expected(inputs))
    pair = build(inputs.cache[0].shape[0])
    for view, plain in zip(pair, inputs.cache, strict=True):
        view.copy_(plain)
    if kv_layout == "HND":
        pair = tuple(view.transpose(1, 2) for view in pair)
    inputs.cache = pair
    for table in TABLES:
        planner = harness.planner_for(replace(case, page_table=table, kv_layout=kv_layout), DEVICE)
        harness.assert_same(attend_through(inputs, planner, same_pages(inputs, table)), want)


@pytest.mark.parametrize("head_offset", [0, 8])
def test_ragged_slices_of_a_fused_projection(head_offset: int) -> None:
    """K and V of a prefill as views of packed QKV: 16 query heads, 8 of K, 8 of V."""
    case = replace(RAGGED, num_kv_heads=8, group_size=2, lengths=(70, 0, 1, 1300))
    plain = make_inputs(replace(D128, num_kv_heads=8, group_size=2, lengths=case.lengths), DEVICE)
    want = harness.expected(plain)
    inputs = ragged_inputs(plain)
    fused = nan(inputs.k.shape[0] + 3, 32 + head_offset, 128)
    views = fused[:, 16 + head_offset : 24 + head_offset], fused[:, 24 + head_offset :]
    for view, dense in zip(views, (inputs.k, inputs.v), strict=True):
        view[: dense.shape[0]] = dense
    inputs.cache = views
    harness.check(case, *harness.attend(inputs), want)


@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_cache_builders(case: Case, cache: str) -> None:
    if cache == "twice" and case.page_table != "separate":
        pytest.skip("one tensor passed twice needs two rows of ids")
    num_kv_heads = 1 if cache == "size_1" else 3
    case = replace(case, cache=cache, num_kv_heads=num_kv_heads, lengths=LENGTHS, window_left=700)
    inputs = make_inputs(case, DEVICE)
    harness.check(case, *harness.attend(inputs), harness.expected(inputs))


# --- two head dims --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "cache", ["pair_nhd", "pair_hnd", "packed", "interleaved", "padded", "odd_values"]
)
@pytest.mark.parametrize(
    "case",
    [
        D192X128,
        replace(D192X128, page_table="separate", page_size=32, group_size=16),
        replace(D192X128, page_table="csr", page_size=64),
        replace(D192X128, page_table="token", page_size=1),
        replace(D192X128, page_table="ragged", page_size=1, group_size=16),
        Case(head_dim=128, head_dim_vo=64),
        Case(head_dim=64, head_dim_vo=256, page_table="ragged", page_size=1, dtype="float16"),
        Case(head_dim=16, head_dim_vo=64, page_size=3, page_table="separate", group_size=32),
    ],
    ids=str,
)
def test_two_head_dims(case: Case, cache: str, batch_invariant: bool) -> None:
    case = replace(
        case, cache=cache, lengths=LENGTHS, batch_invariant=batch_invariant, sinks="bfloat16"
    )
    inputs = make_inputs(case, DEVICE)
    out, lse = harness.attend(inputs)
    assert out.shape[-1] == case.head_dim_vo
    harness.check(case, out, lse, harness.expected(inputs))


# --- C04: strides of dimensions of size 1 ---------------------------------------------------------

WILD = (0, 1, 3, 7, 2**40, 2**62)


@pytest.mark.parametrize("stride", WILD)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c04_everything_of_size_1(case: Case, batch_invariant: bool, stride: int) -> None:
    """One request, one head, one page: every stride but that of the last dimension is wild."""
    case = replace(
        case,
        num_kv_heads=1,
        group_size=1,
        lengths=(1 if case.page_size == 1 else 11,),
        sinks="float32",
        batch_invariant=batch_invariant,
    )
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    harness.check(case, *want, harness.expected(inputs))
    inputs = wild(one_page(inputs), stride)
    out = torch.full_like(want[0], math.nan)
    lse = torch.full_like(want[1], math.nan)
    strange = out.as_strided(out.shape, (stride, stride, 1)), lse.as_strided((1, 1), (stride,) * 2)
    harness.assert_same(harness.attend(inputs, out=strange[0], lse=strange[1]), want)


def one_page(inputs: Inputs) -> Inputs:
    """Cut the caches down to the one live page, which gets the id 0."""
    if inputs.case.page_table == "ragged":
        begin, end = inputs.indptr.tolist()[0], inputs.indptr.tolist()[0] + 1
        return replace(inputs, cache=tuple(x[begin:end] for x in inputs.cache))
    pages = inputs.table.flatten()[:1].long() if inputs.table.dim() < 3 else None
    if inputs.case.page_table == "token":
        return token_page(inputs)
    if pages is None:
        pages = inputs.table[0, :, 0].long()
    ids = pages.expand(2).tolist()
    cache = tuple(x[i : i + 1] for x, i in zip(inputs.cache, ids, strict=True))
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=inputs.device)
    return replace(
        inputs, cache=cache, table=torch.zeros_like(inputs.table)[..., :1], indptr=indptr
    )


def token_page(inputs: Inputs) -> Inputs:
    """The tokens of a token table lie anywhere: gather them into one page."""
    size, length = inputs.case.page_size, inputs.case.lengths[0]
    slots = inputs.table[0, :length].long()
    cache = []
    for pool in inputs.cache:
        page = torch.full_like(pool[:1], math.nan)
        page[0, :length] = pool[slots // size, slots % size]
        cache.append(page)
    table = torch.arange(length, dtype=torch.int32, device=inputs.device)[None]
    return replace(inputs, cache=tuple(cache), table=table)


def wild(inputs: Inputs, stride: int) -> Inputs:
    """Give every dimension of size 1, but the last, the stride ``stride``."""

    def strange(tensor: Tensor | None, *, keep_last: bool) -> Tensor | None:
        if tensor is None:
            return None
        strides = [
            stride if size == 1 and not (keep_last and i == tensor.dim() - 1) else old
            for i, (size, old) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        ]
        return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())

    return replace(
        inputs,
        q=strange(inputs.q, keep_last=True),
        cache=tuple(strange(cache, keep_last=True) for cache in inputs.cache),
        table=strange(inputs.table, keep_last=False),
        seq_lens=strange(inputs.seq_lens, keep_last=False),
        sinks=strange(inputs.sinks, keep_last=False),
    )


@pytest.mark.parametrize("stride", WILD)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_c04_one_row_of_a_separate_table(dim: int, stride: int) -> None:
    """stride(-3) of [1, 2, M] and stride(-1) of [R, 2, 1]; stride(-2) always means something."""
    if dim == 1:
        stride = 2 * stride + 5 if stride < 2**30 else 4099
    lengths = (50,) if dim == 0 else (16, 7, 1)
    case = replace(D128, page_table="separate", lengths=lengths)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    table = inputs.table[..., : -(-max(lengths) // 16)].contiguous()
    strides = list(table.stride())
    strides[dim] = stride
    if dim == 1:
        wide = torch.full((len(lengths) * 9000,), -1, dtype=torch.int32, device=DEVICE)
        strides = [9000, stride, 1]
        inputs.table = wide.as_strided(table.shape, strides)
        inputs.table.copy_(table)
    else:
        inputs.table = table.as_strided(table.shape, strides)
    harness.assert_same(harness.attend(inputs), want)


@pytest.mark.parametrize("stride", [0, 3, 123, 2**40])
@pytest.mark.parametrize("table", TABLES)
def test_c04_one_request_of_every_table(table: str, stride: int) -> None:
    case = replace(D128, page_table=table, lengths=(50,), rows="int64" if table != "csr" else None)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    inputs.seq_lens = inputs.seq_lens.as_strided((1,), (stride,))
    if inputs.rows is not None:
        index = inputs.rows.long()
        inputs.table, inputs.rows = inputs.table[index].clone(), torch.zeros_like(inputs.rows)
        inputs.rows = inputs.rows.as_strided((1,), (stride,))
        inputs.table = inputs.table.as_strided(
            inputs.table.shape, (stride, *inputs.table.stride()[1:])
        )
    harness.assert_same(harness.attend(inputs), want)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c04_q_of_a_fused_projection(case: Case, num_tokens: int) -> None:
    """Strides (4608, 128, 1): a row of 32 query heads and 4 others."""
    case = replace(case, num_kv_heads=8, group_size=4, lengths=(77,) * num_tokens)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    fused = nan(num_tokens, 4608)
    fused[:, :4096] = inputs.q.flatten(1)
    inputs.q = fused.as_strided((num_tokens, 32, 128), (4608, 128, 1))
    harness.assert_same(harness.attend(inputs), want)


# --- C07: offsets beyond 32 bits, in every layout -------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("target", [3, 16, 31])
@pytest.mark.parametrize("table", TABLES)
def test_c07_high_page_ids(
    large_pool: Tensor, table: str, target: int, batch_invariant: bool
) -> None:
    targets = [target] * len(harness.HIGH_PAGES)
    case = replace(D128, num_kv_heads=8, lengths=(32,) * len(targets))
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, targets))
    harness.move_to_high_pages(inputs, large_pool, inputs.k, inputs.v)
    planner = harness.planner_for(
        replace(case, page_table=table, batch_invariant=batch_invariant), DEVICE
    )
    out, _ = attend_through(inputs, planner, same_pages(inputs, table))
    assert torch.equal(out, harness.target_rows(inputs, targets))


def test_c07_ragged_tokens_beyond_32_bits(large_pool: Tensor) -> None:
    """Tokens around 2**31 and 2**32 elements: 1024 of each token, in one flat K."""
    flat = large_pool.flatten()[: 4 * 2**30].view(-1, 8, 128)
    starts = (0, 2**21 - 40, 2**21 - 3, 2**22 - 33, 2**22)
    lengths = (33, 37, 100, 33)
    case = replace(RAGGED, num_kv_heads=8, lengths=lengths)
    targets = [32, 36, 99, 31]
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, targets))
    for b, start in enumerate(starts[:-1]):
        tokens = slice(inputs.kv_indptr[b], inputs.kv_indptr[b + 1])
        flat[start : start + lengths[b]] = inputs.k[tokens]
    inputs.indptr = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    inputs.cache = (flat, flat)
    out, _ = harness.attend(inputs)
    # K is V: the target's row is all of one level.
    assert bool((out == out[0, 0, 0]).all())
    assert float(out[0, 0, 0]) == float(inputs.k.max())


@pytest.mark.parametrize("table", TABLES)
def test_c07_few_pages_far_apart(large_pool: Tensor, table: str) -> None:
    """8 pages with a page stride of 2**29 + 64 elements."""
    case = replace(D128, num_kv_heads=8, lengths=(32,) * 4)
    targets = [1, 15, 16, 30]
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, targets))
    inputs.spread(large_pool, 2**29 + 64)
    inputs.garbage = torch.zeros_like(inputs.table, dtype=torch.bool)
    planner = harness.planner_for(replace(case, page_table=table), DEVICE)
    out, _ = attend_through(inputs, planner, same_pages(inputs, table))
    assert torch.equal(out, harness.target_rows(inputs, targets))


# --- lengths beyond the table ---------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("sinks", [None, "float32"])
@pytest.mark.parametrize("lengths_dtype", ["int32", "int64"])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_too_long_requests_are_nan_and_harm_nobody(
    case: Case, lengths_dtype: str, sinks: str | None, batch_invariant: bool
) -> None:
    case = replace(
        case,
        lengths=(100, 5000, 33, 0, 7),
        lengths_dtype=lengths_dtype,
        sinks=sinks,
        batch_invariant=batch_invariant,
        seed=1,
    )
    if DEVICE == "cpu":
        pytest.skip("the CPU refuses such a length")
    inputs = make_inputs(case, DEVICE)
    want = harness.expected(inputs)
    capacity = inputs.pages().capacity(case.page_size)
    if inputs.indptr is not None:
        begin, end = inputs.indptr[1:3].tolist()
        capacity = (end - begin) * case.page_size
    too_long = [capacity + 1, capacity + 4096, 2**31 - 1]
    too_long += [2**31, 2**32 + 5, 2**62] if lengths_dtype == "int64" else []
    for length in too_long:
        inputs.seq_lens[1] = length
        out, lse = harness.attend(inputs)
        assert bool(torch.isnan(out[1]).all())
        assert bool(torch.isnan(lse[1]).all())
        out[1], lse[1] = want.out[1], want.lse[1]
        harness.check(case, out, lse, want)


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_every_request_too_long(case: Case) -> None:
    if DEVICE == "cpu":
        pytest.skip("the CPU refuses such a length")
    inputs = make_inputs(replace(case, lengths=(100, 5, 33)), DEVICE)
    inputs.seq_lens.fill_(2**31 - 1)
    out, lse = harness.attend(inputs)
    assert bool(torch.isnan(out).all())
    assert bool(torch.isnan(lse).all())


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_a_length_that_fills_the_table_exactly(case: Case) -> None:
    """The boundary twin: every entry of the table is read, and none beyond."""
    length = 64
    case = replace(case, lengths=(length, length, 5))
    inputs = make_inputs(case, DEVICE)
    entries = length if case.page_table == "token" else 4
    if case.page_table in ("shared", "separate", "token"):
        inputs.table = inputs.table[..., :entries]
    harness.check(case, *harness.attend(inputs), harness.expected(inputs))
    planner = harness.planner_for(case, DEVICE)
    plan = planner.plan(inputs.pages(), inputs.seq_lens, max_kv_len=length)
    result = plan.run(inputs.q, planner.bind(inputs.given), return_lse=True)
    harness.check(case, *result, harness.expected(inputs))


@pytest.mark.parametrize("table", ["csr", "ragged"])
def test_offsets_that_fall_give_nan(table: str) -> None:
    """kv_indptr [0, n, n - 1, ...]: the request in between has less than nothing."""
    if DEVICE == "cpu":
        pytest.skip("the CPU refuses such offsets")
    case = replace(D128, page_table=table, page_size=16 if table == "csr" else 1)
    case = replace(case, lengths=(50, 1, 0))
    inputs = make_inputs(case, DEVICE)
    want = harness.expected(inputs)
    starts = inputs.indptr.tolist()
    inputs.indptr = torch.tensor(
        [starts[0], starts[1], starts[1] - 1, starts[1] - 1], dtype=torch.int32, device=DEVICE
    )
    out, lse = harness.attend(inputs)
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isnan(lse[1]).all())
    out[1], lse[1] = want.out[1], want.lse[1]
    harness.check(case, out, lse, want)


def test_csr_indices_end_before_their_offsets() -> None:
    """kv_indptr promises more than kv_indices holds: reads stop where it ends."""
    if DEVICE == "cpu":
        pytest.skip("the CPU refuses such offsets")
    inputs = make_inputs(replace(D128, page_table="csr", lengths=(50, 70)), DEVICE)
    want = harness.expected(inputs)
    begin = int(inputs.indptr[1])
    inputs.table = inputs.table[: begin + 4].clone()  # 64 tokens of the second request
    out, lse = harness.attend(inputs)
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isnan(lse[1]).all())
    out[1], lse[1] = want.out[1], want.lse[1]
    harness.check(inputs.case, out, lse, want)


# --- C02 and C08 for every layout -----------------------------------------------------------------


@pytest.mark.parametrize("window_left", [-1, 30])
@pytest.mark.parametrize("lengths", [(1, 16, 17, 95), (1, 9000, 17, 4099)], ids=["report", "split"])
@pytest.mark.parametrize("case", TWINS[:3], ids=str)
def test_c08_unused_entries(case: Case, lengths: tuple[int, ...], window_left: int) -> None:
    for twin in twins_of(replace(case, lengths=lengths, window_left=window_left)):
        inputs = make_inputs(twin, DEVICE)
        for cache in inputs.cache:
            cache[inputs.dead_page] = torch.inf
        table = inputs.table
        inputs.table = table.masked_fill(inputs.garbage, 0)
        want = harness.attend(inputs)
        harness.check(twin, *want, harness.expected(inputs))
        unit = twin.page_size if twin.page_table == "token" else 1
        end = inputs.cache[0].shape[0] * unit
        for garbage in (-1, 2**31 - 1, -(2**31), end, inputs.dead_page * unit):
            inputs.table = table.masked_fill(inputs.garbage, garbage)
            harness.assert_same(harness.attend(inputs), want)


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c02_lengths_rows_and_offsets_at_any_stride(case: Case) -> None:
    case = replace(case, lengths=(5, 9, 4000), rows="int32" if case.has_rows else None)
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    harness.check(case, *want, harness.expected(inputs))
    for dtype in (torch.int32, torch.int64):
        for step in (1, 2, 77):
            moved = replace(inputs, seq_lens=spread(inputs.seq_lens.to(dtype), step))
            if inputs.rows is not None:
                moved.rows = spread(inputs.rows.to(dtype), step)
            if inputs.indptr is not None:
                moved.indptr = spread(inputs.indptr.clone(), step)
            harness.assert_same(harness.attend(moved), want)


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_rows_used_twice_and_rows_of_padding(case: Case) -> None:
    """Two requests may share a row, at different lengths; padding's row is not read."""
    if not case.has_rows:
        pytest.skip("the layout has no rows")
    case = replace(case, lengths=(90, 90, 40))
    tokens = random_tokens(case, DEVICE)
    for dense in tokens[1:]:
        dense[90:180] = dense[:90]
    inputs = make_inputs(case, DEVICE, tokens)
    want = harness.expected(inputs)
    rows = torch.tensor([0, 0, 2], device=DEVICE)
    harness.check(case, *harness.attend(replace(inputs, rows=rows)), want)
    if DEVICE == "cpu":
        return
    rows[1] = 2**40
    inputs.seq_lens[1] = 0
    out, lse = harness.attend(replace(inputs, rows=rows))
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -torch.inf).all())
    out[1], lse[1] = want.out[1], want.lse[1]
    harness.check(case, out, lse, want)


def test_token_tables_of_a_pool_with_pages_of_one() -> None:
    """A request-to-token pool: wide rows of slots, row indices, cache views of one token a page."""
    case = Case(
        head_dim=128,
        page_size=1,
        page_table="token",
        logits_soft_cap=5.0,
        lengths=(1, 500, 0, 77),
        rows="int64",
    )
    inputs = make_inputs(case, DEVICE)
    pool = torch.zeros(40, 4096, dtype=torch.int32, device=DEVICE)  # padding rows are row 0
    rows = torch.tensor([7, 31, 0, 3], device=DEVICE)
    width = inputs.table.shape[1]
    pool[rows, :width] = inputs.table[inputs.rows.long()]
    harness.check(
        case, *harness.attend(replace(inputs, table=pool, rows=rows)), harness.expected(inputs)
    )


def test_attention_call_on_the_device() -> None:
    inputs = make_inputs(replace(RAGGED, lengths=(5, 900)), DEVICE)
    out = jitattn.attention(inputs.q, inputs.given, inputs.pages(), inputs.seq_lens)
    assert harness.same_bits(out, harness.attend(inputs)[0])
