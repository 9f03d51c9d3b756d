"""FlashInfer's wrappers and functions against their definition in float64, on the CPU.

Caches hold NaN wherever no request has a token, tables hold ids of no page past their ends, and new
tensors are made of NaN.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jitattn.compat import flashinfer
from tests.support import flashinfer_signatures as signatures
from tests.support import scattered
from tests.support.refusals import Call, check_not_ignored, check_refused, names_of, refusals

MANY = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SEEDS = st.integers(0, 2**32 - 1)
HALVES = (torch.float16, torch.bfloat16)
WORKSPACE = torch.zeros(16, dtype=torch.uint8)


pytestmark = pytest.mark.usefixtures("new_tensors_are_nan")


# --- what cases have in common --------------------------------------------------------------------


class Scores:
    """A window, a cap, a scale and sinks, drawn at random."""

    def __init__(self, rng: random.Random, heads: int, dim: int) -> None:
        self.window_left = rng.choice([-1, -1, 0, 2, 5, 100])
        self.cap = rng.choice([None, 0.0, 2.5])
        self.sm_scale = rng.choice([None, 0.3])
        self.scale = self.sm_scale or dim**-0.5
        self.sinks = None
        if rng.random() < 0.3:
            self.sinks = scattered.normal(rng.randrange(2**31), heads)

    def planned(self) -> dict[str, object]:
        return {
            "window_left": self.window_left,
            "logits_soft_cap": self.cap,
            "sm_scale": self.sm_scale,
        }

    def meant(self) -> dict[str, object]:
        return {
            "scale": self.scale,
            "window_left": self.window_left,
            "softcap": self.cap or 0.0,
            "sinks": self.sinks,
        }


def draw_scales(rng: random.Random, heads: int) -> tuple[object, Tensor]:
    """A scale of an FP8 cache, and what it is of each head."""
    kind = rng.choice(["none", "number", "one", "heads"])
    if kind == "none":
        return None, torch.ones(heads)
    if kind == "number":
        return 0.75, torch.full((heads,), 0.75)
    values = torch.rand(heads if kind == "heads" else 1, generator=_generator(rng)) + 0.5
    return values, values.expand(heads)


def _generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def draw_cache(rng: random.Random, lens: list[int], dims: tuple[int, int]) -> scattered.Scattered:
    dtype = rng.choice([*HALVES, *HALVES, *scattered.FP8])
    form = rng.choice(["pair", "strided", "interleaved", *(["one"] if dims[0] == dims[1] else [])])
    return scattered.Scattered.of(
        rng,
        lens,
        page_size=rng.choice([1, 3, 4, 16]),
        layout=rng.choice(["NHD", "HND"]),
        heads=rng.choice([1, 2]),
        dims=dims,
        dtype=dtype,
        form=form,
    )


def types_of(
    rng: random.Random, cache: scattered.Scattered
) -> tuple[torch.dtype, dict[str, object]]:
    """The dtype of q, and what ``plan`` is told of dtypes."""
    stored = cache.caches[0].dtype
    q_dtype = stored if stored in HALVES else rng.choice(HALVES)
    named = {"q_data_type": q_dtype, "kv_data_type": stored}
    if rng.random() < 0.3:
        named = {name: str(dtype).removeprefix("torch.") for name, dtype in named.items()}
    return q_dtype, named


def given_cache(rng: random.Random, cache: scattered.Scattered) -> Tensor | tuple[Tensor, Tensor]:
    base = cache.caches[0]._base
    is_one = base is not None and base is cache.caches[1]._base and base.dim() == 5
    if is_one and base.shape[1] == 2:
        return base
    return cache.caches


def checked(
    found: object,
    rows: list[range],
    qs: Tensor,
    cache: scattered.Scattered,
    scales: tuple[Tensor, Tensor],
    meant: dict[str, object],
    *,
    causal: bool,
    masks: list[Tensor] | None = None,
    base: float = 2.0,
) -> None:
    out, lse = found
    for b, own in enumerate(rows):
        k, v = (
            x[b].double() * s.double()[:, None]
            for x, s in zip((cache.k, cache.v), scales, strict=True)
        )
        mask = None if masks is None else masks[b]
        span = slice(own.start, own.stop)
        want, want_lse, size = scattered.defined(qs[span], k, v, causal=causal, mask=mask, **meant)
        scattered.check_out(out[span], want, size)
        scattered.check_lse(lse[span], want_lse, base=base)


# --- decode ---------------------------------------------------------------------------------------


@MANY
@given(seed=SEEDS)
def test_decode_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    lens = [rng.choice([0, 1, rng.randint(1, 40)]) for _ in range(rng.randint(1, 4))]
    dim = rng.choice([16, 32])
    cache = draw_cache(rng, lens, (dim, dim))
    heads_k = cache.k[0].shape[1]
    heads, q_len = heads_k * rng.choice([1, 3]), rng.choice([1, 1, 2, 3])
    scores = Scores(rng, heads, dim)
    q_dtype, types = types_of(rng, cache)
    is_fp8 = cache.caches[0].dtype in scattered.FP8
    (k_scale, k_factor), (v_scale, v_factor) = (
        draw_scales(rng, heads_k) if is_fp8 else (rng.choice([None, 1.0]), torch.ones(heads_k))
        for _ in range(2)
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, cache.layout)
    indptr, indices, last = cache.csr(rng)
    others: dict[str, object] = {}
    if rng.random() < 0.3:
        others["seq_lens"] = torch.tensor(lens, dtype=rng.choice([torch.int32, torch.int64]))
    if rng.random() < 0.3:
        others["block_tables"] = cache.table()
        indices = torch.full_like(indices, scattered.GARBAGE)  # not read
    if rng.random() < 0.3:
        others["disable_split_kv"] = True
    out_dtype = rng.choice([None, torch.float32])
    wrapper.plan(
        *(indptr, indices, last),
        *(heads, heads_k, dim, cache.page_size),
        o_data_type=out_dtype,
        q_len_per_req=q_len,
        **scores.planned(),
        **types,
        **others,
    )
    q = scattered.normal(seed % 2**31, len(lens) * q_len, heads, dim).to(q_dtype)
    run = {"k_scale": k_scale, "v_scale": v_scale, "sinks": scores.sinks}
    if rng.random() < 0.3:
        run["out"] = torch.empty_like(q, dtype=out_dtype)
        run["lse"] = torch.empty(q.shape[:2])
    kv = given_cache(rng, cache)
    found = wrapper.run(q, kv, return_lse=True, **run)
    if "out" in run:
        assert found[0] is run["out"]
        assert found[1] is run["lse"]
    assert found[0].dtype == (out_dtype or q_dtype)
    rows = [range(b * q_len, (b + 1) * q_len) for b in range(len(lens))]
    meant = scores.meant()
    checked(found, rows, q, cache, (k_factor, v_factor), meant, causal=True)
    assert torch.equal(found[0], wrapper.run(q, kv, **run))
    again = wrapper.run_return_lse(q, kv, **run)
    assert torch.equal(again[1], found[1])


@MANY
@given(seed=SEEDS)
def test_decode_of_a_graph_reads_its_buffers(seed: int) -> None:
    """As a captured run does: the plan stays, and so do the tensors that it reads."""
    rng = random.Random(seed)
    batch, heads_k, dim, q_len = rng.randint(1, 4), rng.choice([1, 2]), 16, rng.choice([1, 2])
    page_size = rng.choice([1, 4, 16])
    room = batch * -(-40 // page_size)
    buffers = [
        torch.full((n,), scattered.GARBAGE, dtype=torch.int32) for n in (batch + 1, room, batch)
    ]
    if rng.random() < 0.5:
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            WORKSPACE, "NHD", True, False, *buffers
        )
    assert wrapper.is_cuda_graph_enabled
    scores = Scores(rng, 2 * heads_k, dim)
    plans = set()
    for _ in range(3):
        lens = [rng.choice([0, rng.randint(1, 40)]) for _ in range(batch)]
        cache = scattered.Scattered.of(
            rng, lens, page_size=page_size, layout="NHD", heads=heads_k, dims=(dim, dim),
            dtype=torch.float16,
        )  # fmt: skip
        tables = cache.csr(rng)
        tables = tables[0], tables[1][: int(tables[0][-1])], tables[2]
        wrapper.plan(
            *tables, 2 * heads_k, heads_k, dim, page_size, q_len_per_req=q_len, **scores.planned()
        )
        assert torch.equal(buffers[0], tables[0])
        assert torch.equal(buffers[1][: len(tables[1])], tables[1])
        assert torch.equal(buffers[2], tables[2])
        for table in tables:
            table.fill_(scattered.GARBAGE)  # the caller's are done with
        plans.add(id(wrapper._planned.plan_with({})[1]))
        q = scattered.normal(rng.randrange(2**31), batch * q_len, 2 * heads_k, dim).half()
        found = wrapper.run(q, cache.caches, return_lse=True, sinks=scores.sinks)
        rows = [range(b * q_len, (b + 1) * q_len) for b in range(batch)]
        ones = torch.ones(heads_k)
        checked(found, rows, q, cache, (ones, ones), scores.meant(), causal=True)
    assert len(plans) == 1


def test_pages_of_one_token_need_no_dimension_for_them() -> None:
    rng = random.Random(0)
    for layout in ("NHD", "HND"):
        cache = scattered.Scattered.of(
            rng, [5, 3], page_size=1, layout=layout, heads=2, dims=(16, 16), dtype=torch.float16
        )
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(*cache.csr(rng), 2, 2, 16, 1)
        q = scattered.normal(1, 2, 2, 16).half()
        narrow = tuple(x.squeeze(1 if layout == "NHD" else 2) for x in cache.caches)
        want = wrapper.run(q, cache.caches)
        assert torch.equal(wrapper.run(q, narrow), want)
        assert torch.equal(wrapper.run(q, torch.stack(narrow, dim=1)), want)


def test_forward_is_run_with_other_scores() -> None:
    rng = random.Random(5)
    lens = [9, 4]
    cache = scattered.Scattered.of(
        rng, lens, page_size=4, layout="NHD", heads=1, dims=(16, 16), dtype=torch.float16
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(*cache.csr(rng), 2, 1, 16, 4, window_left=1)
    q = scattered.normal(3, 2, 2, 16).half()
    found = wrapper.forward_return_lse(
        q, cache.caches, window_left=2, logits_soft_cap=1.5, sm_scale=0.2
    )
    ones = torch.ones(1)
    meant = {"scale": 0.2, "window_left": 2, "softcap": 1.5}
    rows = [range(0, 1), range(1, 2)]
    checked(found, rows, q, cache, (ones, ones), meant, causal=True)
    same = wrapper.forward(q, cache.caches, window_left=2, logits_soft_cap=1.5, sm_scale=0.2)
    assert torch.equal(same, found[0])
    # The next run is the planned one again, or with a window of its own.
    for window in (None, 1, 3, -1):
        found = wrapper.run(q, cache.caches, return_lse=True, window_left=window)
        meant = {"scale": 0.25, "window_left": 1 if window is None else window}
        checked(found, rows, q, cache, (ones, ones), meant, causal=True)


# --- prefill --------------------------------------------------------------------------------------


def draw_masks(
    rng: random.Random, q_lens: list[int], kv_lens: list[int]
) -> tuple[dict[str, Tensor], list[Tensor] | None]:
    """A mask as ``plan`` takes it, and of each request bool [q_len, kv_len]."""
    kind = rng.choice(["", "", "bool", "packed"])
    if not kind:
        return {}, None
    masks = [
        torch.rand(q_len, max(kv_len, 0), generator=_generator(rng)) < rng.choice([0.1, 0.6])
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
    ]
    if kind == "bool":
        return {"custom_mask": torch.cat([mask.flatten() for mask in masks])}, masks
    packed = []
    for mask in masks:
        bits = mask.flatten().tolist()
        for start in range(0, len(bits), 8):
            packed.append(sum(1 << i for i, bit in enumerate(bits[start : start + 8]) if bit))
    return {"packed_custom_mask": torch.tensor(packed, dtype=torch.uint8)}, masks


def draw_lengths(rng: random.Random) -> tuple[list[int], list[int]]:
    q_lens = [rng.choice([0, 1, rng.randint(1, 9)]) for _ in range(rng.randint(1, 4))]
    kv_lens = [rng.choice([0, 1, q_len, rng.randint(1, 40)]) for q_len in q_lens]
    return q_lens, kv_lens


def rows_of(q_lens: list[int]) -> list[range]:
    starts = [0, *itertools.accumulate(q_lens)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def lse_form(rng: random.Random) -> tuple[dict[str, str], float]:
    base, layout = rng.choice(["log2", "ln"]), rng.choice(["NH", "HN"])
    return {"lse_base": base, "lse_layout": layout}, 2.0 if base == "log2" else math.e


def unturned(found: tuple[Tensor, Tensor], form: dict[str, str]) -> tuple[Tensor, Tensor]:
    return found[0], found[1].t() if form["lse_layout"] == "HN" else found[1]


@MANY
@given(seed=SEEDS)
def test_paged_prefill_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    q_lens, kv_lens = draw_lengths(rng)
    dims = (16, rng.choice([16, 32]))
    cache = draw_cache(rng, kv_lens, dims)
    heads_k = cache.k[0].shape[1]
    heads = heads_k * rng.choice([1, 4])
    scores = Scores(rng, heads, dims[0])
    q_dtype, types = types_of(rng, cache)
    is_fp8 = cache.caches[0].dtype in scattered.FP8
    (k_scale, k_factor), (v_scale, v_factor) = (
        draw_scales(rng, heads_k) if is_fp8 else (None, torch.ones(heads_k)) for _ in range(2)
    )
    causal = rng.random() < 0.5
    mask, masks = draw_masks(rng, q_lens, kv_lens)
    others: dict[str, object] = dict(mask)
    if rng.random() < 0.3:
        others["max_token_per_sequence"] = max(q_lens) + rng.choice([0, 2])
    if rng.random() < 0.3:
        others["max_sequence_kv"] = max(kv_lens) + rng.choice([0, 2])
    if rng.random() < 0.3:
        others["seq_lens"] = torch.tensor(kv_lens, dtype=torch.int32).view(torch.uint32)
        others["seq_lens_q"] = torch.tensor(q_lens, dtype=torch.int32)
    if rng.random() < 0.3:
        others["block_tables"] = cache.table()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, cache.layout)
    wrapper.plan(
        scattered.indptr_of(q_lens),
        *cache.csr(rng),
        *(heads, heads_k, dims[0], cache.page_size),
        head_dim_vo=dims[1] if dims[0] != dims[1] or rng.random() < 0.5 else None,
        causal=causal,
        **scores.planned(),
        **types,
        **others,
    )
    spare = rng.choice([0, 0, 2])
    q = scattered.normal(seed % 2**31, sum(q_lens) + spare, heads, dims[0]).to(q_dtype)
    q[sum(q_lens) :] = scattered.NAN
    form, base = lse_form(rng)
    run = {"k_scale": k_scale, "v_scale": v_scale, "sinks": scores.sinks, **form}
    kv = given_cache(rng, cache)
    found = unturned(wrapper.run(q, kv, return_lse=True, **run), form)
    assert found[0].shape == (q.shape[0], heads, dims[1])
    assert not found[0][sum(q_lens) :].any()
    assert bool((found[1][sum(q_lens) :] == -math.inf).all())
    factors = k_factor, v_factor
    is_causal = causal and masks is None
    meant = scores.meant()
    rows = rows_of(q_lens)
    checked(found, rows, q, cache, factors, meant, causal=is_causal, masks=masks, base=base)
    if scores.sinks is None and not is_fp8:
        again = wrapper.forward_return_lse(q, kv, causal=not causal, **scores.planned())
        is_causal = not causal and masks is None
        checked(again, rows, q, cache, factors, meant, causal=is_causal, masks=masks)


@MANY
@given(seed=SEEDS)
def test_ragged_prefill_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    q_lens, kv_lens = draw_lengths(rng)
    dims, layout = (16, rng.choice([16, 32])), rng.choice(["NHD", "HND"])
    heads_k = rng.choice([1, 2])
    heads = heads_k * rng.choice([1, 4])
    scores = Scores(rng, heads, dims[0])
    dtype = rng.choice([*HALVES, *scattered.FP8])
    q_dtype = dtype if dtype in HALVES else torch.bfloat16
    spare = rng.choice([0, 3])
    rooms = [n + rng.choice([0, 2]) for n in kv_lens]
    is_short = rng.random() < 0.3
    rooms = rooms if is_short else kv_lens
    starts = scattered.indptr_of(rooms)
    k, v = (scattered.nan_like((sum(rooms) + spare, heads_k, dim), dtype) for dim in dims)
    tokens: list[list[Tensor]] = [[], []]
    for b, n in enumerate(kv_lens):
        for which, (cache, dim) in enumerate(zip((k, v), dims, strict=True)):
            values = scattered.normal(rng.randrange(2**31), n, heads_k, dim).to(dtype)
            cache[int(starts[b]) : int(starts[b]) + n] = values
            tokens[which].append(values)
    laid = scattered.Scattered(kv_lens, 1, layout, tokens[0], tokens[1], (k, v), [])
    if layout == "HND":
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    (k_scale, k_factor), (v_scale, v_factor) = (
        draw_scales(rng, heads_k) if dtype in scattered.FP8 else (1.0, torch.ones(heads_k))
        for _ in range(2)
    )
    mask, masks = draw_masks(rng, q_lens, kv_lens)
    causal = rng.random() < 0.5
    others: dict[str, object] = dict(mask)
    if is_short:
        others["seq_lens"] = torch.tensor(kv_lens)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(
        *(scattered.indptr_of(q_lens), starts, heads, heads_k, dims[0], dims[1]),
        causal=causal,
        q_data_type=q_dtype,
        kv_data_type=dtype,
        **scores.planned(),
        **others,
    )
    q = scattered.normal(seed % 2**31, sum(q_lens), heads, dims[0]).to(q_dtype)
    form, base = lse_form(rng)
    found = wrapper.run(q, k, v, k_scale=k_scale, v_scale=v_scale, return_lse=True, **form)
    meant = {**scores.meant(), "sinks": None}
    checked(
        unturned(found, form),
        rows_of(q_lens),
        q,
        laid,
        (k_factor, v_factor),
        meant,
        causal=causal and masks is None,
        masks=masks,
        base=base,
    )
    if dtype in HALVES:
        again = wrapper.forward_return_lse(q, k, v, causal=causal, **scores.planned())
        assert torch.equal(again[0], found[0])
        assert torch.equal(wrapper.forward(q, k, v, causal=causal, **scores.planned()), found[0])


@MANY
@given(seed=SEEDS)
def test_prefill_of_a_graph_reads_its_buffers(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads_k, dim, page_size = rng.randint(1, 3), 1, 16, rng.choice([1, 4])
    room, is_ragged, with_mask = batch * 40, rng.random() < 0.4, rng.random() < 0.5
    sizes = (batch + 1, batch + 1) if is_ragged else (batch + 1, batch + 1, room, batch)
    buffers = [torch.full((n,), scattered.GARBAGE, dtype=torch.int32) for n in sizes]
    masks_room = [torch.zeros(2000, dtype=torch.uint8), torch.zeros(batch + 1, dtype=torch.int32)]
    kind = (
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        if is_ragged
        else flashinfer.BatchPrefillWithPagedKVCacheWrapper
    )
    wrapper = kind(WORKSPACE, "NHD", True, *buffers, *(masks_room if with_mask else [None, None]))
    plans, uniform, num_rows = set(), rng.choice([None, 6]), 0
    for step in range(3):
        most = 6 if step == 0 else 1 + rng.randrange(6)
        q_lens = [rng.randint(0, most) for _ in range(batch)]
        q_lens[0] = 6 if step == 0 else q_lens[0]
        if step and sum(q_lens) > num_rows:
            q_lens = [1 if i == 0 else 0 for i in range(batch)]
        num_rows = num_rows or sum(q_lens)
        kv_lens = [rng.choice([0, rng.randint(1, 40)]) for _ in range(batch)]
        cache = scattered.Scattered.of(
            rng, kv_lens, page_size=page_size, layout="NHD", heads=heads_k, dims=(dim, dim),
            dtype=torch.float16,
        )  # fmt: skip
        masks = None
        given: dict[str, object] = {"uniform_q_len": uniform}
        if with_mask:
            masks = [torch.rand(a, b, generator=_generator(rng)) < 0.7
                     for a, b in zip(q_lens, kv_lens, strict=True)]  # fmt: skip
            given["custom_mask"] = torch.cat([mask.flatten() for mask in masks])
        q = scattered.normal(rng.randrange(2**31), num_rows, 2, dim).half()
        if is_ragged:
            tables = [scattered.indptr_of(q_lens), scattered.indptr_of(kv_lens)]
            wrapper.plan(*tables, 2, heads_k, dim, causal=True, **given)
            kv = [torch.cat(x) for x in (cache.k, cache.v)]
        else:
            tables = [scattered.indptr_of(q_lens), *cache.csr(random.Random(1))]
            wrapper.plan(*tables, 2, heads_k, dim, page_size, causal=True, **given)
            kv = [cache.caches]
        for buffer, table in zip(buffers, tables, strict=True):
            assert torch.equal(buffer[: len(table)], table)
            table.fill_(scattered.GARBAGE)
        plans.add(id(wrapper._planned.plan_with({})[1]))
        found = wrapper.run(q, *kv, return_lse=True)
        ones, meant = torch.ones(heads_k), {"scale": 0.25}
        is_causal = masks is None
        rows = rows_of(q_lens)
        checked(found, rows, q, cache, (ones, ones), meant, causal=is_causal, masks=masks)
        assert not found[0][sum(q_lens) :].any()
    assert len(plans) == 1


def test_nvfp4_caches_have_their_scales_beside_them() -> None:
    import jitattn

    rng, heads, dim, page_size = random.Random(0), 2, 32, 4
    lens = [9, 0, 6]
    for layout in ("NHD", "HND"):
        middle = (page_size, heads) if layout == "NHD" else (heads, page_size)
        cache = scattered.Scattered.of(
            rng, lens, page_size=page_size, layout=layout, heads=heads, dims=(dim, dim),
            dtype=torch.float16,
        )  # fmt: skip
        pairs = [jitattn.quant.quantize_kv(x.nan_to_num(0.0), "nvfp4") for x in cache.caches]
        meant = [
            jitattn.quant.dequantize_kv(a, dtype="nvfp4", block_scales=s).double() for a, s in pairs
        ]
        for values, tokens in zip(meant, (cache.k, cache.v), strict=True):
            for b, (ids, _) in enumerate(cache.ids):
                for t in range(lens[b]):
                    page, place = ids[t // page_size], t % page_size
                    own = values[page, place] if layout == "NHD" else values[page, :, place]
                    tokens[b] = tokens[b].double()
                    tokens[b][t] = own
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
        q_lens = [2, 1, 3]
        tables = scattered.indptr_of(q_lens), *cache.csr(rng)
        wrapper.plan(*tables, 4, heads, dim, page_size, causal=True, kv_data_type=torch.uint8)
        q = scattered.normal(4, 6, 4, dim).half()
        data, block_scales = (tuple(pair[i] for pair in pairs) for i in range(2))
        found = wrapper.run(
            q, data, kv_cache_sf=block_scales, k_scale=0.5, v_scale=torch.tensor([2.0]),
            return_lse=True,
        )  # fmt: skip
        factors = torch.full((heads,), 0.5), torch.full((heads,), 2.0)
        meant_scores = {"scale": dim**-0.5}
        checked(found, rows_of(q_lens), q, cache, factors, meant_scores, causal=True)
        both = torch.stack(data, dim=1), torch.stack(block_scales, dim=1)
        assert both[0].shape[2:4] == middle
        again = wrapper.run(q, both[0], kv_cache_sf=both[1], k_scale=0.5, v_scale=2.0)
        assert torch.equal(again, found[0])


# --- latent attention -----------------------------------------------------------------------------


def latent(
    q: tuple[Tensor, Tensor], ckv: Tensor, kpe: Tensor, *, scale: float, causal: bool
) -> object:
    keys = torch.cat((ckv.double(), kpe.double()), dim=1)[:, None]
    queries = torch.cat([x.double() for x in q], dim=2)
    return scattered.defined(queries, keys, ckv.double()[:, None], scale=scale, causal=causal)


@settings(MANY, max_examples=40)
@given(seed=SEEDS)
def test_latent_attention_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    q_lens, kv_lens = draw_lengths(rng)
    dims, heads, page_size = (256, 32), rng.choice([1, 4]), rng.choice([1, 4, 16])
    q_dtype = rng.choice(HALVES)
    dtype = rng.choice([q_dtype, q_dtype, torch.float8_e4m3fn])
    cache = scattered.Scattered.of(
        rng, kv_lens, page_size=page_size, layout="NHD", heads=1, dims=dims, dtype=dtype,
        form=rng.choice(["pair", "strided", "interleaved"]),
    )  # fmt: skip
    caches = tuple(x.squeeze(2) for x in cache.caches)
    scale = 0.75 if dtype not in HALVES else 1.0
    causal = rng.random() < 0.5
    plan = {
        "num_heads": heads, "head_dim_ckv": dims[0], "head_dim_kpe": dims[1],
        "page_size": page_size, "causal": causal, "sm_scale": 0.1, "q_data_type": q_dtype,
        "kv_data_type": dtype,
    }  # fmt: skip
    indptr, indices, _ = cache.csr(rng)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    form = rng.choice(["flat", "metadata", "dense", "graph"])
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    if form == "flat":
        wrapper.plan(scattered.indptr_of(q_lens), indptr, indices, lens, **plan)
    elif form == "metadata":
        metadata = flashinfer.MLAPlanMetadata.csr(
            scattered.indptr_of(q_lens), indptr, indices, lens
        )
        wrapper.plan(metadata=metadata, lse_mode="base2", **plan)
    elif form == "dense":
        metadata = flashinfer.MLAPlanMetadata.dense(
            scattered.indptr_of(q_lens), cache.table(), lens
        )
        wrapper.plan(metadata=metadata, lse_mode="base2", **plan)
    else:
        sizes = len(q_lens) + 1, len(q_lens) + 1, len(indices) + 9, len(q_lens)
        buffers = [torch.full((n,), scattered.GARBAGE, dtype=torch.int32) for n in sizes]
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True, *buffers)
        # First as many queries over one page of nothing, then those that are meant.
        nothing = torch.zeros_like(lens)
        wrapper.plan(scattered.indptr_of(q_lens), indptr, indices, nothing, **plan)
        wrapper.plan(scattered.indptr_of(q_lens), indptr, indices, lens, **plan)
    q = tuple(
        scattered.normal(rng.randrange(2**31), sum(q_lens), heads, dim).to(q_dtype) for dim in dims
    )
    scales = {"ckv_scale": scale, "kpe_scale": scale} if dtype not in HALVES else {}
    kind = rng.choice(["parts", "pairs", "packed"])
    if kind == "parts":
        found = wrapper.run(*q, *caches, return_lse=True, **scales)
    elif kind == "pairs":
        found = wrapper.run(query=q, kv_cache=caches, return_lse=True, **scales)
    else:
        whole = torch.cat(q, dim=2), torch.cat([x.float() for x in caches], dim=2).to(dtype)
        found = wrapper.run(query=whole[0], kv_cache=whole[1], return_lse=True, **scales)
    for b, own in enumerate(rows_of(q_lens)):
        span = slice(own.start, own.stop)
        ckv, kpe = (x[b].squeeze(1).double() * scale for x in (cache.k, cache.v))
        parts = q[0][span], q[1][span]
        want, want_lse, size = latent(parts, ckv, kpe, scale=0.1, causal=causal)
        scattered.check_out(found[0][span], want, size)
        scattered.check_lse(found[1][span], want_lse)
    if form in ("flat", "graph"):
        natural = wrapper.run(*q, *caches, return_lse=True, return_lse_base_on_e=True, **scales)
        torch.testing.assert_close(natural[1], found[1] * math.log(2))


# --- around attention -----------------------------------------------------------------------------


@MANY
@given(seed=SEEDS)
def test_appended_tokens_are_where_attention_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    new = [rng.choice([0, 1, rng.randint(1, 6)]) for _ in range(rng.randint(1, 4))]
    lens = [n + rng.choice([0, 1, rng.randint(0, 20)]) for n in new]
    is_latent = rng.random() < 0.2
    heads, dims = (1, (32, 16)) if is_latent else (rng.choice([1, 2]), (16, 16))
    dtype = rng.choice([*HALVES, *HALVES, *scattered.FP8])
    layout = "NHD" if is_latent else rng.choice(["NHD", "HND"])
    form = rng.choice(["pair", "strided", "interleaved", *([] if is_latent else ["one"])])
    cache = scattered.Scattered.of(
        rng, lens, page_size=rng.choice([1, 3, 16]), layout=layout, heads=heads, dims=dims,
        dtype=dtype, form=form,
    )  # fmt: skip
    before = [x.clone() for x in cache.caches]
    indptr, indices, last = cache.csr(rng)
    nnz = sum(new) + rng.choice([0, 2])
    append_indptr = scattered.indptr_of(new)
    seq_lens = flashinfer.get_seq_lens(indptr, last, cache.page_size)
    assert seq_lens.tolist() == lens
    batch, positions = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, nnz)
    want = [(b, lens[b] - n + i) for b, n in enumerate(new) for i in range(n)]
    assert list(zip(batch.tolist(), positions.tolist(), strict=True)) == want + [(-1, 0)] * (
        nnz - len(want)
    )
    source = torch.float16 if dtype in scattered.FP8 else dtype
    k, v = (scattered.normal(rng.randrange(2**31), nnz, heads, dim).to(source) for dim in dims)
    order = list(range(nnz))
    rng.shuffle(order)  # tokens may come in any order
    k, v, batch, positions = (x[order] for x in (k, v, batch, positions))
    if is_latent:
        parts = [x.squeeze(2) for x in cache.caches]
        flashinfer.append_paged_mla_kv_cache(
            k.squeeze(1), v.squeeze(1), batch, positions, *parts, indices, indptr, last
        )
    else:
        kv = given_cache(rng, cache)
        flashinfer.append_paged_kv_cache(
            k, v, batch.long(), positions, kv, indices, indptr, last, layout
        )
    for i, (b, position) in enumerate(zip(batch.tolist(), positions.tolist(), strict=True)):
        if b < 0:
            continue
        page, place = cache.ids[b][0][position // cache.page_size], position % cache.page_size
        at = (page, place) if layout == "NHD" else (page, slice(None), place)
        for stored, old, value in zip(cache.caches, before, (k[i], v[i]), strict=True):
            assert torch.equal(stored[at].float(), value.to(dtype).float())
            old[at] = stored[at]
    kind = torch.uint8 if dtype in scattered.FP8 else torch.int16
    for stored, old in zip(cache.caches, before, strict=True):
        assert torch.equal(stored.contiguous().view(kind), old.contiguous().view(kind))


@settings(MANY, max_examples=60)
@given(seed=SEEDS)
def test_merged_states_are_attention_over_all_keys(seed: int) -> None:
    rng = random.Random(seed)
    num_states, tokens, heads, dim = rng.choice([1, 2, 5]), rng.randint(1, 4), 2, 16
    dtype = rng.choice([*HALVES, torch.float32])
    v = scattered.normal(seed % 2**31, tokens, num_states, heads, dim).to(dtype)
    s = scattered.normal(seed // 7 % 2**31, tokens, num_states, heads) * 8
    dead = torch.rand(s.shape, generator=_generator(rng)) < 0.3
    s[dead] = -math.inf
    v[dead] = scattered.NAN  # whatever a state without keys holds
    total = torch.logsumexp(s.double() * math.log(2), dim=1)
    weights = torch.exp(s.double() * math.log(2) - total.nan_to_num(neginf=0.0)[:, None])
    weights = torch.where(dead, 0.0, weights)
    values = torch.where(dead[..., None], 0.0, v.double())
    want, size = ((weights[..., None] * x).sum(dim=1) for x in (values, values.abs()))
    found = flashinfer.merge_states(v, s)
    assert found[0].dtype == dtype
    scattered.check_out(
        found[0], want, size, slack=1e-5
    )  # a logarithm of 30 in float32, of another base
    scattered.check_lse(found[1], total)
    if num_states != 2:
        return
    pair = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1].contiguous(), s[:, 1].double())
    assert torch.equal(pair[0], found[0])
    assert torch.equal(pair[1], found[1])
    mask = None
    if rng.random() < 0.6:
        mask = torch.rand(tokens, generator=_generator(rng)) < 0.5
        mask = mask.to(rng.choice([torch.bool, torch.uint8]))
    own_v, own_s = v[:, 0].clone(), s[:, 0].clone()
    assert flashinfer.merge_state_in_place(own_v, own_s, v[:, 1], s[:, 1], mask) is None
    for t in range(tokens):
        is_merged = mask is None or bool(mask[t])
        source = found if is_merged else (v[:, 0], s[:, 0])
        assert torch.equal(own_v[t].nan_to_num(7.0), source[0][t].nan_to_num(7.0))
        assert torch.equal(own_s[t], source[1][t])


def test_positions_outside_of_requests_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where nothing looks at the values first."""
    from jitattn.compat.flashinfer import page

    monkeypatch.setattr(page, "_check_places", lambda *_: None)
    cache = torch.full((3, 2, 4, 2, 16), scattered.NAN).half()
    append(
        paged_kv_cache=cache,
        batch_indices=torch.tensor([0, 0, 1, 1, 7, -3, 0]),
        positions=torch.tensor([2, 3, 1, 0, 0, 0, -1]),
        append_key=scattered.normal(0, 7, 2, 16).half(),
        append_value=scattered.normal(1, 7, 2, 16).half(),
    )
    written = (~cache.isnan()).all(dim=-1).all(dim=-1).nonzero().tolist()
    assert written == [[0, 0, 0], [0, 1, 0], [2, 0, 2], [2, 1, 2]]


