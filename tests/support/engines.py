"""Batches as serving engines describe them, with their answer in float64.

Caches hold NaN wherever no request has a token that it sees, tables hold garbage past a request's
last page, and the definition below is written from docs/concepts.md alone.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import pytest
import torch
from torch import Tensor

from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.spec.config import PlannerConfig

NAN = math.nan
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# What kernels may be off by, in units of the sum of p * |v|.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@contextmanager
def installed(module: str, name: str) -> Iterator[None]:
    """Import parts of an engine, or skip the test and say why; they may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(module, reason=f"{name} is not installed")
        try:
            yield
        except ImportError as error:  # a part of it that is not installed
            pytest.skip(f"{name} can't be imported here: {error}")


@dataclass(frozen=True)
class Heads:
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    head_dim_vo: int = 32


@dataclass(frozen=True)
class Scores:
    """What a score goes through, and what a query sees."""

    scale: float = 0.3
    window_left: int = -1
    soft_cap: float = 0.0
    causal: bool = True


HEADS, SCORES = Heads(), Scores()


@dataclass
class Step:
    """A step of an engine: its requests, the layer, and the cache."""

    lens: dict[str, tuple[int, ...]]
    _: KW_ONLY
    heads: Heads = HEADS
    scores: Scores = SCORES
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    sinks: bool = False
    padding: int = 0  # rows of q past the last request's
    seed: int = 0
    device: str = "cpu"


@dataclass
class Batch:
    """Requests of ``kv_lens`` tokens, the last ``q_lens`` of which are this step's.

    k, v: [num_tokens of the request, num_kv_heads, elements] of each request, in the model's
    dtype; q likewise of its query tokens.
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: Heads
    dtype: torch.dtype
    device: str
    q: list[Tensor] = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        heads = self.heads

        def values(n: int, num_heads: int, size: int) -> Tensor:
            return torch.randn(n, num_heads, size).to(self.dtype).to(self.device)

        self.q = [values(n, heads.num_qo_heads, heads.head_dim) for n in self.q_lens]
        self.k = [values(n, heads.num_kv_heads, heads.head_dim) for n in self.kv_lens]
        self.v = [values(n, heads.num_kv_heads, heads.head_dim_vo) for n in self.kv_lens]

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """K and V of this step's tokens, one request after the other."""
        pairs = zip(self.k, self.v, self.q_lens, strict=True)
        parts = [(k[len(k) - n :], v[len(v) - n :]) for k, v, n in pairs]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def indptr(self) -> list[int]:
        ends = [0]
        for n in self.q_lens:
            ends.append(ends[-1] + n)
        return ends


def packed(parts: Sequence[Tensor], padding: int = 0, *, between: int = 8) -> Tensor:
    """Rows of ``parts`` and NaN ones behind, apart in memory as those of a fused projection."""
    rows = torch.cat(list(parts))
    num_tokens, num_heads, size = rows.shape
    memory = torch.full(
        (num_tokens + padding, num_heads * size + between),
        NAN,
        dtype=rows.dtype,
        device=rows.device,
    )
    view = memory[:, : num_heads * size].view(num_tokens + padding, num_heads, size)
    view[:num_tokens] = rows
    return view


def stored(values: Tensor, dtype: torch.dtype, scale: Tensor | float) -> Tensor:
    """What a cache of ``dtype`` keeps of [tokens, num_kv_heads, elements], times 1 / scale."""
    if dtype not in LARGEST:
        return values.to(dtype)
    factor = torch.as_tensor(scale, dtype=torch.float32, device=values.device).reshape(-1, 1)
    most = LARGEST[dtype]
    return (values.float() * (1.0 / factor)).clamp(-most, most).to(dtype)


def read(kept: Tensor, scale: Tensor | float) -> Tensor:
    """The values that stored [tokens, num_kv_heads, elements] stand for, in float64."""
    if kept.dtype not in LARGEST:
        return kept.double()
    factor = torch.as_tensor(scale, dtype=torch.float64, device=kept.device).reshape(-1, 1)
    return kept.double() * factor


