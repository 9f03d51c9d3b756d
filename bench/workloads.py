"""Workloads: the shapes, the bytes they must move, and inputs with pages in random order.

A `Case` is plain numbers and needs no device. `make_batch` turns it into tensors: one pool of pages
per copy, where a copy stands for one layer, so that runs over the copies in turn find a cold cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from jitattn.spec.dtype import BlockFormat, DType
from jitattn.tensors.quantization import bytes_of_scales, quantize_kv

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_PAGES_AT_ONCE = 4096  # that are quantised, since that takes several floats an element


class PlannerArguments(TypedDict):
    """What a planner is given for a case, besides the device."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    kv_layout: str
    page_table: str
    window_left: int
    use_sinks: bool
    batch_invariant: bool
    early_kv: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """One decode batch: ``q_len`` query tokens for each request, the last tokens it has."""

    name: str
    seq_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    kv_layout: str = "NHD"
    window_left: int = -1
    use_sinks: bool = False
    q_len: int = 1
    group: str = "figures"  # of `bench.cases.GROUPS`

    @property
    def batch_size(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens)

    @property
    def group_size(self) -> int:
        """Query heads per K/V head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def pages_per_seq(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-length // self.page_size) for length in self.seq_lens)

    @property
    def seen_per_seq(self) -> tuple[int, ...]:
        """Tokens of each request that a query token sees."""
        if self.window_left < 0:
            return self.seq_lens
        return tuple(min(length, self.window_left + self.q_len) for length in self.seq_lens)

    @property
    def dead_pages_per_seq(self) -> tuple[int, ...]:
        """Pages of each request that lie wholly before its window."""
        pairs = zip(self.seq_lens, self.seen_per_seq, strict=True)
        return tuple((length - seen) // self.page_size for length, seen in pairs)

    @property
    def num_pages(self) -> int:
        """Pages of a pool: the live ones, and one that stands for all dead ones."""
        dead = self.dead_pages_per_seq
        return sum(self.pages_per_seq) - sum(dead) + int(any(dead))

    @property
    def blocks(self) -> BlockFormat | None:
        """The blocks of a cache of four bits."""
        return DType(self.kv_dtype).blocks

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        if self.blocks is not None:  # two elements a byte, and the scales of blocks
            row = self.head_dim // 2 + self.blocks.row_bytes(self.head_dim)
        else:
            row = self.head_dim * _ITEM_BYTES[self.kv_dtype]
        return 2 * self.num_kv_heads * row

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that must be read; page tails don't count."""
        return sum(self.seen_per_seq) * self.token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation must move: K, V and q read, out written."""
        rows = self.batch_size * self.q_len * self.num_qo_heads * self.head_dim
        return self.kv_bytes + 2 * rows * _ITEM_BYTES[self.q_dtype]

    def floor_s(self, bytes_per_s: float) -> float:
        """Return the seconds that the bytes alone take."""
        return self.num_bytes / bytes_per_s

    def planner_arguments(
        self, page_table: str, *, batch_invariant: bool = False, early_kv: bool = False
    ) -> PlannerArguments:
        """Return the arguments of `jitattn.AttentionPlanner` for this case."""
        return PlannerArguments(
            num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            page_size=self.page_size, q_dtype=self.q_dtype, kv_dtype=self.kv_dtype,
            kv_layout=self.kv_layout, page_table=page_table, window_left=self.window_left,
            use_sinks=self.use_sinks, batch_invariant=batch_invariant, early_kv=early_kv,
        )  # fmt: skip

    def tiny(self) -> Case:
        """Return the smallest batch that makes a contender compile what this case needs."""
        return dataclasses.replace(self, seq_lens=(max(2 * self.page_size, 2 * self.q_len),))


def num_copies(kv_bytes: int, cache_bytes: int, num_runs: int) -> int:
    """Return how many pools a graph of ``num_runs`` needs so that none is still in the L2 cache.

    Args:
        kv_bytes: what a run reads of a pool.
        cache_bytes: of the L2 cache.
        num_runs: runs of the graph.
    """
    wanted = -(-4 * cache_bytes // kv_bytes)
    return max(1, min(wanted, num_runs))


@dataclass(frozen=True)
class Batch:
    """The tensors of one case. The tables serve every copy; q and the pools differ.

    Attributes:
        q: [num_copies, batch_size * q_len, num_qo_heads, head_dim].
        kv: [num_copies, num_pages, 2, page_size, num_kv_heads, head_dim], kv_dtype; with "HND"
            heads come before the tokens of a page. Of four bits uint8 [.., head_dim / 2].
        block_table: [batch_size, max_pages_per_seq] int32; 0 past the last page. All pages wholly
            before a window are one page, as in an engine that has freed them.
        kv_indptr: [batch_size + 1] int32; offsets into kv_indices.
        kv_indices: int32, the pages of all requests, in a random order.
        last_page_len: [batch_size] int32.
        seq_lens: [batch_size] int32.
        qo_indptr: [batch_size + 1] int32; rows of q that start each request.
        sinks: [num_qo_heads] float32, exact in bfloat16, or None.
        block_scales: of four bits like kv, with last dimensions as in ``QuantizedKV``; else None.
    """

    case: Case
    q: Tensor
    kv: Tensor
    block_table: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    sinks: Tensor | None
    block_scales: Tensor | None = None

    @property
    def num_copies(self) -> int:
        """Pools, each with its own queries."""
        return self.q.shape[0]

    def csr(self) -> tuple[Tensor | int, ...]:
        """Return the first arguments of FlashInfer's plans: tables, heads, sizes."""
        case = self.case
        sizes = case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size
        return (self.kv_indptr, self.kv_indices, self.last_page_len, *sizes)

    def tokens_first(self, copy: int) -> tuple[Tensor, Tensor]:
        """Return K and V, each a view [num_pages, page_size, num_kv_heads, head_dim]."""
        return self._tokens_first(self.kv[copy])

    def scales_first(self, copy: int) -> tuple[Tensor, Tensor] | None:
        """Return likewise the scales of their blocks, as bytes; None where there are none."""
        if self.block_scales is None:
            return None
        return self._tokens_first(bytes_of_scales(self.block_scales[copy]))

    def _tokens_first(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        if self.case.kv_layout == "HND":
            pool = pool.transpose(2, 3)
        return pool[:, 0], pool[:, 1]

    def separate_table(self) -> Tensor:
        """Return [batch_size, 2, max_pages_per_seq]: the same pages for `separate_pool`."""
        return torch.stack((2 * self.block_table, 2 * self.block_table + 1), dim=1)

    def separate_pool(self, copy: int) -> Tensor:
        """Return [2 * num_pages, ...] with the dimensions of a page: K pages even, V pages odd."""
        return self.kv[copy].flatten(0, 1)


def make_batch(case: Case, copies: int, device: torch.device, *, seed: int = 0) -> Batch:
    """Fill pools and queries with normal random numbers and shuffle the pages.

    Args:
        case: the shapes.
        copies: pools to make.
        device: where the tensors live.
        seed: fixes every value and the order of the pages on one device type.
    """
    table = _block_table(case, seed)
    generator = torch.Generator(device=device).manual_seed(seed)

    def values(*shape: int) -> Tensor:
        kind = getattr(torch, case.q_dtype)
        return torch.randn(shape, generator=generator, dtype=kind, device=device)

    def pools(*shape: int) -> tuple[Tensor, Tensor | None]:
        if case.blocks is not None:
            return _block_pools(values, shape, case, device)
        return values(*shape).to(getattr(torch, case.kv_dtype)), None

    def ints(data: Iterable[int]) -> Tensor:
        return torch.tensor(list(data), dtype=torch.int32, device=device)

    page = (case.page_size, case.num_kv_heads)
    page = page[::-1] if case.kv_layout == "HND" else page
    q_shape = (copies, case.batch_size * case.q_len, case.num_qo_heads, case.head_dim)
    rows = zip(table, case.pages_per_seq, strict=True)
    q = values(*q_shape)
    kv, block_scales = pools(copies, case.num_pages, 2, *page, case.head_dim)
    return Batch(
        case=case,
        q=q,
        kv=kv,
        block_scales=block_scales,
        block_table=table.to(device),
        kv_indptr=ints([0, *itertools.accumulate(case.pages_per_seq)]),
        kv_indices=torch.cat([row[:num_pages] for row, num_pages in rows]).to(device),
        last_page_len=ints((length - 1) % case.page_size + 1 for length in case.seq_lens),
        seq_lens=ints(case.seq_lens),
        qo_indptr=ints(range(0, (case.batch_size + 1) * case.q_len, case.q_len)),
        sinks=_sinks(case, seed).to(device) if case.use_sinks else None,
    )


def _block_pools(
    values: Callable[..., Tensor], shape: tuple[int, ...], case: Case, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the numbers and the scales of pools of ``shape``, of ``values`` in the case's type."""
    assert case.blocks is not None
    kv = torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    of_row: tuple[int, ...] = (case.blocks.count(shape[-1]),)
    dtype = torch.float8_e4m3fn
    if case.blocks.has_zeros:
        of_row, dtype = (*of_row, 2), torch.float16
    scales = torch.empty((*shape[:-1], *of_row), dtype=dtype, device=device)
    of_pages = kv.flatten(0, 1), scales.flatten(0, 1)
    for start in range(0, len(of_pages[0]), _PAGES_AT_ONCE):
        some = [part[start : start + _PAGES_AT_ONCE] for part in of_pages]
        stored = quantize_kv(values(len(some[0]), *shape[2:]), case.kv_dtype)
        for part, of_part in zip(some, stored, strict=True):
            part.copy_(of_part)
    return kv, scales


def _block_table(case: Case, seed: int) -> Tensor:
    """Return [batch_size, max_pages_per_seq] int32: live pages in a random order."""
    order = torch.randperm(case.num_pages, generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(case.batch_size, max(case.pages_per_seq), dtype=torch.int32)
    start = 0
    for b, (pages, dead) in enumerate(
        zip(case.pages_per_seq, case.dead_pages_per_seq, strict=True)
    ):
        table[b, :dead] = order[-1]
        table[b, dead:pages] = order[start : start + pages - dead]
        start += pages - dead
    return table


def _sinks(case: Case, seed: int) -> Tensor:
    """Return sinks that weigh about as much as all keys, so that leaving them out is wrong.

    Scores are normal, so that the sum over n keys of their exponentials is about n * exp(1/2).
    """
    noise = torch.randn(case.num_qo_heads, generator=torch.Generator().manual_seed(seed))
    level = math.log(statistics.mean(case.seen_per_seq)) + 0.5
    return (level + 0.5 * noise).bfloat16().float()