def test_positions_fill_what_is_given() -> None:
    batch, positions = (torch.full((6,), 9, dtype=torch.int32) for _ in range(2))
    found = flashinfer.get_batch_indices_positions(
        scattered.indptr_of([2, 0, 3]), torch.tensor([5, 7, 3]), 6, batch, positions
    )
    assert found[0] is batch
    assert found[1] is positions
    assert batch.tolist() == [0, 0, 2, 2, 2, -1]
    assert positions.tolist() == [3, 4, 0, 1, 2, 0]
    empty = flashinfer.get_batch_indices_positions(scattered.indptr_of([]), torch.zeros(0).int(), 2)
    assert empty[0].tolist() == [-1, -1]
    assert empty[1].tolist() == [0, 0]


# --- signatures -----------------------------------------------------------------------------------


def ours(name: str) -> dict[str, object]:
    value: object = flashinfer
    for part in name.split("."):
        value = getattr(value, part)
    return signatures.of_function(value)


@pytest.mark.parametrize("name", signatures.HOME)
def test_signatures_are_those_of_the_sources(name: str) -> None:
    root = signatures.sources()
    if root is None:
        pytest.skip(f"flashinfer-python {signatures.VERSION} is not installed")
    theirs = signatures.of_source(root, name)
    found = ours(name)
    assert found == theirs
    if not name.endswith("Wrapper.plan") or "Decode" not in name:
        assert list(found) == list(theirs)


