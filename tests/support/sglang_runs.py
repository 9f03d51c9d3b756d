"""Batches in SGLang's pools, through jitattn's backend alone or over SGLang's classes."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.sglang.layers import Backend
from tests.support import engines

DTYPES = {
    "auto": None,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class Mode(enum.Enum):
    """SGLang's modes, as far as a backend asks."""

    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    IDLE = enum.auto()
    TARGET_VERIFY = enum.auto()
    DRAFT_EXTEND_V2 = enum.auto()
    DLLM_EXTEND = enum.auto()

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: self.name == name.removeprefix("is_").upper()


# --- pools ----------------------------------------------------------------------------------------


class Pool:
    """K and V of each layer, as SGLang's pools return them."""

    def __init__(self, buffers: dict[int, tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
        self.buffers, self.dtype = buffers, dtype

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        k, v = self.buffers[layer_id]
        return k.view(self.dtype), v.view(self.dtype)


class HybridPool(Pool):
    """Layers with a window have slots of their own."""

    def __init__(
        self, buffers: dict[int, tuple[Tensor, Tensor]], dtype: torch.dtype, slots: Tensor
    ) -> None:
        super().__init__(buffers, dtype)
        self.layers_mapping = {FULL: (0, False), WINDOW: (0, True)}
        self.full_to_swa_index_mapping = slots


FULL, WINDOW = 3, 4  # layers


def new_buffers(
    layout: str,
    num_pages: int,
    page_size: int,
    heads: engines.Heads,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor]:
    """K and V of one layer, all NaN: slots, heads, elements, or with pages and heads before."""
    num_slots, num_heads = num_pages * page_size, heads.num_kv_heads
    sizes = heads.head_dim, heads.head_dim_vo
    fill = torch.full((), engines.NAN, device=device).to(dtype)
    if layout == "nhd":
        return tuple(fill.repeat(num_slots, num_heads, n) for n in sizes)  # type: ignore[return-value]
    if layout == "hnd":
        return tuple(fill.repeat(num_pages, num_heads, page_size, n) for n in sizes)  # type: ignore[return-value]
    assert layout == "strided"  # slots of all layers, K and V of a slot beside each other
    pool = fill.repeat(num_slots, 3, num_heads, sum(sizes) + 16)
    return pool[:, 1, :, : sizes[0]], pool[:, 1, :, sizes[0] : sum(sizes)]


@dataclass
class Engine:
    """How backends, layers and batches are made."""

    new_backend: Callable[..., Any]
    new_layer: Callable[..., Any]
    mode: Any


def stand_in() -> Engine:
    def layer(heads: engines.Heads, scores: engines.Scores, layer_id: int) -> Any:
        return SimpleNamespace(
            layer_id=layer_id,
            tp_q_head_num=heads.num_qo_heads,
            tp_k_head_num=heads.num_kv_heads,
            qk_head_dim=heads.head_dim,
            head_dim=heads.head_dim,
            v_head_dim=heads.head_dim_vo,
            scaling=scores.scale,
            logit_cap=scores.soft_cap,
            sliding_window_size=scores.window_left,
            is_cross_attention=False,
            attn_type=SimpleNamespace(value="decoder"),
            k_scale=None,
            v_scale=None,
            k_scale_float=None,
            v_scale_float=None,
        )

    return Engine(Backend, layer, Mode)


# --- batches --------------------------------------------------------------------------------------

MIXED = {"kv_lens": (5, 40, 3, 17, 33), "q_lens": (5, 1, 3, 7, 1)}
DECODE = {"kv_lens": (1, 64, 17, 30), "q_lens": (1, 1, 1, 1)}
EXTEND = {"kv_lens": (5, 40, 17), "q_lens": (5, 13, 2)}
VERIFY = {"kv_lens": (4, 40, 19), "q_lens": (4, 4, 4)}


@dataclass
class Case(engines.Step):
    mode: str = "EXTEND"
    layout: str = "nhd"
    is_hybrid: bool = False


class Run:
    """A batch in a pool, and what SGLang hands over with it."""

    slack = 1.01

    def __init__(self, engine: Engine, case: Case) -> None:
        self.engine, self.case = engine, case
        heads = case.heads
        rng = random.Random(case.seed)
        torch.manual_seed(case.seed)
        self.batch = batch = engines.Batch(
            **case.lens, heads=heads, dtype=case.dtype, device=case.device
        )
        self.paged = paged = engines.Paged.of(batch, case.page_size, rng)
        self.kv_dtype = DTYPES[case.kv_cache_dtype] or case.dtype
        window = case.is_hybrid
        self.layer = engine.new_layer(heads, case.scores, WINDOW if window else FULL)
        is_fp8 = self.kv_dtype != case.dtype
        self.scales: list[Any] = [1.0, 1.0]
        if is_fp8:
            self.scales = list(((torch.rand(2) + 0.5) / 64).to(case.device))
            for name, scale in zip(("k_scale", "v_scale"), self.scales, strict=True):
                setattr(self.layer, name, scale if case.seed % 2 else scale[None])
                setattr(self.layer, f"{name}_float", 123.0)  # not what counts
        self.sinks = (
            torch.randn(heads.num_qo_heads).to(case.device, case.dtype) if case.sinks else None
        )
        self._make_pool(rng)
        width = -(-max(batch.kv_lens) // case.page_size) * case.page_size + 7
        rows = len(batch.kv_lens) + 3
        self.req_to_token = torch.full((rows, width), 2**31 - 1, dtype=torch.int32)
        self.req_to_token[0] = 0  # of padding
        self.rows = torch.tensor(rng.sample(range(1, rows), batch.batch_size))
        for b, n in enumerate(batch.kv_lens):
            slots = [paged.slot(b, t) for t in range(n)]
            self.req_to_token[self.rows[b], :n] = torch.tensor(slots, dtype=torch.int32)
        self.req_to_token, self.rows = (x.to(case.device) for x in (self.req_to_token, self.rows))
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            token_to_kv_pool=self.pool,
            page_size=case.page_size,
            sliding_window_size=case.scores.window_left if window else None,
        )
        self.backend = engine.new_backend(self.runner)

    def _make_pool(self, rng: random.Random) -> None:
        case, paged = self.case, self.paged
        size = case.page_size
        stored_as = torch.uint8 if self.kv_dtype != case.dtype else self.kv_dtype
        k, v = new_buffers(
            case.layout, paged.num_pages, size, case.heads, self.kv_dtype, case.device
        )
        buffers = {FULL: (k.view(stored_as), v.view(stored_as))}
        self.slot_of = self.paged.slot
        if not case.is_hybrid:
            self.pool: Any = Pool(buffers, self.kv_dtype)
        else:
            # Pages of layers with a window are others; what no query sees has none.
            other = list(range(1, paged.num_pages))
            rng.shuffle(other)
            mapping = torch.zeros(paged.num_pages * size + 1, dtype=torch.int64)
            mapping[-1] = -1
            lens = enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True))
            for b, (n, q) in lens:
                for token in range(max(n - q - case.scores.window_left, 0), n):
                    slot = paged.slot(b, token)
                    mapping[slot] = other[slot // size - 1] * size + slot % size
            k, v = new_buffers(
                case.layout, paged.num_pages, size, case.heads, self.kv_dtype, case.device
            )
            buffers[WINDOW] = k.view(stored_as), v.view(stored_as)
            self.pool = HybridPool(buffers, self.kv_dtype, mapping.to(case.device))
            self.slot_of = lambda b, token: int(mapping[paged.slot(b, token)])
        layer_id = WINDOW if case.is_hybrid else FULL
        self.buffers = self.pool.get_kv_buffer(layer_id)
        self._fill()

    def kept(self, request: int) -> tuple[Tensor, Tensor]:
        values = self.batch.k[request], self.batch.v[request]
        return tuple(  # type: ignore[return-value]
            engines.stored(x, self.kv_dtype, scale)
            for x, scale in zip(values, self.scales, strict=True)
        )

    def put(self, request: int, tokens: range, buffers: tuple[Tensor, Tensor]) -> None:
        size = self.case.page_size
        for buffer, rows in zip(buffers, self.kept(request), strict=True):
            for token in tokens:
                slot = self.slot_of(request, token)
                if buffer.dim() == 4:
                    buffer[slot // size, :, slot % size] = rows[token]
                else:
                    buffer[slot] = rows[token]

    def _fill(self) -> None:
        left = self.case.scores.window_left
        for b, (n, q) in enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True)):
            self.put(b, range(0 if left < 0 else max(n - q - left, 0), n - q), self.buffers)

    def forward_batch(self, **other: Any) -> Any:
        case, batch = self.case, self.batch

        def ints(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=case.device)

        q_lens, kv_lens = ints(batch.q_lens, torch.int32), ints(batch.kv_lens)
        given = {
            "forward_mode": getattr(self.engine.mode, case.mode),
            "batch_size": batch.batch_size,
            "req_pool_indices": self.rows,
            "seq_lens": kv_lens,
            "out_cache_loc": ints(self.paged.slots(batch)),
            "spec_info": None,
            "encoder_lens": None,
            "extend_seq_lens": q_lens,
            "extend_seq_lens_cpu": list(batch.q_lens),
        }
        if case.mode == "TARGET_VERIFY":
            given["seq_lens"] = kv_lens - q_lens
            given["spec_info"] = SimpleNamespace(
                topk=1, draft_token_num=batch.q_lens[0], custom_mask=None
            )
        return SimpleNamespace(**{**given, **other})

    def attend(self, forward_batch: Any, **other: Any) -> Tensor:
        case, backend = self.case, self.backend
        k, v = self.batch.new
        q = engines.packed(self.batch.q, case.padding)
        others = {"sinks": self.sinks} if case.sinks else {}
        call = backend.forward_decode if case.mode == "DECODE" else backend.forward_extend
        return call(
            q if case.seed % 2 else q.flatten(1),
            engines.packed([k], case.padding),
            engines.packed([v], case.padding),
            self.layer,
            forward_batch,
            **{**others, **other},
        )

    def check(self, out: Tensor) -> None:
        """Rows of requests are what the definition says, and others 0."""
        heads, ends = self.case.heads, self.batch.indptr()
        assert out.dim() == 2
        out = out.view(-1, heads.num_qo_heads, heads.head_dim_vo)
        for b, (begin, end) in enumerate(itertools.pairwise(ends)):
            k, v = (
                engines.read(x, scale) for x, scale in zip(self.kept(b), self.scales, strict=True)
            )
            want, _, size = engines.defined(self.batch.q[b], k, v, self.case.scores, self.sinks)
            engines.check_rows(out[begin:end], want, size, slack=self.slack)
        assert bool((out[ends[-1] :] == 0).all())

    def go(self) -> None:
        before = tuple(buffer.clone() for buffer in self.buffers)
        forward_batch = self.forward_batch()
        self.backend.init_forward_metadata(forward_batch)
        self.check(self.attend(forward_batch))
        # This step's tokens are in their slots, and no other slot has changed.
        for b, (n, q) in enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True)):
            self.put(b, range(n - q, n), before)
        for found, want in zip(self.buffers, before, strict=True):
            torch.testing.assert_close(found.float(), want.float(), rtol=0, atol=0, equal_nan=True)
