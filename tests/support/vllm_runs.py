"""Batches in vLLM's caches, through the layers and builders of jitattn or over vLLM's classes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations import steps
from jitattn.integrations.vllm.builder import Builder
from jitattn.integrations.vllm.layer import Layer
from jitattn.integrations.vllm.metadata import Tensors
from tests.support import engines


@dataclass
class Engine:
    """How layers, builders and batches are made."""

    new_layer: Callable[..., Any]
    new_builder: Callable[..., Any]
    new_common: Callable[..., Any]


def stand_in() -> Engine:
    def builder(tensors: Tensors, found: dict[str, Any]) -> Builder:
        return Builder(tensors, layers=tuple(layer.impl for layer in found.values()))

    return Engine(Layer, builder, SimpleNamespace)


# --- batches --------------------------------------------------------------------------------------

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
MIXED = {"kv_lens": (5, 40, 3, 0, 17, 33), "q_lens": (5, 1, 3, 0, 7, 1)}
DECODE = {"kv_lens": (1, 64, 17, 0, 0), "q_lens": (1, 1, 1, 0, 0)}


def layer_view(
    layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """The second of three layers' [B, H, N, C] in a pool of NaN, in memory as ``layout`` says."""
    sizes = dict(zip("LBHNC", (3, *shape), strict=True))
    pool = torch.full([sizes[name] for name in layout], engines.NAN, device=device).to(dtype)
    return pool.permute(*(layout.index(name) for name in "LBHNC"))[1]


@dataclass
class Case(engines.Step):
    layout: str = "LBNHC"
    per_head_scales: bool = False


class Run:
    """A batch in a cache, and what vLLM hands over with it."""

    slack = 1.01

    def __init__(self, engine: Engine, case: Case) -> None:
        self.engine, self.case, heads = engine, case, case.heads
        rng = self.rng = random.Random(case.seed)
        torch.manual_seed(case.seed)
        self.batch = batch = engines.Batch(
            **case.lens, heads=heads, dtype=case.dtype, device=case.device
        )
        self.paged = engines.Paged.of(batch, case.page_size, rng)
        self.kv_dtype = steps.FP8.get(case.kv_cache_dtype, case.dtype)
        is_fp8 = case.kv_cache_dtype != "auto"
        count = heads.num_kv_heads if case.per_head_scales else 1
        scales = (torch.rand(2, count) + 0.5) / 64 if is_fp8 else torch.ones(2, 1)
        scales = scales.to(case.device)
        self.layer = SimpleNamespace(
            _k_scale=scales[0] if case.per_head_scales else scales[0, 0],
            _v_scale=scales[1] if case.seed % 2 or case.per_head_scales else scales[1, 0],
        )
        self.sinks = (
            torch.randn(heads.num_qo_heads).to(case.device, case.dtype) if case.sinks else None
        )
        scores = case.scores
        self.impl = engine.new_layer(
            heads.num_qo_heads,
            heads.head_dim,
            scores.scale,
            heads.num_kv_heads,
            None,
            None if scores.window_left < 0 else scores.window_left + 1,
            case.kv_cache_dtype,
            scores.soft_cap or None,
            "decoder",
            None,
            **({"sinks": self.sinks} if case.sinks else {}),
        )
        self.layer.impl = self.impl
        width = heads.head_dim + heads.head_dim_vo
        shape = self.paged.num_pages, heads.num_kv_heads, case.page_size, width
        self.kv_cache = layer_view(case.layout, shape, self.kv_dtype, case.device)
        if is_fp8 and case.seed % 2:
            self.kv_cache = self.kv_cache.view(torch.uint8)
        self.fill()
        tensors = Tensors(
            heads.head_dim_vo,
            case.dtype,
            self.kv_cache.dtype,
            case.page_size,
            torch.device(case.device),
        )
        self.builder = engine.new_builder(tensors, {"layer": self.layer})

    @property
    def cells(self) -> Tensor:
        """The cache as [page, place, head, elements of K and V], with its values' dtype."""
        return self.kv_cache.view(self.kv_dtype).transpose(1, 2)

    def kept(self, request: int) -> tuple[Tensor, Tensor]:
        batch, dtype = self.batch, self.kv_dtype
        return (
            engines.stored(batch.k[request], dtype, self.layer._k_scale),
            engines.stored(batch.v[request], dtype, self.layer._v_scale),
        )

    def fill(self) -> None:
        """Write what earlier steps did: all tokens but this step's, and of those a window sees."""
        size, left = self.case.page_size, self.case.scores.window_left
        lens = enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True))
        for b, (n, q) in lens:
            row = torch.cat(self.kept(b), dim=-1)
            for token in range(0 if left < 0 else max(n - q - left, 0), n - q):
                page, place = divmod(self.paged.slot(b, token), size)
                self.cells[page, place] = row[token]

    def common(self, **other: Any) -> Any:
        batch, size = self.batch, self.case.page_size
        width = max(-(-max(batch.kv_lens) // size), 1) + 2
        first = engines.first_pages(batch, size, self.case.scores.window_left)

        def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.case.device)

        given = {
            "query_start_loc": ints(batch.indptr()),
            "seq_lens": ints(batch.kv_lens),
            "num_reqs": batch.batch_size,
            "num_actual_tokens": batch.num_tokens,
            "max_query_len": max(batch.q_lens),
            "max_seq_len": max(batch.kv_lens),
            "block_table_tensor": ints(self.paged.table(width, self.rng, first)),
            "slot_mapping": ints(self.paged.slots(batch), torch.int64),
            "causal": self.case.scores.causal,
        }
        return self.engine.new_common(**{**given, **other})

    def write(self, metadata: Any) -> None:
        k, v = self.batch.new
        padding = self.case.padding
        self.impl.do_kv_cache_update(
            self.layer,
            engines.packed([k], padding),
            engines.packed([v], padding),
            self.kv_cache,
            metadata.slot_mapping,
        )

    def attend(self, metadata: Any) -> Tensor:
        heads, padding = self.case.heads, self.case.padding
        q = engines.packed(self.batch.q, padding)
        shape = q.shape[0], heads.num_qo_heads, heads.head_dim_vo
        out = torch.full(shape, engines.NAN, dtype=q.dtype, device=q.device)
        found = self.impl.forward(self.layer, q, None, None, self.kv_cache, metadata, out)
        assert found is out
        return out

    def check(self, out: Tensor) -> None:
        """Rows of requests are what the definition says, and others 0."""
        ends = self.batch.indptr()
        for b, (begin, end) in enumerate(itertools.pairwise(ends)):
            k, v = self.kept(b)
            want, _, size = engines.defined(
                self.batch.q[b],
                engines.read(k, self.layer._k_scale),
                engines.read(v, self.layer._v_scale),
                self.case.scores,
                self.sinks,
            )
            engines.check_rows(out[begin:end], want, size, slack=self.slack)
        assert bool((out[ends[-1] :] == 0).all())

    def check_cache(self) -> None:
        """This step's tokens are in their slots, and no other slot has changed."""
        before = self.cells.clone()
        self.write(self.builder.build(0, self.common()))
        want = before.clone()
        for b, (n, q) in enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True)):
            row = torch.cat(self.kept(b), dim=-1)
            for token in range(n - q, n):
                page, place = divmod(self.paged.slot(b, token), self.case.page_size)
                want[page, place] = row[token]
        torch.testing.assert_close(self.cells.float(), want.float(), rtol=0, atol=0, equal_nan=True)

    def go(self) -> None:
        self.check_cache()
        self.check(self.attend(self.builder.build(0, self.common())))