# --- refusals -------------------------------------------------------------------------------------


def decode(**changes: object) -> object:
    """One decode call, of which ``changes`` are those of the method that has them."""
    methods = ("__init__", "plan", "run")
    kind = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    given = [
        {"float_workspace_buffer": WORKSPACE},
        {
            "indptr": torch.tensor([0, 2, 3]).int(),
            "indices": torch.tensor([0, 1, 2]).int(),
            "last_page_len": torch.tensor([3, 4]).int(),
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "page_size": 4,
        },
        {
            "q": scattered.normal(0, 2, 4, 16).half(),
            "paged_kv_cache": scattered.normal(1, 3, 2, 4, 2, 16).half(),
        },
    ]
    return called(kind, methods, given, changes)


def called(
    kind: type, methods: tuple[str, ...], given: list[dict[str, object]], changes: dict[str, object]
) -> object:
    """Call methods one after the other; changes go to the last that has them, or to "plan.x"."""
    left = dict(changes)
    for method, arguments in reversed([*zip(methods, given, strict=True)]):
        for name in [*left]:
            own = name.removeprefix(f"{method}.")
            if own in inspect.signature(getattr(kind, method)).parameters:
                arguments[own] = left.pop(name)
    assert not left
    wrapper = kind(**given[0])
    wrapper.plan(**given[1])
    return wrapper.run(**given[2])


