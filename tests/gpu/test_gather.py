"""gather_kv on a device: every layout, dtype and scale, in poisoned memory, eager and captured."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE, side_by_side
from tests.support.cases import CACHES_SEPARATE, CACHES_SHARED, D128, TABLES, Case
from tests.support.examples import examples
from tests.support.harness import forbid_waiting, planner_for
from tests.support.inputs import make_inputs
from tests.support.transfers import (
    SATURATIONS,
    Gather,
    assert_bits,
    check_gather,
    check_quantised_gather,
    check_saturation,
    gathers,
    quantised_cache,
)

BASE = Case(
    head_dim=128, num_kv_heads=8, group_size=1, lengths=(1, 16, 0, 17, 129, -3, 64), page_size=16
)


@examples(250)
@given(gathers())
def test_random_gathers(example: Gather) -> None:
    check_gather(example, DEVICE)


@pytest.mark.parametrize("cache", CACHES_SHARED)
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn", "float8_e5m2"])
def test_every_cache(kv_dtype: str | None, cache: str) -> None:
    num_kv_heads = 1 if cache == "size_1" else 8
    case = replace(BASE, cache=cache, kv_dtype=kv_dtype, num_kv_heads=num_kv_heads)
    for kv_layout in ("NHD", "HND"):
        check_gather(Gather(replace(case, kv_layout=kv_layout)), DEVICE)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 64, 128])
def test_every_table_and_page_size(page_size: int, table: str) -> None:
    cache = CACHES_SEPARATE[0] if table == "separate" else CACHES_SHARED[0]
    case = replace(BASE, page_table=table, page_size=page_size, cache=cache)
    for rows in (None, "int32", "int64") if case.has_rows else (None,):
        check_gather(Gather(replace(case, rows=rows, lengths_dtype="int64")), DEVICE)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32", "own"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_pair_of_types(kv_dtype: str, out_dtype: str) -> None:
    is_fp8 = kv_dtype.startswith("float8")
    case = replace(BASE, kv_dtype=kv_dtype) if is_fp8 else replace(BASE, dtype=kv_dtype)
    for scales in (None, "float", "heads") if is_fp8 and out_dtype != "own" else (None,):
        for out in ("none", "triple"):
            check_gather(Gather(replace(case, scales=scales), out_dtype, out, spare=5), DEVICE)


@pytest.mark.parametrize("scale", [None, "number", "heads"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["int8", "nvfp4", "int4"])
def test_quantised_caches(name: str, out_dtype: str, scale: str | None) -> None:
    check_quantised_gather(name, out_dtype, scale, DEVICE)


@pytest.mark.parametrize(("kv_dtype", "out_dtype"), SATURATIONS)
def test_values_beyond_the_range_saturate(kv_dtype: str, out_dtype: str) -> None:
    check_saturation(kv_dtype, out_dtype, DEVICE)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_byte_of_fp8(kv_dtype: str) -> None:
    """NaN stays NaN, infinities stay, and every other value is exact."""
    dtype = getattr(torch, kv_dtype)
    stored = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 16, 1, 16).view(dtype)
    pages = jitattn.BlockTable(torch.zeros((1, 1), dtype=torch.int32, device=DEVICE))
    lens = torch.full((1,), 16, dtype=torch.int32, device=DEVICE)
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
        k, v, _ = jitattn.gather_kv((stored, stored), pages, lens, out_dtype=out_dtype)
        want = stored[0].float().to(out_dtype)
        for got in (k, v):
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))
    k, _, _ = jitattn.gather_kv((stored, stored), pages, lens, out_dtype=dtype)
    assert_bits(k, stored[0])


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000, 5000])
def test_many_requests(count: int) -> None:
    """More requests than a CTA has threads; most have few tokens, some none."""
    rng = random.Random(count)
    lengths = tuple(rng.choice((0, 0, 1, 2, 7, 33, -5)) for _ in range(count))
    check_gather(Gather(replace(BASE, lengths=lengths, num_kv_heads=1), out="triple"), DEVICE)


def test_one_long_request() -> None:
    check_gather(Gather(replace(BASE, lengths=(70_001,))), DEVICE)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (1, 512), (32, 256), (3, 80)])
def test_narrow_and_wide_rows(num_kv_heads: int, head_dim: int) -> None:
    case = replace(BASE, num_kv_heads=num_kv_heads, head_dim=head_dim)
    for kv_dtype in (None, "float8_e4m3fn"):
        for offset in (0, 1):
            example = Gather(replace(case, kv_dtype=kv_dtype), out="pair", offset=offset)
            check_gather(example, DEVICE)


@pytest.mark.parametrize("case", [D128, replace(D128, kv_dtype="float8_e4m3fn", scales="heads")])
def test_bound_caches(case: Case) -> None:
    """The scales of bind count, and the planner's q_dtype is what comes out."""
    case = replace(case, lengths=(5, 0, 40), group_size=4)
    inputs = make_inputs(case, DEVICE)
    bound = inputs.bind(planner_for(case, DEVICE))
    k, v, _ = jitattn.gather_kv(bound, inputs.pages(), inputs.seq_lens)
    assert k.dtype == v.dtype == getattr(torch, case.dtype)
    assert_bits(k, inputs.k.float().to(k.dtype))
    assert_bits(v, inputs.v.float().to(v.dtype))


