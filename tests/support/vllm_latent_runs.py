"""Batches in vLLM's caches of latents, and their answer in float64."""

from __future__ import annotations

import math
import random
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.steps import FP8
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
        self.batch = engines.Batch(**case.lens, heads=heads, dtype=dtype, device="cpu")
        self.q = [torch.randn(n, dims.num_heads, dims.nope + dims.rope).to(dtype)
                  for n in self.batch.q_lens]  # fmt: skip
        self.rows = [torch.randn(n, dims.width).to(dtype) for n in self.batch.kv_lens]
        shape = dims.num_heads * (dims.nope + dims.v), dims.rank
        self.weight = (torch.randn(shape) / math.sqrt(dims.rank)).to(dtype)
        self.paged = engines.Paged.of(self.batch, case.page_size, self.rng)
        self.is_fp8 = case.kv_cache_dtype in FP8
        self.kv_dtype = FP8.get(case.kv_cache_dtype, dtype)
        self.scale = torch.tensor(0.013 if self.is_fp8 else 1.0)
        pool = torch.full((self.paged.num_pages, 2, case.page_size, dims.width), engines.NAN)
        self.cache = pool.to(self.kv_dtype)[:, 1]
        self.fill()

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
        return torch.tensor(values, dtype=dtype)

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