def prefill(**changes: object) -> object:
    given = [
        {"float_workspace_buffer": WORKSPACE},
        {
            "qo_indptr": torch.tensor([0, 2, 5]).int(),
            "paged_kv_indptr": torch.tensor([0, 2, 3]).int(),
            "paged_kv_indices": torch.tensor([0, 1, 2]).int(),
            "paged_kv_last_page_len": torch.tensor([3, 4]).int(),
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim_qk": 16,
            "page_size": 4,
        },
        {
            "q": scattered.normal(0, 5, 4, 16).half(),
            "paged_kv_cache": scattered.normal(1, 3, 2, 4, 2, 16).half(),
        },
    ]
    methods = ("__init__", "plan", "run")
    return called(flashinfer.BatchPrefillWithPagedKVCacheWrapper, methods, given, changes)


def ragged(**changes: object) -> object:
    given = [
        {"float_workspace_buffer": WORKSPACE},
        {
            "qo_indptr": torch.tensor([0, 2, 5]).int(),
            "kv_indptr": torch.tensor([0, 2, 6]).int(),
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim_qk": 16,
        },
        {
            "q": scattered.normal(0, 5, 4, 16).half(),
            "k": scattered.normal(1, 6, 2, 16).half(),
            "v": scattered.normal(2, 6, 2, 16).half(),
        },
    ]
    methods = ("__init__", "plan", "run")
    return called(flashinfer.BatchPrefillWithRaggedKVCacheWrapper, methods, given, changes)


