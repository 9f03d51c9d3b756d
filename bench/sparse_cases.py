"""The cases of attention over lists, their tensors, and the right answer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jitattn
from bench.mla_cases import LATENT_DIM, ROPE_DIM, SCALE_BLOCK, SM_SCALE, TOKEN_BYTES

MAX_ERROR = 0.03
"""Of a row, as a part of its largest number."""


@dataclass(frozen=True)
class Case:
    """A batch, and how many of the tokens behind each query are listed.

    Attributes:
        kind: "latent", "grouped" or "pages".
        num_heads: query heads.
        batch_size: query tokens, a request each unless ``num_requests`` says how many there are.
        num_kv_tokens: of a request.
        k: listed tokens of a query token, or pages of a KV head.
        form: of the cache: "bf16", or "rows" of 656 bytes.
    """

    kind: str
    num_heads: int
    form: str = "bf16"
    batch_size: int = 64
    num_requests: int | None = None
    num_kv_tokens: int = 131072
    k: int = 2048
    page_size: int = 64
    num_kv_heads: int = 8

    @property
    def name(self) -> str:
        rows = "" if self.form == "bf16" else f"-{self.form}"
        return f"{self.kind}-B{self.batch_size}-h{self.num_heads}{rows}-k{self.k}"

    @property
    def requests(self) -> int:
        return self.num_requests or self.batch_size

    @property
    def num_pages(self) -> int:
        return self.requests * self.num_kv_tokens // self.page_size

    @property
    def listed_tokens(self) -> int:
        """Of a query token and KV head."""
        return self.k * (self.page_size if self.kind == "pages" else 1)

    @property
    def num_bytes(self) -> int:
        """Of K and V, once for each query token."""
        row = TOKEN_BYTES["rows656"] if self.form == "rows" else 2 * (LATENT_DIM + ROPE_DIM)
        if self.kind != "latent":
            row = 2 * 2 * 128 * self.num_kv_heads
        return self.batch_size * self.listed_tokens * row

    @property
    def num_flops(self) -> int:
        width = 2 * LATENT_DIM + ROPE_DIM if self.kind == "latent" else 2 * 128
        return 2 * self.batch_size * self.num_heads * self.listed_tokens * width

    def arguments(self, *, dense: bool) -> dict[str, Any]:
        """What its planner is given."""
        table = "shared" if dense else "page_lists" if self.kind == "pages" else "indices"
        if self.kind == "latent":
            kv_dtype = "float8_e4m3fn" if self.form == "rows" else "bfloat16"
            return {
                **{"num_heads": self.num_heads, "page_size": self.page_size},
                **{"sm_scale": SM_SCALE, "kv_dtype": kv_dtype, "page_table": table},
            }
        return {
            **{"num_qo_heads": self.num_heads, "num_kv_heads": self.num_kv_heads},
            **{"head_dim": 128, "page_size": self.page_size, "page_table": table},
        }

    def planner(self, device: torch.device, *, dense: bool) -> Any:
        kind = jitattn.MLAPlanner if self.kind == "latent" else jitattn.AttentionPlanner
        return kind(**self.arguments(dense=dense), device=device)

    def tiny(self) -> Case:
        """Return the same for a CPU."""
        small = {"batch_size": 3, "num_kv_tokens": 8 * self.page_size, "num_heads": 8}
        k = 3 if self.kind == "pages" else 70
        return dataclasses.replace(self, k=k, num_requests=None, **small)


CASES = (
    *(Case("latent", heads) for heads in (8, 16, 64, 128)),
    *(Case("latent", heads, form="rows") for heads in (16, 64, 128)),
    Case("latent", 128, batch_size=4096, num_requests=16),
    Case("grouped", 32),
    Case("pages", 32, k=16, page_size=128),
)


@dataclass
class Batch:
    """Tensors of a case: lists for each run, and block tables of as many contiguous tokens."""

    case: Case
    queries: tuple[Tensor, ...]
    kv: Tensor
    lists: list[Any]
    tables: list[jitattn.BlockTable]
    seq_lens: Tensor

    def new_outs(self, num_heads: int | None = None) -> Tensor:
        """Return memory for the outputs of every copy, [num_copies, batch_size, num_heads, ..]."""
        _, heads, width = self.queries[0].shape
        shape = len(self.lists), self.case.batch_size, num_heads or heads, width
        return self.queries[0].new_empty(shape)


def make_batch(case: Case, copies: int, device: torch.device) -> Batch:
    """Return random tensors with ``copies`` of lists and tables."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    n, heads = case.batch_size, case.num_heads
    if case.kind == "latent":
        queries: tuple[Tensor, ...] = normal(n, heads, LATENT_DIM), normal(n, heads, ROPE_DIM)
    else:
        queries = (normal(n, heads, 128),)
    order = torch.randperm(case.num_pages, generator=generator, device=device).int()
    pages = order.view(case.requests, -1)
    owners = torch.arange(n, device=device) * case.requests // n
    listed = [_lists(case, pages, owners, generator) for _ in range(copies)]
    width = case.listed_tokens // case.page_size if case.listed_tokens >= case.page_size else 1
    width += case.listed_tokens % case.page_size > 0
    most = max(case.num_pages // width - 1, 1)
    firsts = torch.randint(most, (copies, n), generator=generator, device=device) * width
    columns = torch.arange(width, device=device)
    tables = [jitattn.BlockTable((first[:, None] + columns).int()) for first in firsts]
    seq_lens = torch.full((n,), case.num_kv_tokens, dtype=torch.int32, device=device)
    return Batch(case, queries, _cache(case, device, generator), listed, tables, seq_lens)


def _cache(case: Case, device: torch.device, generator: torch.Generator) -> Tensor:
    if case.kind != "latent":
        shape = (case.num_pages, 2, case.page_size, case.num_kv_heads, 128)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return cache.normal_(generator=generator)
    if case.form == "bf16":
        shape = (case.num_pages, case.page_size, LATENT_DIM + ROPE_DIM)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return cache.normal_(generator=generator)
    shape = (case.num_pages, case.page_size, TOKEN_BYTES["rows656"])
    # Any byte but those of infinities and NaN in e4m3; scales and rope parts are written over.
    rows = torch.randint(0, 120, shape, dtype=torch.uint8, device=device, generator=generator)
    rows[..., LATENT_DIM : LATENT_DIM + 16].view(torch.float32).fill_(2.0**-7)
    rows[..., LATENT_DIM + 16 :].view(torch.bfloat16).normal_(generator=generator)
    return rows


def _lists(case: Case, pages: Tensor, owners: Tensor, generator: torch.Generator) -> Any:
    """Lists of random tokens or pages of each request, in the order of their positions."""
    device, n = pages.device, case.batch_size
    if case.kind == "pages":
        shape = n, case.num_kv_heads, pages.shape[1]
        scores = torch.rand(shape, generator=generator, device=device)
        numbers = scores.topk(case.k, dim=-1).indices.sort(dim=-1).values
        ids = pages[owners][:, None].expand(shape).gather(-1, numbers)
        return jitattn.PageLists(ids.contiguous(), numbers.int())
    slots = torch.empty(n, case.k, dtype=torch.int32, device=device)
    for begin in range(0, n, 64):  # a block at a time, since scores of all would not fit
        block = owners[begin : begin + 64]
        scores = torch.rand(len(block), case.num_kv_tokens, generator=generator, device=device)
        tokens = scores.topk(case.k, dim=-1).indices.sort(dim=-1).values
        ids = pages[block].gather(1, tokens // case.page_size)
        slots[begin : begin + 64] = ids * case.page_size + tokens % case.page_size
    return jitattn.IndexLists(slots)


class SparseOracle:
    """Expected outputs of a few rows, over lists or, ``dense``, over contiguous tokens."""

    limit = MAX_ERROR

    def __init__(self, batch: Batch, *, dense: bool = False) -> None:
        """Remember the batch; nothing is computed yet."""
        self.batch = batch
        self.dense = dense

    def error(self, outs: Tensor) -> float:
        """Return the largest error in the first and the last copy.

        Args:
            outs: [num_copies, batch_size, num_heads, head_dim]; what was never written should hold
                NaN, which makes the error infinite.
        """
        copies = {0, outs.shape[0] - 1}
        return max(error_of(self.batch, outs[i], dense=self.dense, copy=i) for i in copies)


def error_of(batch: Batch, out: Tensor, *, dense: bool, copy: int) -> float:
    """Return the largest error of a few rows, as a part of the largest number of each."""
    worst = 0.0
    for row in {0, batch.case.batch_size - 1}:
        want = _definition(batch, row, dense=dense, copy=copy)
        error = float((out[row].double() - want).abs().amax() / want.abs().amax())
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _definition(batch: Batch, row: int, *, dense: bool, copy: int) -> Tensor:
    case, size = batch.case, batch.case.page_size
    group = case.num_heads // (1 if case.kind == "latent" else case.num_kv_heads)
    parts = []
    for h in range(case.num_heads // group):
        if dense:
            pages = batch.tables[copy].table[row].long()
            slots = (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
            slots = slots[: case.listed_tokens]
        elif case.kind == "pages":
            pages = batch.lists[copy].pages[row, h].long()
            slots = (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
        else:
            slots = batch.lists[copy].slots[row].long()
        keys, values = _values(batch, slots, h)
        q = torch.cat([q[row, h * group : (h + 1) * group].double() for q in batch.queries], dim=-1)
        scale = SM_SCALE if case.kind == "latent" else 128**-0.5
        parts.append(torch.softmax(q @ keys.T * scale, dim=-1) @ values)
    return torch.cat(parts)


def _values(batch: Batch, slots: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
    case, size = batch.case, batch.case.page_size
    if case.kind != "latent":
        both = batch.kv[slots // size, :, slots % size, kv_head].double()
        return both[:, 0], both[:, 1]
    rows = batch.kv[slots // size, slots % size]
    if case.form == "bf16":
        return rows.double(), rows[:, :LATENT_DIM].double()
    codes = rows[:, :LATENT_DIM].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, LATENT_DIM : LATENT_DIM + 16].contiguous().view(torch.float32).double()
    latent = codes * scales.repeat_interleave(SCALE_BLOCK, dim=1)
    rope = rows[:, LATENT_DIM + 16 :].contiguous().view(torch.bfloat16).double()
    return torch.cat((latent, rope), dim=1), latent
