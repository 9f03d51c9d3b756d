"""Batches in vLLM's caches of latents, and their answer in float64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.steps import FP8, Step
from jitattn.integrations.vllm.latents import LatentLayer, Prompts
from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.tensors.page_tables import BlockTable
from tests.support import engines

SCALE = 0.2
# As vLLM orders them: decode steps, prompts with earlier tokens in the cache, others.
MIXED = {"kv_lens": (1, 40, 17, 60, 90, 5, 33), "q_lens": (1, 1, 1, 7, 20, 5, 33)}
# As vLLM 0.26's newer runner does: by new tokens.
SORTED = {"kv_lens": (1, 40, 17, 5, 60, 90, 33), "q_lens": (1, 1, 1, 5, 7, 20, 33)}
DECODE = {"kv_lens": (1, 64, 17, 40), "q_lens": (1, 1, 1, 1)}
VERIFIED = {"kv_lens": (3, 64, 17, 40), "q_lens": (3, 3, 1, 2)}
PROMPTS = {"kv_lens": (20, 33, 2), "q_lens": (20, 33, 2)}


@dataclass(frozen=True)
class Dims:
    """Heads and elements of latent attention."""

    num_heads: int = 4
    rank: int = 256
    rope: int = 64
    nope: int = 32
    v: int = 48

    @property
    def width(self) -> int:
        """Elements of a token in the cache."""
        return self.rank + self.rope


DIMS = Dims()
DEEPSEEK = Dims(num_heads=16, rank=512, rope=64, nope=128, v=128)


@dataclass
class Case:
    """A step: its requests, the layer, and the cache."""

    lens: dict[str, tuple[int, ...]]
    _: KW_ONLY
    dims: Dims = DIMS
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    padding: int = 0
    seed: int = 0
    device: str = "cpu"


class Run:
    """A batch of random tokens in random pages; all that no request has is NaN.

    Attributes:
        q: [q_len, num_heads, nope + rope] of each request.
        rows: [kv_len, rank + rope] of each request, in the model's dtype.
        weight: [num_heads * (nope + v), rank], what makes K and V of latents.
        cache: [num_pages, page_size, rank + rope], pages of two layers beside each other.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, random.Random(case.seed)
        torch.manual_seed(case.seed)
        dims, dtype = case.dims, case.dtype
        heads = engines.Heads(dims.num_heads, 1, dims.width, dims.rank)
        self.batch = engines.Batch(**case.lens, heads=heads, dtype=dtype, device=case.device)
        head_dim = dims.nope + dims.rope
        self.q = [self.values(n, dims.num_heads, head_dim) for n in self.batch.q_lens]
        self.rows = [self.values(n, dims.width) for n in self.batch.kv_lens]
        shape = dims.num_heads * (dims.nope + dims.v), dims.rank
        self.weight = self.values(*shape) / math.sqrt(dims.rank)
        self.paged = engines.Paged.of(self.batch, case.page_size, self.rng)
        self.is_fp8 = case.kv_cache_dtype in FP8
        self.kv_dtype = FP8.get(case.kv_cache_dtype, dtype)
        self.scale = torch.tensor(0.013 if self.is_fp8 else 1.0, device=case.device)
        pool = torch.full((self.paged.num_pages, 2, case.page_size, dims.width), engines.NAN)
        self.cache = pool.to(self.kv_dtype).to(case.device)[:, 1]
        self.fill()

    def values(self, *shape: int) -> Tensor:
        """Random ones in the model's dtype."""
        return torch.randn(shape).to(self.case.dtype).to(self.case.device)

    def stored(self, request: int) -> Tensor:
        """What the cache keeps of a request's tokens."""
        return engines.stored(self.rows[request][:, None], self.kv_dtype, self.scale)[:, 0]

    def read(self, request: int) -> Tensor:
        """The values of that, in float64."""
        return engines.read(self.stored(request)[:, None], self.scale)[:, 0]

    def fill(self) -> None:
        """Write what earlier steps did."""
        for b, (n, q) in enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True)):
            for token in range(n - q):
                page, place = divmod(self.paged.slot(b, token), self.case.page_size)
                self.cache[page, place] = self.stored(b)[token]

    @property
    def handed_over(self) -> Tensor:
        """The cache as vLLM hands it over: FP8 as bytes."""
        return self.cache.view(torch.uint8) if self.is_fp8 else self.cache

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """Latents [num_tokens, rank] and rope parts [num_tokens, 1, rope] of this step's tokens."""
        lens = zip(self.rows, self.batch.q_lens, strict=True)
        rows = engines.packed([row[len(row) - n :, None] for row, n in lens], self.case.padding)
        rank = self.case.dims.rank
        return rows[:, 0, :rank], rows[..., rank:]

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.case.device)

    @property
    def table(self) -> Tensor:
        width = -(-max(self.batch.kv_lens) // self.case.page_size) + 2
        return self.ints(self.paged.table(width, self.rng))

    @property
    def slots(self) -> Tensor:
        return self.ints(self.paged.slots(self.batch), torch.int64)

    def common(self, **other: Any) -> dict[str, Any]:
        """What vLLM's ``CommonAttentionMetadata`` is made of."""
        batch = self.batch
        starts, lens = self.ints(batch.indptr()), self.ints(batch.kv_lens)
        given = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": lens,
            "seq_lens_cpu_upper_bound": lens.clone(),
            "num_reqs": batch.batch_size,
            "num_actual_tokens": batch.num_tokens,
            "max_query_len": max(batch.q_lens),
            "max_seq_len": max(batch.kv_lens),
            "block_table_tensor": self.table,
            "slot_mapping": self.slots,
            "causal": True,
        }
        return given | other

    # --- the definition ---------------------------------------------------------------------------

    @property
    def projections(self) -> tuple[Tensor, Tensor]:
        """What makes keys [num_heads, nope, rank] and values [num_heads, v, rank] of latents."""
        dims = self.case.dims
        both = self.weight.double().view(dims.num_heads, dims.nope + dims.v, dims.rank)
        return both[:, : dims.nope], both[:, dims.nope :]

    def multiplied(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of each head of tokens [n, rank + rope]."""
        dims, (to_k, to_v) = self.case.dims, self.projections
        latent, rope = rows[:, : dims.rank], rows[:, dims.rank :]
        k_nope = torch.einsum("nl,hpl->nhp", latent, to_k)
        k_pe = rope[:, None].expand(-1, dims.num_heads, -1)
        return torch.cat([k_nope, k_pe], dim=-1), torch.einsum("nl,hvl->nhv", latent, to_v)

    def wanted(self, request: int, *, is_prompt: bool) -> tuple[Tensor, Tensor]:
        """Out, and what its roundings go by, of a request; a prompt's own tokens are as they were.

        Latents, and then K and V of each head, are rounded: errors go by what is summed.
        """
        rows = self.read(request)
        if is_prompt:
            begin = self.batch.kv_lens[request] - self.batch.q_lens[request]
            rows = torch.cat([rows[:begin], self.rows[request][begin:].double()])
        k, v = self.multiplied(rows)
        summed = torch.einsum("nl,hvl->nhv", rows[:, : self.case.dims.rank].abs(),
                              self.projections[1].abs())  # fmt: skip
        scores = engines.Scores(scale=SCALE)
        out, size = (engines.defined(self.q[request], k, x, scores)[0] for x in (v, summed))
        return out, size

    def wanted_latents(self, q: Tensor, request: int) -> tuple[Tensor, Tensor, Tensor]:
        """Likewise of q [n, num_heads, rank + rope], whose values are the latents."""
        rows = self.read(request)[:, None]
        return engines.defined(
            q, rows, rows[..., : self.case.dims.rank], engines.Scores(scale=SCALE)
        )

    def layer(self) -> SimpleNamespace:
        """What has the scale of latents."""
        return SimpleNamespace(_k_scale=self.scale)


# --- stand-ins ------------------------------------------------------------------------------------


def layer_of(run: Run) -> LatentLayer:
    layer = LatentLayer()
    dims = run.case.dims
    layer.scale, layer.kv_cache_dtype = SCALE, run.case.kv_cache_dtype
    layer.kv_lora_rank, layer.qk_rope_head_dim = dims.rank, dims.rope
    return layer


def decode_of(run: Run, **other: Any) -> SimpleNamespace:
    common = run.common(**other)
    starts, most = common["query_start_loc"], common["max_query_len"]
    step = Step(common["seq_lens"], starts, most)
    return SimpleNamespace(step=step, pages=BlockTable(common["block_table_tensor"]))


def queries_of(run: Run) -> Tensor:
    """Queries with the projection of keys multiplied in, rounded as vLLM rounds them."""
    dims = run.case.dims
    rows = [run.values(n, dims.num_heads, dims.width) for n in run.batch.q_lens]
    return engines.packed(rows, run.case.padding)


def write(layer: LatentLayer, run: Run, slots: Tensor | None = None) -> None:
    latent, rope = run.new
    chosen = run.slots if slots is None else slots
    layer.do_kv_cache_update(latent, rope, run.handed_over, chosen, "unread", run.scale)


def attend(layer: LatentLayer, run: Run, q: Tensor, decode: Any) -> Any:
    rank = run.case.dims.rank
    parts = q[..., :rank], q[..., rank:]
    found = layer.forward_mqa(parts, run.handed_over, SimpleNamespace(decode=decode), run.layer())
    together, _ = layer.forward_mqa(q, run.handed_over, SimpleNamespace(decode=decode), run.layer())
    assert torch.equal(together, found[0])
    return found


def check(
    run: Run, q: Tensor, out: Tensor, lse: Tensor | None = None, *, slack: float = 1.01
) -> None:
    bounds = run.batch.indptr()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        want, want_lse, size = run.wanted_latents(q[begin:end], b)
        engines.check_rows(out[begin:end], want, size, slack=slack)
        if lse is not None:
            torch.testing.assert_close(lse[begin:end].double(), want_lse, rtol=1e-5, atol=1e-5)
    assert bool((out[bounds[-1] :] == 0).all())


def prompts_of(dims: Dims) -> Prompts:
    prompts = Prompts()
    prompts.num_heads, prompts.scale, prompts.v_head_dim = dims.num_heads, SCALE, dims.v
    prompts.qk_nope_head_dim, prompts.qk_rope_head_dim = dims.nope, dims.rope
    return prompts


def heads_of(
    num_tokens: int, dims: Dims, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """K and V of each head; V is a part of what is multiplied out."""
    k = torch.randn(num_tokens, dims.num_heads, dims.nope + dims.rope).to(device, dtype)
    both = torch.randn(num_tokens, dims.num_heads, dims.nope + dims.v).to(device, dtype)
    return k, both[..., dims.nope :]


# --- on a card ------------------------------------------------------------------------------------


def gpu_configs() -> list[MLAConfig | PlannerConfig | PreprocessConfig]:
    """What tests/gpu/test_vllm_latents.py launches, for a bundle."""
    dims = DEEPSEEK
    found: list[MLAConfig | PlannerConfig | PreprocessConfig] = []
    for page_size, kv_dtype in itertools.product((16, 64), ("bfloat16", "float8_e4m3fn")):
        cache = {"page_size": page_size, "kv_dtype": kv_dtype}
        found.append(
            MLAConfig(num_heads=dims.num_heads, kv_lora_rank=dims.rank,
                      qk_rope_head_dim=dims.rope, **cache)
        )  # fmt: skip
        found.append(
            PreprocessConfig(head_dim=dims.rank, head_dim_vo=dims.rope, page_table="slots",
                             pairing="none", **cache)
        )  # fmt: skip
    for causal in (True, False):
        found.append(
            PlannerConfig(num_qo_heads=dims.num_heads, num_kv_heads=dims.num_heads,
                          head_dim=dims.nope + dims.rope, head_dim_vo=dims.v, page_size=None,
                          page_table="ragged", causal=causal)
        )  # fmt: skip
    return found