def latents(**changes: object) -> object:
    given = [
        {"float_workspace_buffer": WORKSPACE},
        {
            "qo_indptr": torch.tensor([0, 2, 5]).int(),
            "kv_indptr": torch.tensor([0, 2, 3]).int(),
            "kv_indices": torch.tensor([0, 1, 2]).int(),
            "kv_len_arr": torch.tensor([7, 4]).int(),
            "num_heads": 2,
            "head_dim_ckv": 256,
            "head_dim_kpe": 32,
            "page_size": 4,
            "causal": True,
            "sm_scale": 0.1,
            "q_data_type": torch.float16,
            "kv_data_type": torch.float16,
        },
        {
            "q_nope": scattered.normal(0, 5, 2, 256).half(),
            "q_pe": scattered.normal(1, 5, 2, 32).half(),
            "ckv_cache": scattered.normal(2, 3, 4, 256).half(),
            "kpe_cache": scattered.normal(3, 3, 4, 32).half(),
        },
    ]
    methods = ("__init__", "plan", "run")
    return called(flashinfer.BatchMLAPagedAttentionWrapper, methods, given, changes)


def append(**changes: object) -> None:
    given: dict[str, object] = {
        "append_key": scattered.normal(0, 3, 2, 16).half(),
        "append_value": scattered.normal(1, 3, 2, 16).half(),
        "batch_indices": torch.tensor([0, 0, 1]),
        "positions": torch.tensor([1, 2, 0]),
        "paged_kv_cache": torch.zeros(3, 2, 4, 2, 16).half(),
        "kv_indices": torch.tensor([2, 0]).int(),
        "kv_indptr": torch.tensor([0, 1, 2]).int(),
        "kv_last_page_len": torch.tensor([3, 1]).int(),
    }
    given |= changes
    cache = given["paged_kv_cache"]
    try:
        flashinfer.append_paged_kv_cache(**given)
    except Exception:
        if isinstance(cache, Tensor):
            assert not cache.detach().float().any(), "refused, and written nevertheless"
        raise


def append_latents(**changes: object) -> None:
    given: dict[str, object] = {
        "append_ckv": scattered.normal(0, 3, 32).half(),
        "append_kpe": scattered.normal(1, 3, 16).half(),
        "batch_indices": torch.tensor([0, 0, 1]),
        "positions": torch.tensor([1, 2, 0]),
        "ckv_cache": torch.zeros(3, 4, 32).half(),
        "kpe_cache": torch.zeros(3, 4, 16).half(),
        "kv_indices": torch.tensor([2, 0]).int(),
        "kv_indptr": torch.tensor([0, 1, 2]).int(),
        "kv_last_page_len": torch.tensor([3, 1]).int(),
    }
    flashinfer.append_paged_mla_kv_cache(**(given | changes))


def merge(**changes: object) -> None:
    given: dict[str, object] = {
        "v": scattered.normal(0, 3, 2, 16),
        "s": scattered.normal(1, 3, 2),
        "v_other": scattered.normal(2, 3, 2, 16),
        "s_other": scattered.normal(3, 3, 2),
    }
    flashinfer.merge_state_in_place(**(given | changes))


def merge_two(**changes: object) -> object:
    given = {n: scattered.normal(i, 3, 2, *([16] if n[0] == "v" else []))
             for i, n in enumerate(("v_a", "s_a", "v_b", "s_b"))}  # fmt: skip
    return flashinfer.merge_state(**(given | changes))


def merge_many(**changes: object) -> object:
    given = {"v": scattered.normal(0, 3, 4, 2, 16), "s": scattered.normal(1, 3, 4, 2)}
    return flashinfer.merge_states(**(given | changes))


def positions(**changes: object) -> object:
    given = {
        "append_indptr": scattered.indptr_of([1, 2]),
        "seq_lens": torch.tensor([4, 2]),
        "nnz": 3,
    }
    return flashinfer.get_batch_indices_positions(**(given | changes))


def lengths(**changes: object) -> object:
    given = {
        "kv_indptr": scattered.indptr_of([1, 2]),
        "kv_last_page_len": torch.tensor([4, 2]).int(),
        "page_size": 4,
    }
    return flashinfer.get_seq_lens(**(given | changes))