def defined(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and sum of p * |v| of a request: q [n, heads, dim], k and v [m, heads_k, dim]."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scores.scale
    if scores.soft_cap:
        logits = scores.soft_cap * torch.tanh(logits / scores.soft_cap)
    own = torch.arange(n, device=q.device)[:, None] + m - n
    key = torch.arange(m, device=q.device)
    unseen = torch.zeros(n, m, dtype=torch.bool, device=q.device)
    if scores.causal:
        unseen |= key > own
    if scores.window_left >= 0:
        unseen |= key < own - scores.window_left
    logits = logits.masked_fill(unseen, -math.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, n, 1)
        lse = torch.logsumexp(torch.cat([logits, sink], dim=-1), dim=-1)
    else:
        lse = torch.logsumexp(logits, dim=-1)
    p = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out, size = (torch.einsum("hnm,mhd->nhd", p, x) for x in (values, values.abs()))
    return out, lse.T, size


def check_rows(found: Tensor, want: Tensor, size: Tensor, *, slack: float = 1.01) -> None:
    bound = slack * ROUNDING[found.dtype] * size + 2.0**-20
    assert bool(((found.double() - want).abs() <= bound).all())


# --- pages ----------------------------------------------------------------------------------------


@dataclass
class Paged:
    """Where the tokens of a batch's requests lie: random pages, with holes between them.

    Attributes:
        page_size: tokens of a page.
        num_pages: of the pool; page 0 is nobody's.
        pages: page ids of each request.
    """

    page_size: int
    num_pages: int
    pages: list[list[int]]

    @classmethod
    def of(cls, batch: Batch, page_size: int, rng: random.Random, *, spare: int = 0) -> Paged:
        counts = [-(-n // page_size) + (spare if n else 0) for n in batch.kv_lens]
        num_pages = 2 * sum(counts) + 2
        ids = rng.sample(range(1, num_pages), sum(counts))
        pages = [[ids.pop() for _ in range(n)] for n in counts]
        return cls(page_size, num_pages, pages)

    def slot(self, request: int, token: int) -> int:
        size = self.page_size
        return self.pages[request][token // size] * size + token % size

    def slots(self, batch: Batch) -> list[int]:
        """Those of this step's tokens."""
        lens = enumerate(zip(batch.kv_lens, batch.q_lens, strict=True))
        return [self.slot(b, token) for b, (n, q) in lens for token in range(n - q, n)]

    def table(
        self, width: int, rng: random.Random, first: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Page ids with garbage past each request's last, and before its ``first``."""
        rows = []
        for b, ids in enumerate(self.pages):
            row = [rng.choice((-1, -7, 2**31 - 1, 0, self.num_pages)) for _ in range(width)]
            begin = 0 if first is None else first[b]
            row[begin : len(ids)] = ids[begin:]
            rows.append(row)
        return rows


def first_pages(batch: Batch, page_size: int, window_left: int) -> list[int]:
    """The first page of each request that a query sees."""
    if window_left < 0:
        return [0] * batch.batch_size
    pairs = zip(batch.kv_lens, batch.q_lens, strict=True)
    return [max(n - q - window_left, 0) // page_size for n, q in pairs]


# --- on a card ------------------------------------------------------------------------------------

GPU_HEADS = Heads(8, 2, 128, 128)
GPU_KV_DTYPES = ("bfloat16", "float8_e4m3fn")


def gpu_configs() -> list[PlannerConfig | PreprocessConfig]:
    """What tests/gpu/test_engines.py launches besides tables, for a bundle."""
    found: list[PlannerConfig | PreprocessConfig] = []
    for page_table, page_size in (("shared", 16), ("token", 1), ("shared", 1)):
        for kv_dtype in GPU_KV_DTYPES:
            given = {"page_size": page_size, "kv_dtype": kv_dtype}
            found.append(
                PreprocessConfig(head_dim=128, page_table="slots", pairing="none", **given)
            )
            for scores in ({}, {"window_left": 20}, {"window_left": 20, "use_sinks": True}):
                found.append(
                    PlannerConfig(
                        num_qo_heads=GPU_HEADS.num_qo_heads,
                        num_kv_heads=GPU_HEADS.num_kv_heads,
                        head_dim=GPU_HEADS.head_dim,
                        page_table=page_table,
                        **given,
                        **scores,
                    )
                )
    return list(dict.fromkeys(found))
