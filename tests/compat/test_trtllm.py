"""TensorRT-LLM's pools, tables and FlashInfer's functions over them, against the definition.

Pools hold NaN wherever no sequence has a token, and tables hold garbage past the last block.
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

import jitattn
from jitattn.compat import flashinfer, trtllm
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
SECONDARY = -(2**31)
"""The bit of an entry that names the pool on the host."""


pytestmark = pytest.mark.usefixtures("new_tensors_are_nan")


def rows_of(q_lens: list[int]) -> list[slice]:
    starts = [0, *itertools.accumulate(q_lens)]
    return [slice(a, b) for a, b in itertools.pairwise(starts)]


def scale_of(rng: random.Random, is_fp8: bool, *, values: bool) -> tuple[object, float]:
    """What a call is given for a product, and what it is."""
    if not is_fp8:
        return (1.0, 1.0) if values else (0.3, 0.3)
    number = rng.choice([0.25, 0.7])
    if rng.random() < 0.5:
        return number, number
    tensor = torch.tensor(number).reshape(rng.choice([(), (1,)]))
    return tensor, float(tensor)


# --- FlashInfer's functions -----------------------------------------------------------------------


@MANY
@given(seed=SEEDS)
def test_batch_decode_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    form = rng.choice(["even", "even", "ragged"])
    q_len = rng.choice([1, 1, 2, 3])
    batch = rng.randint(1, 4)
    q_lens = [q_len if form == "even" else rng.randint(0, 4) for _ in range(batch)]
    lens = [rng.choice([0, -1, 1, rng.randint(1, 40)]) for _ in range(batch)]
    case = Drawn(rng, lens, q_lens, spare=0 if form == "even" else rng.choice([0, 2]))
    queries: dict[str, object] = {"q_len_per_req": q_len}
    if form == "ragged":
        queries = {"cum_seq_lens_q": scattered.indptr_of(q_lens), "max_q_len": max(q_lens) + 1}
    elif q_len == 1 and rng.random() < 0.5:
        queries = {"q_len_per_req": None}
    found = flashinfer.trtllm_batch_decode_with_kv_cache(
        *case.arguments(), max(*lens, 0) + 2, **case.others(), **queries, return_lse=True
    )
    case.check(found, causal=True)


@MANY
@given(seed=SEEDS)
def test_batch_context_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    q_lens = [rng.randint(0, 9) for _ in range(rng.randint(1, 4))]
    lens = [rng.choice([0, n, rng.randint(1, 40)]) for n in q_lens]
    case = Drawn(rng, lens, q_lens, spare=rng.choice([0, 2]))
    causal = rng.random() < 0.7
    others = case.others()
    scales = others.pop("bmm1_scale"), others.pop("bmm2_scale")
    found = flashinfer.trtllm_batch_context_with_kv_cache(
        *case.arguments(),
        *(max(q_lens) + 1, max(lens), *scales, len(lens)),
        *(scattered.indptr_of(q_lens), scattered.indptr_of(lens)),
        **others,
        causal=causal,
        return_lse=True,
    )
    case.check(found, causal=causal)


class Drawn:
    """A call of either function, and what it means."""

    def __init__(
        self, rng: random.Random, lens: list[int], q_lens: list[int], *, spare: int
    ) -> None:
        self.rng, self.q_lens = rng, q_lens
        dtype = rng.choice([*HALVES, *scattered.FP8])
        self.separate = rng.random() < 0.5
        heads_k = rng.choice([1, 2])
        self.cache = scattered.Scattered.of(
            rng,
            lens,
            page_size=rng.choice([1, 3, 4, 16]),
            layout=rng.choice(["NHD", "HND"]),
            heads=heads_k,
            dims=(16, 16),
            dtype=dtype,
            form=rng.choice(["pair", "strided", "interleaved", "one"]),
            separate=self.separate,
        )
        heads = heads_k * rng.choice([1, 3])
        q_dtype = dtype if dtype in HALVES else rng.choice(HALVES)
        self.q = scattered.normal(rng.randrange(2**31), sum(q_lens) + spare, heads, 16).to(q_dtype)
        self.q[sum(q_lens) :] = scattered.NAN
        is_fp8 = dtype in scattered.FP8
        self.bmm1, self.scale = scale_of(rng, is_fp8, values=False)
        self.bmm2, self.factor = scale_of(rng, is_fp8, values=True)
        self.window = rng.choice([-1, 0, 3, 100])
        self.sinks = scattered.normal(rng.randrange(2**31), heads) if rng.random() < 0.3 else None
        self.out_dtype = rng.choice([None, torch.float16, torch.bfloat16])
        self.lse = torch.empty(self.q.shape[:2]) if rng.random() < 0.3 else None

    def arguments(self) -> tuple[object, ...]:
        lens = torch.tensor(self.cache.lens, dtype=torch.int32)
        if self.rng.random() < 0.3:
            lens = lens.view(torch.uint32)
        base = self.cache.caches[0]._base
        kv: object = self.cache.caches
        if base is not None and base.dim() == 5 and base.shape[1] == 2:
            kv = base
        return self.q, kv, WORKSPACE, self.cache.table(separate=self.separate), lens

    def others(self) -> dict[str, object]:
        sinks: object = self.sinks
        if self.sinks is not None and self.rng.random() < 0.5:
            sinks = [self.sinks.view(self.cache.k[0].shape[1], -1)]
        return {
            "kv_layout": self.cache.layout,
            "bmm1_scale": self.bmm1,
            "bmm2_scale": self.bmm2,
            "window_left": self.window,
            "sinks": sinks,
            "out_dtype": self.out_dtype,
            "lse": self.lse,
            "uses_shared_paged_kv_idx": not self.separate,
        }

    def check(self, found: tuple[Tensor, Tensor], *, causal: bool) -> None:
        out, lse = found
        assert out.dtype == (self.out_dtype or self.q.dtype)
        assert self.lse is None or lse is self.lse
        for b, span in enumerate(rows_of(self.q_lens)):
            want, want_lse, size = scattered.defined(
                self.q[span],
                self.cache.k[b],
                self.cache.v[b].double() * self.factor,
                scale=self.scale,
                causal=causal,
                window_left=self.window,
                sinks=self.sinks,
            )
            scattered.check_out(out[span], want, size)
            scattered.check_lse(lse[span], want_lse)
        assert not out[sum(self.q_lens) :].any()
        assert bool((lse[sum(self.q_lens) :] == -math.inf).all())


def test_one_plane_is_keys_and_values() -> None:
    rng = random.Random(0)
    cache = scattered.Scattered.of(
        rng, [9, 5], page_size=4, layout="HND", heads=2, dims=(16, 16), dtype=torch.float16
    )
    q = scattered.normal(1, 2, 4, 16).half()
    lens = torch.tensor([9, 5])
    found = flashinfer.trtllm_batch_decode_with_kv_cache(
        q, cache.caches[0].unsqueeze(1), WORKSPACE, cache.table(), lens, 9, 0.25
    )
    for b in range(2):
        want, _, size = scattered.defined(q[b : b + 1], cache.k[b], cache.k[b], scale=0.25)
        scattered.check_out(found[b : b + 1], want, size)


@settings(MANY, max_examples=40)
@given(seed=SEEDS)
def test_latent_decode_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    dims, heads, page_size = (256, 32), rng.choice([1, 4]), rng.choice([1, 4, 16])
    lens = [rng.choice([0, rng.randint(1, 30)]) for _ in range(rng.randint(1, 3))]
    q_dtype = rng.choice(HALVES)
    dtype = rng.choice([q_dtype, torch.float8_e4m3fn])
    cache = scattered.Scattered.of(
        rng, lens, page_size=page_size, layout="NHD", heads=1, dims=dims, dtype=dtype,
        form="interleaved",
    )  # fmt: skip
    whole = cache.caches[0]._base
    assert whole is not None
    kv = whole.transpose(1, 2) if rng.random() < 0.5 else whole.squeeze(2)
    is_ragged, q_len = rng.random() < 0.4, rng.choice([1, 1, 3])
    q_lens = [rng.randint(0, 3) if is_ragged else q_len for _ in lens]
    shape = (sum(q_lens),) if is_ragged else (len(lens), q_len)
    query = scattered.normal(seed % 2**31, *shape, heads, sum(dims)).to(q_dtype)
    bmm2 = 0.5 if dtype not in HALVES else 1.0
    given: dict[str, object] = {}
    if is_ragged:
        given["cum_seq_lens_q"] = scattered.indptr_of(q_lens)
        if rng.random() < 0.5:
            given["max_q_len"] = max(q_lens) + 1
    separate = rng.random() < 0.4
    table = cache.table(separate=separate)
    base = rng.choice([None, "base2", "basee"])
    if rng.random() < 0.3:
        given["out"] = torch.empty(*shape, heads, dims[0], dtype=q_dtype)
    if rng.random() < 0.4:
        given["lse"] = torch.empty(*(shape if rng.random() < 0.5 else (sum(q_lens),)), heads)
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        query, kv, WORKSPACE, 128, *dims, table, torch.tensor(lens), max(lens) + 3,
        bmm1_scale=0.1 * bmm2, bmm2_scale=bmm2, uses_shared_paged_kv_idx=not separate,
        return_lse=True, return_lse_base=base, **given,
    )  # fmt: skip
    assert out.shape == (*shape, heads, dims[0])
    assert "out" not in given or out is given["out"]
    assert "lse" not in given or lse is given["lse"]
    out, lse = out.reshape(-1, heads, dims[0]), lse.reshape(-1, heads)
    rows = query.reshape(-1, heads, sum(dims))
    for b, span in enumerate(rows_of(q_lens)):
        ckv, kpe = (x[b].double() * bmm2 for x in (cache.k, cache.v))
        keys = torch.cat((ckv, kpe), dim=2)
        want, want_lse, size = scattered.defined(rows[span], keys, ckv, scale=0.1, causal=True)
        scattered.check_out(out[span], want, size)
        scattered.check_lse(lse[span], want_lse, base=math.e if base == "basee" else 2.0)


# --- pools and tables -----------------------------------------------------------------------------


class Pools:
    """Two pools of layers, in TensorRT-LLM's order, and a table of both."""

    def __init__(self, rng: random.Random, dtype: torch.dtype, kv_factor: int = 2) -> None:
        self.layers = rng.randint(1, 3)
        self.heads, self.size, self.dim = rng.choice([1, 2]), rng.choice([4, 8]), 16
        if kv_factor == 1:
            self.heads, self.dim = 1, 288
        self.lens = [rng.choice([0, rng.randint(1, 30)]) for _ in range(rng.randint(1, 4))]
        self.first = rng.randint(0, 2)  # sequences before those
        counts = [-(-n // self.size) for n in self.lens]
        self.pages = sum(counts) + 2
        self.pool = scattered.nan_like(
            (self.pages, self.layers, kv_factor, self.heads, self.size, self.dim), dtype
        )
        width = max(counts) + 2
        self.offsets = torch.full(
            (2, self.first + len(self.lens) + 1, 2, width), scattered.GARBAGE, dtype=torch.int32
        )
        self.pool_idx, self.layer = rng.randint(0, 1), rng.randrange(self.layers)
        ids = iter(rng.sample(range(self.pages), sum(counts)))
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for b, n in enumerate(self.lens):
            tokens = [
                scattered.normal(rng.randrange(2**31), n, self.heads, self.dim).to(dtype)
                for _ in range(kv_factor)
            ]
            self.k.append(tokens[0])
            self.v.append(tokens[-1])
            for column in range(counts[b]):
                page = next(ids)
                for plane in range(2):
                    entry = page * self.layers * kv_factor + (plane if kv_factor == 2 else 0)
                    self.offsets[self.pool_idx, self.first + b, plane, column] = entry
                for plane, values in enumerate(tokens):
                    own = values[column * self.size : (column + 1) * self.size]
                    block = self.pool[page, self.layer, plane]
                    block[:, : len(own)] = own.transpose(0, 1)

    def shape(self) -> dict[str, int]:
        return {"num_kv_heads": self.heads, "tokens_per_block": self.size, "head_dim": self.dim}

    def view(self, rng: random.Random, **others: object) -> trtllm.LayerPool:
        """As a tensor of any shape, as bytes, or as an address."""
        form = rng.choice(["tensor", "flat", "bytes", "address"])
        dtype = self.pool.dtype
        given = {**self.shape(), **others}
        if form == "address":
            factor = self.pool.shape[2]
            return trtllm.layer_pool(
                self.pool.data_ptr(), self.layer, dtype=dtype, device="cpu",
                num_blocks=self.pages * self.layers * factor, **given,
            )  # fmt: skip
        pool = {"tensor": self.pool, "flat": self.pool.view(-1)}.get(form)
        if pool is None:
            return trtllm.layer_pool(self.pool.view(torch.uint8), self.layer, dtype=dtype, **given)
        named = rng.choice([None, dtype, str(dtype).removeprefix("torch.")])
        return trtllm.layer_pool(pool, self.layer, dtype=named, **given)

    def table(self, *, shared: bool) -> jitattn.BlockTable:
        return trtllm.block_table(
            self.offsets,
            self.pool_idx,
            seq_offset=self.first,
            batch_size=len(self.lens),
            uses_shared_paged_kv_idx=shared,
        )


@MANY
@given(seed=SEEDS)
def test_layers_of_a_pool_are_read_where_they_lie(seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([*HALVES, torch.float8_e4m3fn])
    pools, shared = Pools(rng, dtype), rng.random() < 0.5
    layer, table = pools.view(rng), pools.table(shared=shared)
    assert table.layout.value == ("shared" if shared else "separate")
    assert table.table.data_ptr() == pools.offsets[pools.pool_idx, pools.first].data_ptr()
    assert layer.blocks.data_ptr() == pools.pool[0, pools.layer].data_ptr()
    trtllm.check_block_offsets(
        pools.offsets[pools.pool_idx, pools.first : pools.first + len(pools.lens)],
        torch.tensor(pools.lens),
        pools.size,
        layer.blocks.shape[0],
        uses_shared_paged_kv_idx=shared,
    )
    q_dtype = dtype if dtype in HALVES else torch.float16
    planner = jitattn.AttentionPlanner(
        num_qo_heads=2 * pools.heads, num_kv_heads=pools.heads, head_dim=16,
        page_size=pools.size, q_dtype=q_dtype, kv_dtype=dtype, kv_layout="HND",
        page_table=table.layout.value,
    )  # fmt: skip
    q = scattered.normal(seed % 2**31, len(pools.lens), 2 * pools.heads, 16).to(q_dtype)
    kv = planner.bind(layer.kv(uses_shared_paged_kv_idx=shared))
    out, lse = planner.plan(table, torch.tensor(pools.lens)).run(q, kv, return_lse=True)
    for b in range(len(pools.lens)):
        want, want_lse, size = scattered.defined(q[b : b + 1], pools.k[b], pools.v[b], scale=0.25)
        scattered.check_out(out[b : b + 1], want, size)
        scattered.check_lse(lse[b : b + 1], want_lse, base=math.e)
    same = flashinfer.trtllm_batch_decode_with_kv_cache(
        q, layer.kv(uses_shared_paged_kv_idx=shared), WORKSPACE, table.table,
        torch.tensor(pools.lens), 30, 0.25, uses_shared_paged_kv_idx=shared,
    )  # fmt: skip
    # Of FP8, a scale of scores is one of keys there.
    torch.testing.assert_close(same, out, rtol=2.0**-7, atol=1e-6)


@settings(MANY, max_examples=30)
@given(seed=SEEDS)
def test_layers_of_latents_are_read_where_they_lie(seed: int) -> None:
    rng = random.Random(seed)
    pools = Pools(rng, torch.float16, kv_factor=1)
    layer, table = pools.view(rng, kv_factor=1), pools.table(shared=True)
    planner = jitattn.MLAPlanner(
        sm_scale=0.1, num_heads=2, kv_lora_rank=256, qk_rope_head_dim=32, page_size=pools.size,
        q_dtype=torch.float16, kv_dtype=torch.float16,
    )  # fmt: skip
    q = scattered.normal(seed % 2**31, len(pools.lens), 2, 288).half()
    plan = planner.plan(table, torch.tensor(pools.lens))
    out = plan.run(q[..., :256], q[..., 256:], planner.bind(layer.latent()))
    for b in range(len(pools.lens)):
        latents = pools.k[b]
        want, _, size = scattered.defined(q[b : b + 1], latents, latents[..., :256], scale=0.1)
        scattered.check_out(out[b : b + 1], want, size)


def test_nvfp4_pools_have_linear_scales_beside_them() -> None:
    rng = random.Random(3)
    pools = Pools(rng, torch.float16)
    while not any(pools.lens):
        pools = Pools(rng, torch.float16)
    data, scales = jitattn.quant.quantize_kv(pools.pool.nan_to_num(0.0), "nvfp4")
    values = jitattn.quant.dequantize_kv(data, dtype="nvfp4", block_scales=scales)
    given = {**pools.shape(), "dtype": "nvfp4", "scale_layout": "linear"}
    layer = trtllm.layer_pool(data, pools.layer, scale_pool=scales, **given)
    by_address = trtllm.layer_pool(
        data.data_ptr(), pools.layer, scale_pool=scales.data_ptr(), device="cpu",
        num_blocks=pools.pages * pools.layers * 2, **given,
    )  # fmt: skip
    assert torch.equal(by_address.blocks, layer.blocks)
    q = scattered.normal(1, len(pools.lens), pools.heads, 16).half()
    outs = []
    for kv_dtype, source in (("nvfp4", layer), ("float16", None)):
        planner = jitattn.AttentionPlanner(
            num_qo_heads=pools.heads, num_kv_heads=pools.heads, head_dim=16,
            page_size=pools.size, q_dtype="float16", kv_dtype=kv_dtype, kv_layout="HND",
            page_table="separate",
        )  # fmt: skip
        view = source or trtllm.layer_pool(values.half(), pools.layer, **pools.shape())
        plan = planner.plan(pools.table(shared=False), torch.tensor(pools.lens))
        outs.append(plan.run(q, view.kv()))
    torch.testing.assert_close(outs[0], outs[1], rtol=2.0**-9, atol=1e-3)


def test_pools_of_layers_are_looked_up_on_the_host() -> None:
    pointers = torch.tensor([[256, 0], [512, 1024]])
    mapping = torch.tensor([[0, 0], [1, 0], [1, 1]], dtype=torch.int32)
    assert trtllm.pool_of_layer(pointers, mapping, 2) == (1, 1, 512, None)
    both = torch.tensor([[[256, 4096], [0, 0]]])
    assert trtllm.pool_of_layer(both, mapping[:1], 0) == (0, 0, 256, 4096)


@settings(MANY, max_examples=60)
@given(seed=SEEDS)
def test_entries_of_the_secondary_pool_are_found(seed: int) -> None:
    rng = random.Random(seed)
    pools = Pools(rng, torch.float16)
    rows = pools.offsets[pools.pool_idx, pools.first : pools.first + len(pools.lens)]
    live = [b for b, n in enumerate(pools.lens) if n]
    limit = pools.pages * pools.layers * 2
    check = {"tokens_per_block": pools.size, "num_blocks": limit}
    trtllm.check_block_offsets(rows, torch.tensor(pools.lens), **check)
    if not live:
        return
    b, plane = rng.choice(live), rng.randint(0, 1)
    column = rng.randrange(-(-pools.lens[b] // pools.size))
    entry = int(rows[b, plane, column])
    rows[b, plane, column] = entry + SECONDARY
    with pytest.raises(ValueError, match=f"block {entry} of the secondary pool"):
        trtllm.check_block_offsets(rows, torch.tensor(pools.lens), **check)
    # The reference backend, and JITATTN_CHECK=1 elsewhere, sees it where it is read.
    planner = jitattn.AttentionPlanner(
        num_qo_heads=pools.heads, num_kv_heads=pools.heads, head_dim=16, page_size=pools.size,
        q_dtype="float16", kv_dtype="float16", kv_layout="HND", page_table="separate",
    )  # fmt: skip
    q = scattered.normal(1, len(pools.lens), pools.heads, 16).half()
    plan = planner.plan(pools.table(shared=False), torch.tensor(pools.lens))
    with pytest.raises(ValueError, match=f"request {b} has the entry {entry + SECONDARY}"):
        plan.run(q, pools.view(rng).kv())
    # Not where a window has left it behind.
    starts = torch.zeros(len(pools.lens), dtype=torch.int32)
    starts[b] = (column + 1) * pools.size
    trtllm.check_block_offsets(rows, torch.tensor(pools.lens), kv_start=starts, **check)


# --- refusals -------------------------------------------------------------------------------------

ONE = torch.ones(1)


def batch_decode(**changes: object) -> object:
    given: dict[str, object] = {
        "query": scattered.normal(0, 2, 4, 16).half(),
        "kv_cache": scattered.normal(1, 3, 2, 2, 4, 16).half(),
        "workspace_buffer": WORKSPACE,
        "block_tables": torch.tensor([[0, 1], [2, 0]]).int(),
        "seq_lens": torch.tensor([7, 4]),
        "max_seq_len": 8,
    }
    return flashinfer.trtllm_batch_decode_with_kv_cache(**(given | changes))


def batch_context(**changes: object) -> object:
    given: dict[str, object] = {
        "query": scattered.normal(0, 5, 4, 16).half(),
        "kv_cache": scattered.normal(1, 3, 2, 2, 4, 16).half(),
        "workspace_buffer": WORKSPACE,
        "block_tables": torch.tensor([[0, 1], [2, 0]]).int(),
        "seq_lens": torch.tensor([7, 4]),
        "max_q_len": 3,
        "max_kv_len": 8,
        "bmm1_scale": 0.25,
        "bmm2_scale": 1.0,
        "batch_size": 2,
        "cum_seq_lens_q": torch.tensor([0, 2, 5]).int(),
        "cum_seq_lens_kv": torch.tensor([0, 7, 11]).int(),
    }
    return flashinfer.trtllm_batch_context_with_kv_cache(**(given | changes))


def latent_decode(**changes: object) -> object:
    given: dict[str, object] = {
        "query": scattered.normal(0, 2, 1, 4, 288).half(),
        "kv_cache": scattered.normal(1, 3, 4, 288).half(),
        "workspace_buffer": WORKSPACE,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "block_tables": torch.tensor([[0, 1], [2, 0]]).int(),
        "seq_lens": torch.tensor([7, 4]),
        "max_seq_len": 8,
    }
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(**(given | changes))


def layer_pool(**changes: object) -> object:
    given: dict[str, object] = {
        "pool": torch.zeros(3, 2, 2, 2, 4, 16).half(),
        "layer_idx": 1,
        "num_kv_heads": 2,
        "tokens_per_block": 4,
        "head_dim": 16,
    }
    return trtllm.layer_pool(**(given | changes))


def block_table(**changes: object) -> object:
    given: dict[str, object] = {"block_offsets": torch.zeros(2, 3, 2, 4).int(), "pool_idx": 1}
    return trtllm.block_table(**(given | changes))


def block_offsets(**changes: object) -> None:
    given: dict[str, object] = {
        "block_offsets": torch.tensor([[[0, 2], [1, 3]]]).int(),
        "seq_lens": torch.tensor([7]),
        "tokens_per_block": 4,
        "num_blocks": 4,
    }
    trtllm.check_block_offsets(**(given | changes))


def pool_of_layer(**changes: object) -> object:
    given: dict[str, object] = {
        "host_kv_cache_pool_pointers": torch.tensor([[256, 0]]),
        "host_kv_cache_pool_mapping": torch.tensor([[0, 0]]).int(),
        "layer_idx": 0,
    }
    return trtllm.pool_of_layer(**(given | changes))


FUNCTIONS = [
    ({"o_sf_scale": 1.0}, "o_sf_scale is 1.0"),
    ({"o_sf_vec_size": 16}, "o_sf_vec_size is 16"),
    ({"out_dtype": "nvfp4"}, "out_dtype is nvfp4"),
    ({"out_dtype": torch.float8_e4m3fn}, "out_dtype is float8_e4m3fn"),
    ({"out_dtype": 16}, "out_dtype is 16"),
    ({"out": "new"}, "out is a str"),
    ({"out": torch.zeros(1, 4, 16).half()}, "out has shape"),
    ({"sinks": [ONE, ONE]}, "sinks is a list of 2"),
    ({"sinks": torch.ones(3)}, "sinks has shape"),
    ({"sinks": torch.ones(4).int()}, "sinks has dtype"),
    ({"kv_layout": "DHN"}, "kv_layout is 'DHN'"),
    ({"kv_cache_sf": (ONE, ONE)}, "kv_cache_sf is"),
    ({"enable_pdl": 2}, "enable_pdl is 2"),
    ({"backend": "fa9"}, "backend is 'fa9'"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor is 1.0"),
    ({"uses_shared_paged_kv_idx": False}, "block_tables has shape .* uses_shared_paged_kv_idx=F"),
    ({"uses_shared_paged_kv_idx": 1}, "uses_shared_paged_kv_idx is a int"),
    ({"block_tables": torch.zeros(2, 2, 2).int()}, "block_tables has shape"),
    ({"block_tables": torch.zeros(2, 2)}, "block_tables has dtype"),
    ({"block_tables": torch.tensor([[0, 9], [2, 0]]).int()}, "entry 9"),
    ({"seq_lens": torch.tensor([7])}, "seq_lens has 1 entries"),
    ({"seq_lens": torch.tensor([[7, 4]])}, "seq_lens has shape"),
    ({"seq_lens": torch.tensor([7.0, 4.0])}, "seq_lens has dtype"),
    ({"bmm1_scale": ONE}, "bmm1_scale is a tensor"),
    ({"bmm2_scale": ONE}, "bmm2_scale is a tensor"),
    ({"bmm2_scale": 0.5}, "bmm2_scale is 0.5"),
    ({"bmm1_scale": math.nan}, "bmm1_scale is nan"),
    ({"bmm1_scale": None}, "bmm1_scale is a NoneType"),
    ({"window_left": 1.5}, "window_left is a float"),
    ({"query": scattered.normal(0, 2, 16).half()}, "query has shape"),
    ({"query": scattered.normal(0, 2, 4, 16)}, "query has dtype"),
    ({"query": scattered.normal(0, 2, 4, 16).half().requires_grad_()}, "query requires a gradient"),
    ({"query": 3}, "query is a int"),
    ({"kv_cache": scattered.normal(0, 3, 3, 2, 4, 16).half()}, "kv_cache has shape"),
    ({"kv_cache": scattered.normal(0, 3, 2, 2, 4, 16)}, "kv_cache has dtype"),
    ({"kv_cache": scattered.normal(0, 3, 2, 2, 4, 16).byte()}, "kv_cache has dtype uint8"),
    ({"kv_cache": None}, "kv_cache is a NoneType"),
    ({"workspace_buffer": None}, "workspace_buffer is a NoneType"),
    ({"multi_ctas_kv_counter_buffer": 1}, "multi_ctas_kv_counter_buffer is a int"),
    ({"lse": torch.zeros(1, 4)}, "lse has shape"),
    ({"return_lse": 1}, "return_lse is a int"),
]
DECODE = [
    ({"max_seq_len": 6}, "max_seq_len is 6"),
    ({"max_seq_len": None}, "max_seq_len is a NoneType"),
    ({"q_len_per_req": 2}, "query has 2 rows"),
    ({"q_len_per_req": 0}, "q_len_per_req is 0"),
    ({"o_scale": 0.5}, "o_scale is 0.5"),
    ({"mask": ONE}, "mask is a tensor"),
    ({"max_q_len": 1}, "cum_seq_lens_q is None"),
    ({"cum_seq_lens_q": torch.tensor([0, 1, 2]).int()}, "max_q_len is None"),
    (
        {"cum_seq_lens_q": torch.tensor([0, 2]).int(), "max_q_len": 2},
        "cum_seq_lens_q has 2 entries",
    ),
    (
        {"cum_seq_lens_q": scattered.indptr_of([1, 1]), "max_q_len": 1, "q_len_per_req": 2},
        "q_len_per_req is 2",
    ),
    ({"bmm1_scale_log2": ONE}, "bmm1_scale_log2 is a tensor"),
    ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention is True"),
    ({"cp_world": 2}, "cp_world is 2"),
    ({"cp_rank": 1}, "cp_rank is 1"),
    ({"causal_seqlens_kv_global": ONE}, "causal_seqlens_kv_global is a tensor"),
    ({"bf16q_fp8kv_transform_mode": "both"}, "bf16q_fp8kv_transform_mode is 'both'"),
    ({"request_order": ONE}, "request_order is a tensor"),
    ({"request_order_plan": ONE}, "request_order_plan is a tensor"),
]
CONTEXT = [
    ({"max_kv_len": 6}, "max_kv_len is 6"),
    ({"max_q_len": 2}, "max_q_len is 2"),
    ({"batch_size": 3}, "batch_size is 3"),
    ({"cum_seq_lens_q": torch.tensor([0, 5]).int()}, "cum_seq_lens_q has 2 entries"),
    ({"cum_seq_lens_q": torch.tensor([0, 2, 5])}, "cum_seq_lens_q has dtype int64"),
    ({"cum_seq_lens_kv": torch.tensor([0, 7, 12]).int()}, r"seq_lens is \[7, 4\]"),
    ({"cum_seq_lens_kv": torch.tensor([0, 7]).int()}, "cum_seq_lens_kv has 2 entries"),
    ({"causal": 1}, "causal is a int"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax is True"),
    ({"uses_spcompress": True}, "uses_spcompress is True"),
]
LATENT = [
    ({"kv_lora_rank": 128}, "kv_lora_rank is 128"),
    ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
    ({"qk_nope_head_dim": 0}, "qk_nope_head_dim is 0"),
    ({"sparse_mla_top_k": 64}, "sparse_mla_top_k is 64"),
    ({"sparse_mla_top_k_lens": ONE}, "sparse_mla_top_k_lens is a tensor"),
    ({"kv_scale_format": "pow2_fp32"}, "kv_scale_format is 'pow2_fp32'"),
    ({"sinks": [ONE]}, "sinks are given"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor is 1.0"),
    ({"backend": "cudnn9"}, "backend is 'cudnn9'"),
    ({"is_var_seq": None}, "is_var_seq is None"),
    ({"cute_dsl_impl": "fast"}, "cute_dsl_impl is 'fast'"),
    ({"enable_dcp": True}, "enable_dcp is True"),
    ({"cp_world": 2}, "cp_world is 2"),
    ({"cp_rank": 1}, "cp_rank is 1"),
    ({"causal_seqlens_kv_global": ONE}, "causal_seqlens_kv_global is a tensor"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax is True"),
    ({"return_lse_base": "e"}, "return_lse_base is 'e'"),
    ({"max_q_len": 1}, "max_q_len is given"),
    ({"query": scattered.normal(0, 2, 4, 288).half()}, "query has shape"),
    ({"query": scattered.normal(0, 2, 1, 4, 288)}, "query has dtype"),
    ({"query": scattered.normal(0, 3, 1, 4, 288).half()}, "query has 3 requests"),
    ({"kv_cache": scattered.normal(1, 3, 2, 4, 288).half()}, "kv_cache has shape"),
    ({"kv_cache": scattered.normal(1, 3, 4, 288)}, "kv_cache has dtype"),
    ({"seq_lens": None}, "seq_lens is None"),
    ({"seq_lens": torch.tensor([7])}, "seq_lens has 1 entries"),
    ({"max_seq_len": 6}, "max_seq_len is 6"),
    ({"bmm1_scale": ONE}, "bmm1_scale is a tensor"),
    ({"bmm2_scale": 0.5}, "bmm2_scale is 0.5"),
    ({"lse": torch.zeros(3, 4)}, "lse has shape"),
    ({"out": torch.zeros(2, 4, 256).half()}, "out has shape"),
    ({"out": torch.zeros(2, 1, 4, 256)}, "out has dtype"),
    ({"uses_shared_paged_kv_idx": False}, "block_tables has shape"),
    (
        {
            "uses_shared_paged_kv_idx": False,
            "block_tables": torch.tensor([[[0, 1], [0, 2]], [[2, 0], [2, 0]]]).int(),
        },
        r"block_tables\[0\] has other pages",
    ),
    ({"cum_seq_lens_q": torch.tensor([0, 2]).int()}, "query has shape"),
    ({"workspace_buffer": 3}, "workspace_buffer is a int"),
    (
        {"kv_cache": scattered.normal(1, 3, 4, 288).to(torch.float8_e4m3fn), "bmm2_scale": 0.0},
        "bmm2_scale is 0",
    ),
]
POOLS = [
    (layer_pool, {"layer_idx": 6}, "layer_idx is 6"),
    (layer_pool, {"layer_idx": -1}, "layer_idx is -1"),
    (layer_pool, {"num_kv_heads": 0}, "num_kv_heads is 0"),
    (layer_pool, {"tokens_per_block": 5}, "pool has 1536 elements"),
    (layer_pool, {"head_dim": "16"}, "head_dim is a str"),
    (layer_pool, {"kv_factor": 3}, "kv_factor is 3"),
    (layer_pool, {"dtype": torch.float32}, "dtype is float32"),
    (layer_pool, {"dtype": torch.bfloat16}, "pool has dtype float16"),
    (layer_pool, {"num_blocks": 12}, "num_blocks is given"),
    (layer_pool, {"device": "cpu"}, "device is given"),
    (layer_pool, {"scale_pool": ONE}, "scale_pool is given"),
    (layer_pool, {"scale_layout": "linear"}, "scale_layout is given"),
    (layer_pool, {"pool": torch.zeros(3, 2, 2, 2, 16, 4).half().mT}, "pool has strides"),
    (layer_pool, {"pool": 4096}, "dtype is None"),
    (layer_pool, {"pool": 4096, "dtype": "float16"}, "num_blocks is None"),
    (layer_pool, {"pool": 4096, "dtype": "float16", "num_blocks": 4}, "device is None"),
    (
        layer_pool,
        {"pool": 4097, "dtype": "float16", "num_blocks": 4, "device": "cpu"},
        "pool is 0x1001",
    ),
    (
        layer_pool,
        {"pool": 0, "dtype": "float16", "num_blocks": 4, "device": "cpu"},
        "pool is 0",
    ),
    (
        layer_pool,
        {"pool": 4096, "dtype": "float16", "num_blocks": 4, "device": "meta"},
        "device is meta",
    ),
    (layer_pool, {"pool": torch.zeros(768).byte(), "dtype": "nvfp4"}, "scale_pool is None"),
    (
        layer_pool,
        {"pool": torch.zeros(768).byte(), "dtype": "nvfp4", "scale_pool": torch.zeros(96).byte()},
        "scale_layout is None",
    ),
    (
        layer_pool,
        {
            "pool": torch.zeros(768).byte(),
            "dtype": "nvfp4",
            "scale_pool": torch.zeros(88).byte(),
            "scale_layout": "linear",
        },
        "scale_pool has 11 blocks",
    ),
    (
        layer_pool,
        {
            "pool": torch.zeros(96).byte(),
            "dtype": "nvfp4",
            "scale_pool": torch.zeros(96).byte(),
            "scale_layout": "linear",
            "head_dim": 8,
        },
        "head_dim is 8",
    ),
    (block_table, {"block_offsets": torch.zeros(2, 3, 2, 4)}, "block_offsets has dtype"),
    (block_table, {"block_offsets": torch.zeros(3, 2, 4).int()}, "block_offsets has shape"),
    (block_table, {"block_offsets": torch.zeros(2, 3, 3, 4).int()}, "block_offsets has shape"),
    (block_table, {"pool_idx": 2}, "pool_idx is 2"),
    (block_table, {"seq_offset": 4}, "seq_offset is 4"),
    (block_table, {"seq_offset": 1, "batch_size": 3}, "batch_size is 3"),
    (block_table, {"uses_shared_paged_kv_idx": 1}, "uses_shared_paged_kv_idx is a int"),
    (block_offsets, {"num_blocks": 3}, r"block_offsets\[0, 1, 1\] is 3"),
    (block_offsets, {"seq_lens": torch.tensor([9])}, r"seq_lens\[0\] is 9"),
    (block_offsets, {"seq_lens": torch.tensor([7, 7])}, "seq_lens has shape"),
    (block_offsets, {"kv_start": torch.tensor([0.0])}, "kv_start has dtype"),
    (block_offsets, {"tokens_per_block": 0}, "tokens_per_block is 0"),
    (block_offsets, {"block_offsets": torch.zeros(1, 3, 2).int()}, "block_offsets has shape"),
    (
        block_offsets,
        {
            "block_offsets": torch.tensor([[[0, 2], [1, 1]]]).int(),
            "uses_shared_paged_kv_idx": True,
        },
        r"block_offsets\[0, 1, 1\] is 1: .* expected 3",
    ),
    (pool_of_layer, {"layer_idx": 1}, "layer_idx is 1"),
    (
        pool_of_layer,
        {"host_kv_cache_pool_pointers": torch.tensor([256, 0])},
        "host_kv_cache_pool_pointers has shape",
    ),
    (
        pool_of_layer,
        {"host_kv_cache_pool_pointers": torch.tensor([[256, 0]]).int()},
        "host_kv_cache_pool_pointers has dtype",
    ),
    (
        pool_of_layer,
        {"host_kv_cache_pool_mapping": torch.tensor([[3, 0]])},
        r"host_kv_cache_pool_mapping\[0\] is pool 3",
    ),
    (
        pool_of_layer,
        {"host_kv_cache_pool_mapping": torch.tensor([[0, 0, 0]])},
        "host_kv_cache_pool_mapping has shape",
    ),
]


def takes(function: object, names: dict[str, object]) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)


REFUSED = [
    *((batch_decode, *case) for case in [*FUNCTIONS, *DECODE]),
    *(
        (batch_context, *case)
        for case in [*FUNCTIONS, *CONTEXT]
        if takes(flashinfer.trtllm_batch_context_with_kv_cache, case[0])
    ),
    *((latent_decode, *case) for case in LATENT),
    *POOLS,
]


@refusals(REFUSED)
def test_what_is_refused(call: Call, changes: dict[str, object], match: str) -> None:
    check_refused(call, changes, match)


CALLED = {
    batch_decode: flashinfer.trtllm_batch_decode_with_kv_cache,
    batch_context: flashinfer.trtllm_batch_context_with_kv_cache,
    latent_decode: flashinfer.trtllm_batch_decode_with_kv_cache_mla,
    layer_pool: trtllm.layer_pool,
    block_table: trtllm.block_table,
    block_offsets: trtllm.check_block_offsets,
    pool_of_layer: trtllm.pool_of_layer,
}
ARGUMENTS = [(call, name) for call, f in CALLED.items() for name in inspect.signature(f).parameters]


@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_no_argument_is_ignored(call: Call, name: str) -> None:
    check_not_ignored(call, name)


@pytest.mark.parametrize(
    "call",
    [
        *(batch_decode, batch_context, latent_decode),
        *(layer_pool, block_table, block_offsets, pool_of_layer),
    ],
)
def test_what_is_refused_differs_from_what_works(call: object) -> None:
    call()


def test_choices_of_an_implementation_change_nothing() -> None:
    want = batch_decode()
    for changes in (
        {"backend": "xqa"},
        {"enable_pdl": True},
        {"o_scale": None},
        {"multi_ctas_kv_counter_buffer": WORKSPACE},
        {"bf16q_fp8kv_transform_mode": "k_only"},
    ):
        assert torch.equal(batch_decode(**changes), want)
    want = latent_decode()
    for changes in (
        {"backend": "cute-dsl"},
        {"cute_dsl_impl": "modular"},
        {"is_var_seq": False},
        {"qk_nope_head_dim": 64},
    ):
        assert torch.equal(latent_decode(**changes), want)


def test_layers_say_what_they_are_for() -> None:
    layer = layer_pool()
    assert isinstance(layer, trtllm.LayerPool)
    with pytest.raises(ValueError, match="kv_factor is 2"):
        layer.latent()
    with pytest.raises(ValueError, match="kv_factor is 1"):
        layer_pool(kv_factor=1).kv()


def test_addresses_of_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory elsewhere, torch makes a copy, which is no view."""
    seen = []

    def as_tensor(memory: object, device: torch.device) -> Tensor:
        seen.append((memory.__cuda_array_interface__, device))
        return torch.zeros(memory.__cuda_array_interface__["shape"], dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    with pytest.raises(ValueError, match="pool is 0x1000, which is not on cuda:1"):
        layer_pool(pool=4096, dtype="float16", num_blocks=4, device="cuda:1")
    ((interface, device),) = seen
    assert interface["data"] == (4096, False)
    assert interface["shape"] == (4 * 2 * 4 * 16 * 2,)
    assert device == torch.device("cuda:1")


def test_equal_calls_share_a_planner() -> None:
    from jitattn.kernels.attention import functional

    cache = scattered.normal(1, 3, 2, 2, 4, 16).to(torch.float8_e4m3fn)
    batch_decode(kv_cache=cache, bmm1_scale=0.5, bmm2_scale=0.25)
    before = functional._planner.cache_info()
    batch_decode(kv_cache=cache, bmm1_scale=0.3, bmm2_scale=torch.tensor(2.0))
    after = functional._planner.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)