BUFFERS = {
    "paged_kv_indptr_buffer": torch.zeros(3).int(),
    "paged_kv_indices_buffer": torch.zeros(5).int(),
    "paged_kv_last_page_len_buffer": torch.zeros(2).int(),
}
PREFILL_BUFFERS = {
    "qo_indptr_buf": torch.zeros(3).int(),
    "paged_kv_indptr_buf": torch.zeros(3).int(),
    "paged_kv_indices_buf": torch.zeros(5).int(),
    "paged_kv_last_page_len_buf": torch.zeros(2).int(),
}
ONE = torch.ones(1)
INTS = torch.tensor([0, 2, 3]).int()
# What no wrapper and function takes, by those that have it.
PLAN_ALL = [
    ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode is 'ROPE_LLAMA'"),
    ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode is 'ALIBI'"),
    ({"rope_scale": 1.0}, "rope_scale is 1.0"),
    ({"rope_theta": 1e4}, "rope_theta is 10000"),
    ({"window_left": 1.5, "plan.window_left": 1.5}, "window_left is a float"),
    ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1"),
    ({"logits_soft_cap": math.nan}, "logits_soft_cap is nan"),
    ({"sm_scale": math.inf}, "sm_scale is inf"),
    ({"sm_scale": "big"}, "sm_scale is a str"),
    ({"num_qo_heads": 3}, "num_qo_heads is 3"),
    ({"num_kv_heads": 0}, "num_kv_heads is 0"),
    ({"num_qo_heads": True}, "num_qo_heads is a bool"),
    ({"q_data_type": torch.float8_e4m3fn}, "q_data_type is float8_e4m3fn"),
    ({"q_data_type": "halves"}, "q_data_type is 'halves'"),
    ({"q_data_type": 16}, "q_data_type is 16"),
    ({"q_data_type": torch.bfloat16}, "has dtype float16: expected bfloat16"),
    ({"kv_data_type": torch.bfloat16}, "kv_data_type is bfloat16"),
    ({"kv_data_type": torch.int8}, "kv_data_type is int8"),
    ({"kv_data_type": torch.uint8}, "kv_cache_sf|has dtype"),
    ({"o_data_type": torch.float8_e4m3fn}, "o_data_type is float8_e4m3fn"),
    ({"fixed_split_size": 1.5}, "fixed_split_size is a float"),
    ({"disable_split_kv": 1}, "disable_split_kv is a int"),
    ({"non_blocking": 1}, "non_blocking is a int"),
    ({"kv_layout": "DHN"}, "kv_layout is 'DHN'"),
    ({"backend": "fa9"}, "backend is 'fa9'"),
    ({"jit_args": ["name"]}, "jit_args is"),
    ({"use_cuda_graph": 1}, "use_cuda_graph is a int"),
    ({"float_workspace_buffer": 128}, "float_workspace_buffer is a int"),
    ({"q": scattered.normal(0, 2, 16).half()}, r"q has shape \[2, 16\]"),
    ({"q": None}, "q is a NoneType"),
    ({"q_scale": 0.5}, "q_scale is 0.5"),
    ({"q_scale": ONE}, "q_scale is a tensor"),
    ({"k_scale": 2.0}, "k_scale is 2.0"),
    ({"v_scale": ONE}, "v_scale is a tensor"),
    ({"return_lse": 1}, "return_lse is a int"),
    ({"lse": torch.zeros(7, 7)}, r"lse has shape \[7, 7\]"),
    ({"lse": torch.zeros(2, 4).half()}, "lse has dtype"),
    ({"out": torch.zeros(7, 4, 16).half()}, "out has shape"),
    ({"enable_pdl": "yes"}, "enable_pdl is 'yes'"),
    ({"kv_cache_sf": (ONE, ONE)}, "kv_cache_sf is given"),
]
PAGED_ALL = [
    ({"page_size": 0}, "page_size is 0"),
    ({"page_size": 5}, "paged_kv_cache has pages of"),
    ({"paged_kv_cache": None}, "paged_kv_cache is a NoneType"),
    ({"paged_kv_cache": (scattered.normal(0, 3, 4, 2, 16).half(),)}, "paged_kv_cache is a tuple"),
    ({"paged_kv_cache": scattered.normal(0, 3, 2, 4, 2, 16)}, "paged_kv_cache has dtype float32"),
    ({"paged_kv_cache": scattered.normal(0, 4, 16).half()}, "paged_kv_cache has shape"),
    ({"paged_kv_cache": scattered.normal(0, 3, 2, 4, 3, 16).half()}, "paged_kv_cache has pages of"),
    ({"paged_kv_cache": scattered.normal(0, 3, 3, 4, 2, 16).half()}, "paged_kv_cache has shape"),
    (
        {"paged_kv_cache": scattered.normal(0, 3, 2, 4, 2, 16).half().requires_grad_()},
        "requires a gradient",
    ),
    ({"window_left": 2.5}, "window_left is a float"),
    ({"sinks": torch.ones(3)}, "sinks has shape"),
    ({"sinks": torch.ones(4).int()}, "sinks has dtype"),
    ({"skip_softmax_threshold_scale_factor": 0.1}, "skip_softmax_threshold_scale_factor is 0.1"),
    ({"block_tables": INTS}, "block_tables has shape"),
    ({"block_tables": torch.zeros(3, 2).int()}, r"block_tables has shape \[3, 2\]"),
    ({"block_tables": torch.zeros(2, 2)}, "block_tables has dtype"),
    ({"seq_lens": torch.tensor([1, 2])}, r"seq_lens is \[1, 2\]"),
    ({"seq_lens": torch.tensor([7.0, 4.0])}, "seq_lens has dtype"),
    ({"seq_lens": torch.tensor([7])}, "seq_lens has shape"),
]
PREFILL_ALL = [
    ({"head_dim_qk": 20}, "head_dim_qk is 20"),
    ({"head_dim_vo": 8}, "head_dim_vo is 8"),
    ({"causal": 1}, "causal is a int"),
    ({"use_fp16_qk_reduction": True}, "use_fp16_qk_reduction is True"),
    ({"prefix_len_ptr": ONE}, "prefix_len_ptr is a tensor"),
    ({"token_pos_in_items_ptr": ONE}, "token_pos_in_items_ptr is a tensor"),
    ({"token_pos_in_items_len": 4}, "token_pos_in_items_len is 4"),
    ({"max_item_len_ptr": ONE}, "max_item_len_ptr is a tensor"),
    ({"jit_kwargs": {}}, "jit_kwargs is"),
    ({"variant_owns_mask": True}, "variant_owns_mask is True"),
    ({"seq_lens_q": torch.tensor([2, 2])}, r"seq_lens_q is \[2, 2\]"),
    ({"max_token_per_sequence": 2}, "max_token_per_sequence is 2"),
    ({"max_token_per_sequence": -1}, "max_token_per_sequence is -1"),
    ({"max_sequence_kv": 3}, "max_sequence_kv is 3"),
    ({"uniform_q_len": 0}, "uniform_q_len is 0"),
    ({"qo_indptr": torch.tensor([0, 2, 5])}, "qo_indptr has dtype int64"),
    ({"qo_indptr": torch.tensor([0, 3, 2]).int()}, r"qo_indptr\[2\] is 2"),
    ({"qo_indptr": torch.tensor([1, 3, 5]).int()}, r"qo_indptr\[0\] is 1"),
    ({"custom_mask": torch.ones(3).bool()}, "custom_mask has 3 entries"),
    ({"custom_mask": torch.ones(26)}, "custom_mask has dtype"),
    ({"packed_custom_mask": torch.ones(2).byte()}, "packed_custom_mask has 2 entries"),
    ({"packed_custom_mask": torch.ones(5).bool()}, "packed_custom_mask has dtype"),
    (
        {"custom_mask": ONE.bool(), "packed_custom_mask": ONE.byte()},
        "packed_custom_mask is given",
    ),
    ({"lse_base": "log10"}, "lse_base is 'log10'"),
    ({"lse_layout": "NHD"}, "lse_layout is 'NHD'"),
    ({"q": scattered.normal(0, 4, 4, 16).half()}, "q has 4 rows"),
]
DECODE = [
    ({"head_dim": 24}, "head_dim is 24"),
    ({"window_right": 1}, "window_right is 1"),
    ({"is_causal": True}, "is_causal is True"),
    ({"is_causal": False, "plan.q_len_per_req": 2}, "is_causal is False"),
    ({"plan.q_len_per_req": 0}, "q_len_per_req is 0"),
    ({"q_len_per_req": 2}, "q_len_per_req is 2"),
    ({"plan.q_len_per_req": 2}, "q has"),
    ({"use_tensor_cores": 2}, "use_tensor_cores is 2"),
    ({"data_type": "f16", "q_data_type": None}, "data_type is 'f16'"),
    ({"indptr": torch.tensor([0, 2, 3])}, "indptr has dtype int64"),
    ({"indptr": torch.tensor([0, 2, 4]).int()}, r"indptr\[-1\] is 4: indices has 3"),
    ({"indptr": torch.tensor([[0, 2]]).int()}, "indptr has shape"),
    ({"indices": torch.tensor([0, 1, 2])}, "indices has dtype int64"),
    ({"indices": torch.zeros(3, 1).int()}, "indices has shape"),
    ({"indices": torch.tensor([0, 1, 9]).int()}, "request 1 has the entry 9 for K"),
    ({"last_page_len": torch.tensor([3, 5]).int()}, r"last_page_len\[1\] is 5"),
    ({"last_page_len": torch.tensor([-1, 4]).int()}, r"last_page_len\[0\] is -1"),
    ({"last_page_len": torch.tensor([3]).int()}, r"last_page_len has shape \[1\]"),
    ({"last_page_len": torch.tensor([3.0, 4.0])}, "last_page_len has dtype"),
    ({"use_cuda_graph": True}, "paged_kv_indptr_buffer is None"),
    (
        {"use_cuda_graph": True, **BUFFERS, "paged_kv_indices_buffer": None},
        "paged_kv_indices_buffer is None",
    ),
    (
        {"use_cuda_graph": True, **BUFFERS, "paged_kv_indptr_buffer": torch.zeros(4).int()},
        "paged_kv_indptr_buffer has 4 entries",
    ),
    (
        {"use_cuda_graph": True, **BUFFERS, "paged_kv_indices_buffer": torch.zeros(2).int()},
        "indices has 3 entries: paged_kv_indices_buffer has 2",
    ),
    (
        {"use_cuda_graph": True, **BUFFERS, "paged_kv_indices_buffer": torch.zeros(2)},
        "paged_kv_indices_buffer has dtype",
    ),
    (
        {"use_cuda_graph": True, **BUFFERS, "block_tables": torch.zeros(2, 2).int()},
        "block_tables is given",
    ),
]
PREFILL = [
    ({"use_fp16_softmax": True}, "use_fp16_softmax is True"),
    ({"uses_spcompress": True}, "uses_spcompress is True"),
    ({"paged_kv_indptr": torch.tensor([0, 3]).int()}, "paged_kv_indptr has 2 entries"),
    ({"paged_kv_indptr": torch.tensor([0, 2, 4]).int()}, r"paged_kv_indptr\[-1\] is 4"),
    ({"paged_kv_indices": torch.tensor([0.0])}, "paged_kv_indices has dtype"),
    ({"paged_kv_last_page_len": torch.tensor([3, 5]).int()}, r"paged_kv_last_page_len\[1\]"),
    ({"use_cuda_graph": True}, "qo_indptr_buf is None"),
    (
        {"use_cuda_graph": True, **PREFILL_BUFFERS, "custom_mask": torch.ones(26).bool()},
        "custom_mask_buf has 0 bytes",
    ),
    (
        {"use_cuda_graph": True, **PREFILL_BUFFERS, "paged_kv_indptr_buf": ONE.int()},
        "paged_kv_indptr_buf has 1 entries",
    ),
    ({"use_cuda_graph": True, **PREFILL_BUFFERS, "uniform_q_len": 2}, "uniform_q_len"),
    ({"use_cuda_graph": True, **PREFILL_BUFFERS, "custom_mask_buf": ONE}, "custom_mask_buf has"),
    (
        {"use_cuda_graph": True, **PREFILL_BUFFERS, "custom_mask_buf": ONE.byte()},
        "mask_indptr_buf is a NoneType",
    ),
]
RAGGED = [
    ({"v_indptr": INTS}, "v_indptr is a tensor"),
    ({"o_indptr": INTS}, "o_indptr is a tensor"),
    ({"o_scale": 2.0}, "o_scale is 2.0"),
    ({"kv_indptr": torch.tensor([0, 2]).int()}, "kv_indptr has 2 entries"),
    ({"kv_indptr": torch.tensor([0, 2, 1]).int()}, r"kv_indptr\[2\] is 1"),
    ({"kv_indptr": torch.tensor([0, 2, 9]).int()}, "request 1 has 7 tokens"),
    ({"seq_lens": torch.tensor([2, 5])}, r"seq_lens is \[2, 5\]"),
    ({"seq_lens": torch.tensor([2])}, "seq_lens has shape"),
    ({"k": scattered.normal(0, 6, 1, 2, 16).half()}, "k has shape"),
    ({"v": scattered.normal(0, 6, 2, 16)}, "v has dtype float32"),
    ({"k": scattered.normal(0, 6, 2, 16).half().requires_grad_()}, "k requires a gradient"),
    ({"v": scattered.normal(0, 5, 2, 16).half()}, "tokens"),
    ({"use_cuda_graph": True, "qo_indptr_buf": INTS}, "kv_indptr_buf is None"),
]
LATENTS = [
    ({"num_heads": None}, "num_heads is None"),
    ({"head_dim_ckv": 128}, "head_dim_ckv is 128"),
    ({"head_dim_kpe": 16}, "head_dim_kpe is 16"),
    ({"page_size": 0}, "page_size is 0"),
    ({"causal": None}, "causal is None"),
    ({"sm_scale": None}, "sm_scale is None"),
    ({"sm_scale": math.nan}, "sm_scale is nan"),
    ({"q_data_type": torch.float8_e4m3fn}, "q_data_type is float8_e4m3fn"),
    ({"q_data_type": "float16"}, "q_data_type is 'float16'"),
    ({"kv_data_type": torch.bfloat16}, "kv_data_type is bfloat16"),
    ({"output_dtype": torch.float8_e4m3fn}, "output_dtype is"),
    ({"use_profiler": True}, "use_profiler is True"),
    ({"output_scale": "per-tensor"}, "output_scale is 'per-tensor'"),
    ({"scale_mode": "bmm-scalar"}, "scale_mode is 'bmm-scalar'"),
    ({"skip_softmax": True}, "skip_softmax is True"),
    ({"use_sinks": True}, "use_sinks is True"),
    ({"query_layout": "split-pair"}, "query_layout is 'split-pair'"),
    ({"kv_cache_layout": "packed"}, "kv_cache_layout='packed'"),
    ({"query_layout": "packed"}, "query_layout='packed'"),
    ({"lse_mode": "base10"}, "lse_mode is 'base10'"),
    ({"lse_mode": "base2"}, "lse_mode='base2'"),
    ({"lse_mode": "base2", "return_lse": True, "return_lse_base_on_e": True}, "lse_mode='base2'"),
    ({"metadata": object()}, "qo_indptr is given, and so is metadata"),
    ({"seq_lens": INTS}, "seq_lens is given beside"),
    ({"max_q_len": 3}, "max_q_len is given beside"),
    ({"kv_indices": None}, "kv_indices is None"),
    ({"kv_len_arr": torch.tensor([7])}, "kv_len_arr has 1 entries"),
    ({"kv_len_arr": torch.tensor([9, 4])}, r"kv_len_arr\[0\] is 9"),
    ({"kv_indptr": torch.tensor([0, 2]).int()}, "kv_indptr has 2 entries"),
    ({"backend": "fa9"}, "backend is 'fa9'"),
    ({"use_cuda_graph": True}, "qo_indptr is None"),
    ({"q_nope": None}, "q_nope is None"),
    ({"query": ONE}, "q_nope is given"),
    ({"kpe_cache": None}, "kpe_cache is None"),
    ({"kv_cache": ONE}, "ckv_cache is given"),
    ({"q_nope": scattered.normal(0, 5, 2, 128).half()}, "q_nope has shape"),
    ({"q_nope": scattered.normal(0, 5, 2, 256)}, "q_nope has dtype"),
    ({"q_pe": scattered.normal(0, 5, 2, 32).half().requires_grad_()}, "query requires a gradient"),
    (
        {"kpe_cache": scattered.normal(0, 3, 4, 32).half().requires_grad_()},
        "kv_cache requires a gradient",
    ),
    ({"ckv_cache": scattered.normal(0, 3, 2, 256).half()}, "ckv_cache has shape"),
    ({"kpe_cache": scattered.normal(0, 3, 4, 32)}, "kpe_cache has dtype"),
    ({"query": [ONE], "q_nope": None, "q_pe": None}, "query is a list"),
    ({"query": (ONE, 1), "q_nope": None, "q_pe": None}, "query has a int"),
    ({"q_pe": None, "q_nope": None}, "q_nope is None"),
    ({"profiler_buffer": ONE}, "profiler_buffer is a tensor"),
    ({"kv_len": INTS}, "kv_len is a tensor"),
    ({"page_table": INTS}, "page_table is a tensor"),
    ({"o_scale": 0.5}, "o_scale is 0.5"),
    ({"ckv_scale": 0.5}, "ckv_scale is given"),
    ({"kpe_scale": 0.5}, "kpe_scale is given"),
    ({"ckv_scale_arr": ONE}, "ckv_scale_arr is a tensor"),
    ({"sinks": ONE}, "sinks is given"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor is 1.0"),
    ({"bmm1_scale": 1.0}, "bmm1_scale is given"),
    ({"bmm2_scale": 1.0}, "bmm2_scale is given"),
    ({"lse": torch.zeros(5, 3)}, "lse has shape"),
    ({"out": torch.zeros(5, 2, 32).half()}, "out has shape"),
]
AROUND = [
    (append, {"kv_layout": "DHN"}, "kv_layout is 'DHN'"),
    (append, {"append_key": scattered.normal(0, 3, 2, 16)}, "append_key has dtype float32"),
    (append, {"append_value": scattered.normal(0, 3, 16).half()}, "append_value has shape"),
    (
        append,
        {"append_key": scattered.normal(0, 3, 2, 16).half().requires_grad_()},
        "append_key requires",
    ),
    (append, {"batch_indices": torch.tensor([0, 1])}, "batch_indices has shape"),
    (append, {"batch_indices": torch.tensor([0, 0, 2])}, r"batch_indices\[2\] is 2"),
    (append, {"positions": torch.tensor([1, 2, 0]).float()}, "positions has dtype"),
    (append, {"positions": torch.tensor([1, 3, 0])}, r"positions\[1\] is 3"),
    (append, {"positions": torch.tensor([1, 2, -1])}, r"positions\[2\] is -1"),
    (append, {"paged_kv_cache": torch.zeros(3, 2, 4, 2, 16).byte()}, "paged_kv_cache has dtype"),
    (append, {"paged_kv_cache": torch.zeros(3, 3, 4, 2, 16).half()}, "paged_kv_cache has shape"),
    (append, {"paged_kv_cache": torch.zeros(3, 2, 4, 1, 16).half()}, "append_key has"),
    (append, {"kv_indices": torch.tensor([2]).int()}, r"kv_indptr\[-1\] is 2: kv_indices"),
    (append, {"kv_indices": torch.tensor([2, 0])}, "kv_indices has dtype int64"),
    (append, {"kv_indptr": torch.tensor([0, 1, 2])}, "kv_indptr has dtype int64"),
    (append, {"kv_last_page_len": torch.tensor([3])}, "kv_last_page_len has shape"),
    (append, {"kv_last_page_len": torch.tensor([5, 1])}, r"kv_last_page_len\[0\] is 5"),
    (append_latents, {"append_ckv": scattered.normal(0, 3, 1, 32).half()}, "append_ckv has shape"),
    (append_latents, {"append_kpe": scattered.normal(0, 3, 16)}, "append_kpe has dtype"),
    (append_latents, {"ckv_cache": None}, "ckv_cache is a NoneType"),
    (append_latents, {"kpe_cache": torch.zeros(3, 4, 1, 16).half()}, "kpe_cache has shape"),
    (merge, {"s": scattered.normal(0, 3, 2).half()}, "s has dtype float16"),
    (merge, {"s_other": scattered.normal(0, 3)}, "s_other has shape"),
    (merge, {"v_other": scattered.normal(0, 3, 2, 8)}, "v_other has shape"),
    (merge, {"v_other": scattered.normal(0, 3, 2, 16).half()}, "v_other has dtype"),
    (merge, {"mask": torch.ones(2).bool()}, "mask has shape"),
    (merge, {"mask": torch.ones(3)}, "mask has dtype"),
    (merge_two, {"v_a": scattered.normal(0, 3, 16)}, "v_a has shape"),
    (merge_two, {"v_b": scattered.normal(0, 2, 2, 16)}, "v_b has shape"),
    (merge_two, {"s_b": torch.ones(3, 2).int()}, "s_b has dtype"),
    (merge_two, {"s_a": scattered.normal(0, 2, 3)}, "s_a has shape"),
    (merge_many, {"v": scattered.normal(0, 3, 2, 16)}, "v has shape"),
    (merge_many, {"s": scattered.normal(0, 3, 2, 4)}, "s has shape"),
    (merge_many, {"v": scattered.normal(0, 3, 4, 2, 16).int()}, "v has dtype"),
    (positions, {"nnz": 2}, "nnz is 2"),
    (positions, {"nnz": None}, "nnz is a NoneType"),
    (positions, {"seq_lens": torch.tensor([4])}, "seq_lens has shape"),
    (positions, {"append_indptr": torch.tensor([0, 1])}, "append_indptr has dtype"),
    (positions, {"batch_indices": torch.zeros(2).int()}, "batch_indices has shape"),
    (positions, {"positions": torch.zeros(3)}, "positions has dtype"),
    (lengths, {"kv_indptr": torch.tensor([0, 1])}, "kv_indptr has dtype"),
    (lengths, {"kv_last_page_len": torch.tensor([1])}, "kv_last_page_len has shape"),
    (lengths, {"page_size": 0}, "page_size is 0"),
]


def has(kind: str, names: dict[str, object]) -> bool:
    """Whether a wrapper has all of these arguments."""
    known = {
        p
        for method in ("__init__", "plan", "run")
        for p in inspect.signature(getattr(getattr(flashinfer, kind), method)).parameters
    }
    return {name.partition(".")[2] or name for name in names} <= known


REFUSED = [
    *((decode, *case) for case in [*PLAN_ALL, *PAGED_ALL, *DECODE]),
    *((prefill, *case) for case in [*PLAN_ALL, *PAGED_ALL, *PREFILL_ALL, *PREFILL]),
    *(
        (ragged, *case)
        for case in [*PLAN_ALL, *PREFILL_ALL, *RAGGED]
        if has("BatchPrefillWithRaggedKVCacheWrapper", case[0])
    ),
    *((latents, *case) for case in LATENTS),
    *AROUND,
]


@refusals(REFUSED)
def test_what_is_refused(call: Call, changes: dict[str, object], match: str) -> None:
    check_refused(call, changes, match)


WRAPPERS = {
    decode: flashinfer.BatchDecodeWithPagedKVCacheWrapper,
    prefill: flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    ragged: flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    latents: flashinfer.BatchMLAPagedAttentionWrapper,
}
FUNCTIONS = {
    append: flashinfer.append_paged_kv_cache,
    append_latents: flashinfer.append_paged_mla_kv_cache,
    merge: flashinfer.merge_state_in_place,
    merge_two: flashinfer.merge_state,
    merge_many: flashinfer.merge_states,
    positions: flashinfer.get_batch_indices_positions,
    lengths: flashinfer.get_seq_lens,
}
ARGUMENTS = [
    *(
        (call, f"{method}.{name}")
        for call, kind in WRAPPERS.items()
        for method in ("__init__", "plan", "run")
        for name in inspect.signature(getattr(kind, method)).parameters
        if name != "self"
    ),
    *((call, name) for call, f in FUNCTIONS.items() for name in inspect.signature(f).parameters),
]


@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_no_argument_is_ignored(call: Call, name: str) -> None:
    check_not_ignored(call, name)


@pytest.mark.parametrize(
    "call", [decode, prefill, ragged, latents, append, append_latents, merge, positions, lengths]
)
def test_what_is_refused_differs_from_what_works(call: object) -> None:
    call()


def test_choices_of_an_implementation_change_nothing() -> None:
    want = decode()
    for changes in (
        {"backend": "trtllm-gen"},
        {"use_tensor_cores": True},
        {"enable_pdl": False},
        {"non_blocking": False},
        {"k_scale": 1, "v_scale": 1.0},
        {"fixed_split_size": -1},
    ):
        assert torch.equal(decode(**changes), want)


def test_a_latent_cache_in_fp8_needs_both_scales_to_be_one() -> None:
    fp8 = {
        "kv_data_type": torch.float8_e4m3fn,
        "ckv_cache": scattered.normal(2, 3, 4, 256).to(torch.float8_e4m3fn),
        "kpe_cache": scattered.normal(3, 3, 4, 32).to(torch.float8_e4m3fn),
    }
    latents(**fp8, ckv_scale=0.5, kpe_scale=0.5)
    for scales, message in (
        ({}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"ckv_scale": 0.5, "ckv_scale_arr": ONE}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"ckv_scale_arr": ONE}, "Invalid shape of ckv_scale_arr"),
        ({"ckv_scale_arr": torch.ones(3, 4, 2)}, "ckv_scale_arr is a tensor"),
        ({"ckv_scale": 0.5}, "kpe_scale is None"),
        ({"ckv_scale": 0.5, "kpe_scale": 0.25}, "kpe_scale is 0.25"),
        ({"ckv_scale": "a", "kpe_scale": 0.25}, "ckv_scale is a str"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            latents(**fp8, **scales)


@pytest.mark.parametrize(
    "kind",
    [
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        flashinfer.BatchMLAPagedAttentionWrapper,
    ],
)
def test_run_comes_after_plan(kind: type) -> None:
    wrapper = kind(WORKSPACE)
    needed = [
        p
        for p in inspect.signature(wrapper.run).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    with pytest.raises(RuntimeError, match="run was called before plan"):
        wrapper.run(*(scattered.normal(0, 1, 1, 16).half() for _ in needed))


def graph_decode() -> tuple[flashinfer.BatchDecodeWithPagedKVCacheWrapper, dict[str, object]]:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, "NHD", True, False, *(x.clone() for x in BUFFERS.values())
    )
    plan = {
        "indptr": torch.tensor([0, 2, 3]).int(),
        "indices": torch.tensor([0, 1, 2]).int(),
        "last_page_len": torch.tensor([3, 4]).int(),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 4,
    }
    wrapper.plan(**plan)
    return wrapper, plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_qo_heads": 8}, "num_qo_heads is 8"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"page_size": 8}, "page_size is 8"),
        ({"window_left": 3}, "window_left is 3"),
        ({"sm_scale": 0.5}, "sm_scale is 0.5"),
        ({"logits_soft_cap": 2.0}, "logits_soft_cap is 2.0"),
        ({"q_data_type": torch.bfloat16}, "q_data_type is 'bfloat16'"),
        ({"q_len_per_req": 2}, "q_len_per_req is 2"),
        ({"disable_split_kv": True}, "disable_split_kv, or .* is True"),
        (
            {"indptr": torch.tensor([0, 2]).int(), "last_page_len": torch.tensor([3]).int()},
            "indptr has 2 entries",
        ),
        (
            {"indptr": torch.tensor([0, 5, 6]).int(), "indices": torch.zeros(6).int()},
            "indices has 6 entries",
        ),
    ],
)
def test_plans_of_a_graph_keep_their_arguments(changes: dict[str, object], message: str) -> None:
    wrapper, plan = graph_decode()
    before = [wrapper._fixed[name].clone() for name in BUFFERS]
    with pytest.raises(ValueError, match=message):
        wrapper.plan(**(plan | changes))
    for name, old in zip(BUFFERS, before, strict=True):
        assert torch.equal(wrapper._fixed[name], old), "refused, and written nevertheless"