def test_what_has_no_page_is_nan() -> None:
    """Entries outside the cache, tokens past the table, rows outside it; rows past out are left."""
    pool = torch.ones((5, 2, 4, 2, 16), dtype=torch.bfloat16, device=DEVICE)
    table = torch.tensor([[1, -1], [5, 4], [3, 2**31 - 1]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, 1, 2, 3, -1], device=DEVICE)
    pages = jitattn.BlockTable(table, rows=rows)
    lens = torch.tensor([8, 8, 10, 2, 3], device=DEVICE)
    k, v, indptr = jitattn.gather_kv(pool, pages, lens)
    assert indptr.tolist() == [0, 8, 16, 26, 28, 31]
    lives = [1] * 4 + [0] * 4 + [0] * 4 + [1] * 4 + [1] * 4 + [0] * 6 + [0] * 5
    for got in (k, v):
        assert torch.equal(~got.isnan().any(dim=2)[:, 0].cpu(), torch.tensor(lives).bool())
        assert torch.equal(got.isnan().all(dim=2), got.isnan().any(dim=2))
    few = tuple(torch.zeros((9, 2, 16), dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    k, _, indptr = jitattn.gather_kv(pool, pages, lens, out=few)
    assert indptr.tolist() == [0, 8, 16, 26, 28, 31]
    assert torch.equal(~k[:, 0, 0].isnan().cpu(), torch.tensor(lives[:9]).bool())


def test_garbage_lengths_write_nothing_outside() -> None:
    pool = torch.ones((5, 2, 4, 2, 16), dtype=torch.bfloat16, device=DEVICE)
    pages = jitattn.BlockTable(torch.zeros((3, 2), dtype=torch.int32, device=DEVICE))
    lens = torch.tensor([3, 2**62, 2**62], device=DEVICE)
    memory = torch.zeros((2, 40, 2, 16), dtype=torch.bfloat16, device=DEVICE)
    out = memory[0, 4:20], memory[1, 4:20]
    k, _, indptr = jitattn.gather_kv(pool, pages, lens, out=out)
    assert indptr.tolist()[:2] == [0, 3]
    assert bool((k[:11] == 1).all())
    assert bool(k[11:].isnan().all())
    assert bool((memory[:, :4] == 0).all())
    assert bool((memory[:, 20:] == 0).all())


@pytest.mark.parametrize("offset_pages", [1, 0])
def test_c07_offsets_beyond_32_bits(large_pool: Tensor, offset_pages: int) -> None:
    ids = [0, 1, 65_535, 65_536, 131_071, 131_072 + offset_pages]
    for page in ids:
        large_pool[page].fill_(page % 251)
    table = torch.tensor([ids], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([len(ids) * 16], dtype=torch.int32, device=DEVICE)
    k, v, _ = jitattn.gather_kv(large_pool, jitattn.BlockTable(table), lens)
    want = torch.tensor([page % 251 for page in ids], device=DEVICE).repeat_interleave(16)
    for got in (k, v):
        assert bool((got == want[:, None, None].to(got.dtype)).all())


# --- graphs and streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("table", TABLES)
def test_replays_with_other_inputs(table: str, kv_dtype: str | None) -> None:
    """Captured on one batch, replayed on others: tables, lengths, scales and K and V change."""
    cache = CACHES_SEPARATE[0] if table == "separate" else CACHES_SHARED[0]
    case = replace(
        BASE,
        page_table=table,
        kv_dtype=kv_dtype,
        lengths=(130,) * 5,  # room for 90 of each, and some pages
        scales="heads" if kv_dtype else None,
        cache=cache,
        rows="int64" if table != "csr" else None,
    )
    room = make_inputs(case, DEVICE)
    out = tuple(torch.empty((650, 8, 128), dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    indptr = torch.empty(6, dtype=torch.int32, device=DEVICE)

    def call() -> None:
        jitattn.gather_kv(
            room.cache,
            room.pages(),
            room.seq_lens,
            k_scale=room.k_scale,
            v_scale=room.v_scale,
            out=(*out, indptr),
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    rng = random.Random(7)
    for step in range(5):
        lengths = tuple(rng.choice((0, 1, 16, 89, 90, rng.randint(0, 90), -1)) for _ in range(5))
        inputs = make_inputs(replace(case, lengths=lengths, seed=100 + step), DEVICE)
        _overwrite(room, inputs)
        for tensor in out:
            tensor.fill_(math.nan)
        graph.replay()
        total = inputs.kv_indptr[-1]
        assert indptr.tolist() == inputs.kv_indptr
        for got, dense in zip(out, (inputs.k, inputs.v), strict=True):
            assert_bits(got[:total], dense.float().to(got.dtype))
            assert bool(got[total:].isnan().all())


def _overwrite(room: object, inputs: object) -> None:
    """Put the pages, tables, lengths and scales of a smaller batch where the larger one's are."""
    for ours, theirs in zip(_caches(room.cache), _caches(inputs.cache), strict=True):
        ours[: theirs.shape[0]].copy_(theirs)
    room.seq_lens.copy_(inputs.seq_lens)
    if room.indptr is not None:
        room.indptr.copy_(inputs.indptr)
        room.table[: inputs.table.shape[0]].copy_(inputs.table)
    else:
        rows, columns = inputs.table.shape[0], inputs.table.shape[-1]
        room.table.fill_(2**31 - 1)
        room.table[:rows, ..., : min(columns, room.table.shape[-1])].copy_(
            inputs.table[..., : room.table.shape[-1]]
        )
        room.rows.copy_(inputs.rows)
    for ours, theirs in ((room.k_scale, inputs.k_scale), (room.v_scale, inputs.v_scale)):
        if ours is not None:
            ours.copy_(theirs)


def _caches(cache: object) -> list[Tensor]:
    pair = [cache] if isinstance(cache, Tensor) else list(cache)
    return [x.view(torch.uint8) if x.element_size() == 1 else x for x in pair]


def test_a_capture_needs_out() -> None:
    inputs = make_inputs(BASE, DEVICE)
    jitattn.gather_kv(inputs.cache, inputs.pages(), inputs.seq_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.seq_lens.add_(0)  # torch warns of graphs of nothing
        with pytest.raises(ValueError, match="out is None in a capture"):
            jitattn.gather_kv(inputs.cache, inputs.pages(), inputs.seq_lens)


def test_nothing_waits_with_out() -> None:
    inputs = make_inputs(BASE, DEVICE)
    out = tuple(torch.empty((300, 8, 128), dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    jitattn.gather_kv(inputs.cache, inputs.pages(), inputs.seq_lens, out=out)
    with forbid_waiting():
        jitattn.gather_kv(inputs.cache, inputs.pages(), inputs.seq_lens, out=out)


def test_streams_and_threads() -> None:
    """Each call goes to the current stream, after what that stream was given before."""
    inputs = make_inputs(replace(BASE, lengths=(4000,) * 4), DEVICE)
    pages, lens = inputs.pages(), inputs.seq_lens
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            cache = inputs.cache if isinstance(inputs.cache, Tensor) else inputs.cache[0]
            cache = cache if cache.dim() == 4 else cache[:, 0]
            mine = torch.zeros_like(cache)
            for turn in range(20):
                mine.fill_(number * 100 + turn)
                k, v, _ = jitattn.gather_kv((mine, mine), pages, lens)
                if not bool((k == k.new_tensor(number * 100 + turn)).all() and (k == v).all()):
                    failures.append(f"thread {number}, turn {turn}")

    side_by_side(work, 4)
    assert failures == []


def test_a_planner_reads_what_was_gathered() -> None:
    """Ragged attention over gathered K and V is attention over the pages, within rounding."""
    case = replace(D128, lengths=(37, 5, 64))
    inputs = make_inputs(case, DEVICE)
    paged = planner_for(case, DEVICE)
    want = paged.plan(inputs.pages(), inputs.seq_lens).run(inputs.q, paged.bind(inputs.given))
    k, v, indptr = jitattn.gather_kv(
        inputs.cache, inputs.pages(), inputs.seq_lens, kv_layout=case.kv_layout
    )
    ragged = jitattn.AttentionPlanner(
        **(case.planner_arguments() | {"page_table": "ragged", "page_size": None}), device=DEVICE
    )
    got = ragged.plan(jitattn.RaggedKV(indptr), inputs.seq_lens).run(inputs.q, (k, v))
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-7)


def test_int8_rows_without_a_page_are_zero() -> None:
    (k_cache, v_cache), k_values, _ = quantised_cache("int8", DEVICE)
    table = torch.tensor([[3, -1]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([8], device=DEVICE)
    k, v, _ = jitattn.gather_kv(
        (k_cache, v_cache), jitattn.BlockTable(table), lens, out_dtype=torch.int8
    )
    assert torch.equal(k[:4].float(), k_values[3])
    assert bool((k[4:] == 0).all())
    assert bool((v[4:] == 0).all())
