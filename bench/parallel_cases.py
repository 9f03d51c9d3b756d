"""What is measured over several cards: cases of decode, and one rank's tensors of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jitattn
from bench.mla_cases import SM_SCALE
from jitattn.parallel import ContextParallel

K = 1024
PAGE = 64
# Of one H200 in docs/perf-log.md: B64 x 8k in bf16, 2.15 GB in 501.5 us; latent attention with 128
# heads, B128 x 8k, in bf16 and e4m3.
READ_BYTES_PER_S = 4.28e12
PRODUCTS_PER_S = {"bfloat16": 592e12, "float8_e4m3fn": 366e12}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of one query token a request."""

    batch_size: int
    kv_len: int
    is_mla: bool
    kv_dtype: str
    heads: int
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        length = f"{self.kv_len // K}k" if self.kv_len >= K else str(self.kv_len)
        kind = f"mla-h{self.heads}" if self.is_mla else f"h{self.heads}_{self.kv_heads}"
        return f"b{self.batch_size}-{length}-{kind}-{'e4m3' if self.is_fp8 else 'bf16'}"

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype == "float8_e4m3fn"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV tokens of a layer, on all ranks."""
        row = 576 if self.is_mla else 2 * self.kv_heads * self.head_dim
        return self.batch_size * self.kv_len * row * (1 if self.is_fp8 else 2)

    @property
    def seconds(self) -> float:
        """Of a layer on one H200, by its bytes and, of latent attention, its products."""
        products = self.batch_size * self.kv_len * self.heads * 2 * (576 + 512) * self.is_mla
        return max(self.kv_bytes / READ_BYTES_PER_S, products / PRODUCTS_PER_S[self.kv_dtype])

    def received_bytes(self, num_ranks: int) -> int:
        """Bytes that each rank receives in a step: queries, and outs with their lse."""
        dims = (576, 512) if self.is_mla else (self.head_dim, self.head_dim)
        row = 2 * sum(dims) + 16
        return (num_ranks - 1) * self.batch_size * (self.heads // num_ranks) * row


def cases(*, is_tiny: bool, names: str) -> list[Case]:
    """Return the cases whose names have one of the comma-separated parts."""
    shapes = [(1, K * K), (8, 128 * K), (64, 8 * K)]
    if is_tiny:
        shapes = [(1, 700), (3, 130)]
    found = [
        Case(
            batch_size=batch_size,
            kv_len=kv_len,
            is_mla=is_mla,
            kv_dtype=kv_dtype,
            heads=8 if is_tiny else 128 if is_mla else 32,
            kv_heads=2 if is_tiny else 8,
        )
        for batch_size, kv_len in shapes
        for is_mla in (False, True)
        for kv_dtype in ("bfloat16", "float8_e4m3fn")
    ]
    parts = names.split(",")
    return [case for case in found if any(part in case.name for part in parts)]


def planner_of(case: Case, device: torch.device) -> Any:
    """Return the planner of all heads."""
    common = {"kv_dtype": case.kv_dtype, "page_size": PAGE, "device": device}
    if case.is_mla:
        return jitattn.MLAPlanner(num_heads=case.heads, sm_scale=SM_SCALE, **common)  # type: ignore
    return jitattn.AttentionPlanner(
        num_qo_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        **common,  # type: ignore[arg-type]
    )


class Step:
    """One rank's tensors of a case: its tokens, and several layers of them so that L2 is cold."""

    def __init__(self, case: Case, num_ranks: int, rank: int, device: torch.device) -> None:
        self.case, self.device = case, device
        self.planner = planner_of(case, device)
        rounds = -(-case.kv_len // (num_ranks * PAGE))
        self.seq_lens = torch.full((case.batch_size,), case.kv_len, device=device)
        self.table = torch.arange(case.batch_size * rounds, dtype=torch.int32, device=device).view(
            case.batch_size, rounds
        )
        num_pages = self.table.numel()
        own_bytes = max(case.kv_bytes // num_ranks, 1)
        # Enough for ten L2 caches, and no more than four layers.
        num_layers = 1 if device.type == "cpu" else min(4, max(1, -(-(600 << 20) // own_bytes)))
        torch.manual_seed(rank)
        self.pools = [self._pool(num_pages) for _ in range(num_layers)]
        self.caches = [self.planner.bind(pool) for pool in self.pools]
        dims = (512, 64) if case.is_mla else (case.head_dim,)
        torch.manual_seed(99)
        self.qs = [self._normal(case.batch_size, case.heads, dim).bfloat16() for dim in dims]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def _pool(self, num_pages: int) -> Tensor:
        case, dtype = self.case, getattr(torch, self.case.kv_dtype)
        rows = (576,) if case.is_mla else (case.kv_heads, case.head_dim)
        shape = (num_pages, PAGE, *rows) if case.is_mla else (num_pages, 2, PAGE, *rows)
        cache = torch.empty(shape, dtype=dtype, device=self.device)
        for part in cache.split(1024):  # no room for all of it in float32
            part.copy_(self._normal(*part.shape).to(dtype))
        return cache

    def own(self, cp: ContextParallel) -> list[Tensor]:
        """Return the queries of this rank's heads."""
        count = self.case.heads // cp.num_ranks
        return [q[:, cp.rank * count : (cp.rank + 1) * count].contiguous() for q in self.qs]