@pytest.mark.parametrize(
    ("q_lens", "given", "message"),
    [
        ([3, 2], {}, "qo_indptr has 5 queries"),
        ([1, 2], {"causal": True}, "causal is True"),
        ([1, 2], {"custom_mask": torch.ones(2).bool()}, "custom_mask"),
        ([2, 2], {"max_token_per_sequence": 1}, "max_token_per_sequence is 1"),
    ],
)
def test_prefill_of_a_graph_keeps_its_most_queries(
    q_lens: list[int], given: dict[str, object], message: str
) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, "NHD", True, *(x.clone() for x in PREFILL_BUFFERS.values())
    )
    tables = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 1]).int(), torch.tensor([3, 4]).int()
    wrapper.plan(scattered.indptr_of([2, 2]), *tables, 4, 2, 16, 4)
    wrapper.plan(scattered.indptr_of([4, 0]), *tables, 4, 2, 16, 4)
    with pytest.raises(ValueError, match=message):
        wrapper.plan(scattered.indptr_of(q_lens), *tables, 4, 2, 16, 4, **given)


def test_masks_of_a_graph_fit_the_buffer() -> None:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        WORKSPACE, "NHD", True, torch.zeros(2).int(), torch.zeros(2).int(),
        torch.zeros(4).byte(), torch.zeros(2).int(),
    )  # fmt: skip
    small = torch.ones(2 * 9).bool()
    wrapper.plan(scattered.indptr_of([2]), scattered.indptr_of([9]), 1, 1, 16, custom_mask=small)
    with pytest.raises(ValueError, match="custom_mask_buf has 4 bytes"):
        wrapper.plan(
            scattered.indptr_of([2]),
            scattered.indptr_of([90]),
            1,
            1,
            16,
            custom_mask=torch.ones(180).bool(),
        )
    with pytest.raises(ValueError, match="a custom_mask is False"):
        wrapper.plan(scattered.indptr_of([2]), scattered.indptr_of([9]), 1, 1, 16)


