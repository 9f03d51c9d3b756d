"""Named workloads: the shapes, the bytes they must move, and inputs with pages in random order.

A `Case` is plain numbers and needs no device. `make_batch` turns it into tensors: one pool of pages
per copy, where a copy stands for one layer, so that runs over the copies in turn find a cold cache.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class PlannerArguments(TypedDict):
    """What a planner is given for a case, besides the device."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    page_table: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One decode batch: a query token for each request."""

    name: str
    seq_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    group: str = "figures"  # what `select` knows it by, besides its name

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
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that must be read; page tails don't count."""
        per_token = 2 * self.num_kv_heads * self.head_dim * _ITEM_BYTES[self.kv_dtype]
        return sum(self.seq_lens) * per_token

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation must move: K, V and q read, out written."""
        rows = self.batch_size * self.num_qo_heads * self.head_dim
        return self.kv_bytes + 2 * rows * _ITEM_BYTES[self.q_dtype]

    def floor_s(self, bytes_per_s: float) -> float:
        """Return the seconds that the bytes alone take."""
        return self.num_bytes / bytes_per_s

    def planner_arguments(self, page_table: str) -> PlannerArguments:
        """Return the arguments of `jitattn.AttentionPlanner` for this case."""
        return PlannerArguments(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            page_table=page_table,
        )

    def tiny(self) -> Case:
        """Return the smallest batch that makes a contender compile what this case needs."""
        return dataclasses.replace(self, seq_lens=(2 * self.page_size,))


def ragged_lens(
    batch_size: int, *, low: int = 128, high: int = 16384, seed: int = 0
) -> tuple[int, ...]:
    """Return lengths that are log-uniform between ``low`` and ``high``; a seed fixes them."""
    rng = random.Random(seed)
    low_log2, high_log2 = math.log2(low), math.log2(high)
    return tuple(int(2 ** rng.uniform(low_log2, high_log2)) for _ in range(batch_size))


def _case(batch: str, heads: str, head_dim: int, page_size: int, **other: str) -> Case:
    """Read "B64x2k" or "B64ragged" and "32/8"; the name repeats every number."""
    num_qo_heads, num_kv_heads = (int(part) for part in heads.split("/"))
    count, _, length = batch.removeprefix("B").partition("x")
    if length:
        seq_lens = (int(length.removesuffix("k")) * 1024,) * int(count)
    else:
        seq_lens = ragged_lens(int(count.removesuffix("ragged")))
    name = f"{batch}-h{num_qo_heads}_{num_kv_heads}-d{head_dim}-p{page_size}"
    if "kv_dtype" in other:
        name += f"-{other['kv_dtype'].removeprefix('float8_')}"
    return Case(
        name=name,
        seq_lens=seq_lens,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        **other,
    )


# The rows that decide; "figures" names the 16-bit ones, "fp8" those with an 8-bit cache.
CASES = (
    _case("B1x8k", "32/8", 128, 16),
    _case("B1x128k", "32/8", 128, 16),
    _case("B16x2k", "32/8", 128, 16),
    _case("B64x2k", "32/8", 128, 16),
    _case("B64x8k", "32/8", 128, 16),
    _case("B256x1k", "32/8", 128, 16),
    _case("B64ragged", "32/8", 128, 16),
    _case("B64ragged", "32/8", 128, 64),
    _case("B64x4k", "8/1", 128, 16),
    _case("B32x4k", "32/32", 128, 16),
    _case("B64x4k", "64/8", 64, 16),
    _case("B64x4k", "16/8", 256, 16),
    _case("B64x8k", "32/8", 128, 16, kv_dtype="float8_e4m3fn", group="fp8"),
    # Small batches, other groups and page sizes.
    _case("B1x1k", "32/8", 128, 16, group="more"),
    _case("B8x4k", "32/8", 128, 16, group="more"),
    _case("B128x2k", "8/1", 128, 16, group="more"),
    _case("B16x4k", "32/4", 128, 16, group="more"),
    _case("B32x32k", "64/8", 64, 16, group="more"),
    *(_case("B64x2k", "32/8", 128, page_size, group="more") for page_size in (1, 8, 32, 64, 128)),
)


def select(patterns: str, cases: Iterable[Case] = CASES) -> list[Case]:
    """Return the cases that a comma-separated list of groups and name patterns picks, in order.

    Raises:
        ValueError: a pattern picks nothing.
    """
    cases = list(cases)
    picked: set[str] = set()
    for pattern in patterns.split(","):
        names = {
            case.name
            for case in cases
            if case.group == pattern or fnmatch.fnmatchcase(case.name, pattern)
        }
        if not names:
            known = ", ".join(case.name for case in cases)
            raise ValueError(f"no case matches {pattern!r}; groups: figures, fp8, more; {known}")
        picked |= names
    return [case for case in cases if case.name in picked]


def num_copies(case: Case, cache_bytes: int, num_runs: int) -> int:
    """Return how many pools a graph of ``num_runs`` needs so that none is still in the L2 cache."""
    wanted = -(-4 * cache_bytes // case.kv_bytes)
    return max(1, min(wanted, num_runs))


@dataclass(frozen=True)
class Batch:
    """The tensors of one case. The tables serve every copy; q and the pools differ.

    Attributes:
        q: [num_copies, batch_size, num_qo_heads, head_dim].
        kv: [num_copies, num_pages, 2, page_size, num_kv_heads, head_dim], kv_dtype.
        block_table: [batch_size, max_pages_per_seq] int32; 0 past the last page.
        kv_indptr: [batch_size + 1] int32; offsets into kv_indices.
        kv_indices: [num_pages] int32, a random order of all pages.
        last_page_len: [batch_size] int32.
        seq_lens: [batch_size] int32.
    """

    case: Case
    q: Tensor
    kv: Tensor
    block_table: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    seq_lens: Tensor

    @property
    def num_copies(self) -> int:
        """Pools, each with its own queries."""
        return self.q.shape[0]

    def separate_table(self) -> Tensor:
        """Return [batch_size, 2, max_pages_per_seq]: the same pages for `separate_pool`."""
        return torch.stack((2 * self.block_table, 2 * self.block_table + 1), dim=1)

    def separate_pool(self, copy: int) -> Tensor:
        """Return [2 * num_pages, page_size, num_kv_heads, head_dim]: K pages even, V pages odd."""
        return self.kv[copy].flatten(0, 1)


def make_batch(case: Case, copies: int, device: torch.device, *, seed: int = 0) -> Batch:
    """Fill pools and queries with normal random numbers and shuffle the pages.

    Args:
        case: the shapes.
        copies: pools to make.
        device: where the tensors live.
        seed: fixes every value and the order of the pages on one device type.
    """
    pages = case.pages_per_seq
    num_pages = sum(pages)
    starts = [0, *itertools.accumulate(pages)]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(case.batch_size, max(pages), dtype=torch.int32)
    for b, (start, stop) in enumerate(itertools.pairwise(starts)):
        table[b, : stop - start] = order[start:stop]
    generator = torch.Generator(device=device).manual_seed(seed)

    def values(*shape: int, dtype: str) -> Tensor:
        kind = getattr(torch, case.q_dtype)
        data = torch.randn(shape, generator=generator, dtype=kind, device=device)
        return data.to(getattr(torch, dtype))

    def ints(data: Iterable[int]) -> Tensor:
        return torch.tensor(list(data), dtype=torch.int32, device=device)

    token = (case.num_kv_heads, case.head_dim)
    q_shape = (copies, case.batch_size, case.num_qo_heads, case.head_dim)
    return Batch(
        case=case,
        q=values(*q_shape, dtype=case.q_dtype),
        kv=values(copies, num_pages, 2, case.page_size, *token, dtype=case.kv_dtype),
        block_table=table.to(device),
        kv_indptr=ints(starts),
        kv_indices=order.to(device, torch.int32),
        last_page_len=ints((length - 1) % case.page_size + 1 for length in case.seq_lens),
        seq_lens=ints(case.seq_lens),
    )