def test_workspaces_are_looked_at_only() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    assert wrapper.use_tensor_cores
    assert not wrapper.is_cuda_graph_enabled
    wrapper.reset_workspace_buffer(WORKSPACE, WORKSPACE)
    with pytest.raises(TypeError, match="int_workspace_buffer is a NoneType"):
        wrapper.reset_workspace_buffer(WORKSPACE, None)
    with pytest.raises(ValueError, match="float_workspace_buffer is on meta"):
        wrapper.reset_workspace_buffer(WORKSPACE.to("meta"), WORKSPACE)


def test_gradients_are_no_matter_without_grad_mode() -> None:
    q = scattered.normal(0, 2, 4, 16).half().requires_grad_()
    with pytest.raises(ValueError, match="q requires a gradient"):
        decode(q=q)
    with torch.no_grad():
        decode(q=q)


def test_empty_batches() -> None:
    none, start = torch.zeros(0).int(), torch.zeros(1).int()
    decoder = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decoder.plan(start, none, none, 4, 2, 16, 4)
    cache = scattered.normal(1, 3, 2, 4, 2, 16).half()
    assert decoder.run(torch.zeros(0, 4, 16).half(), cache).shape == (0, 4, 16)
    prefiller = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefiller.plan(start, start, none, none, 4, 2, 16, 4)
    assert prefiller.run(torch.zeros(0, 4, 16).half(), cache).shape == (0, 4, 16)
    ragged_one = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged_one.plan(start, start, 4, 2, 16)
    no_keys = torch.zeros(0, 2, 16).half()
    assert ragged_one.run(torch.zeros(0, 4, 16).half(), no_keys, no_keys).shape == (0, 4, 16)
