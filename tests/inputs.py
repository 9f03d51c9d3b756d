"""Tensors for a case, in memory that is poisoned wherever the kernel has no business.

* Every K/V slot that no request owns is NaN: dead pages, page tails, other layers, gaps between
  strides, and with a window the tokens that have left it.
* Table entries past a request's last page, and with a window those wholly before its first
  visible key, are -1, 2**31 - 1, ids past the pool or ids of pages full of NaN.
* Pages are dealt in random order; out and lse start as NaN; memory around a strided out carries a
  canary.

The dense tokens from which the cache was filled are kept, so the reference reads neither tables
nor strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases import Case

Pair = tuple[Tensor, Tensor]
Tokens = tuple[Tensor, Tensor, Tensor]  # q [B, Hq, D], k and v [total, Hkv, D]
CANARY = -1234.0
DEAD_PAGES = 3


@dataclass(frozen=True)
class Pool:
    """The shape of a cache, and how to allocate memory for it."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nhd(self) -> tuple[int, int, int, int]:
        return self.num_pages, self.page_size, self.num_kv_heads, self.head_dim

    def nan(self, *shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=self.dtype, device=self.device)

    def strided(self, strides: tuple[int, int, int], offset: int) -> Tensor:
        """NHD dimensions with the strides (page, token, head) and a base off by ``offset``."""
        extents = zip(self.nhd[:3], strides, strict=True)
        numel = offset + sum((size - 1) * stride for size, stride in extents) + self.head_dim
        return self.nan(numel).as_strided(self.nhd, (*strides, 1), offset)


def _one_nhd(p: Pool) -> Tensor:
    return p.nan(p.num_pages, 2, p.page_size, p.num_kv_heads, p.head_dim)


def _one_hnd(p: Pool) -> Tensor:
    return p.nan(p.num_pages, 2, p.num_kv_heads, p.page_size, p.head_dim).transpose(2, 3)


def _cross_layer(p: Pool) -> Tensor:
    return p.nan(p.num_pages, 3, 2, p.page_size, p.num_kv_heads, p.head_dim)[:, 1]


def _pair_nhd(p: Pool) -> Pair:
    return p.nan(*p.nhd), p.nan(*p.nhd)


def _pair_hnd(p: Pool) -> Pair:
    shape = (p.num_pages, p.num_kv_heads, p.page_size, p.head_dim)
    return p.nan(*shape).transpose(1, 2), p.nan(*shape).transpose(1, 2)


def _interleaved(p: Pool) -> Pair:
    pool = _one_nhd(p)
    return pool[:, 0], pool[:, 1]


def _layer_inside(p: Pool) -> Pair:
    pool = p.nan(p.num_pages, p.page_size, 3, 2, p.num_kv_heads, p.head_dim)
    return pool[:, :, 1, 0], pool[:, :, 1, 1]


def _packed(p: Pool) -> Pair:
    pool = p.nan(p.num_pages, p.page_size, p.num_kv_heads, 2 * p.head_dim)
    return pool[..., : p.head_dim], pool[..., p.head_dim :]


def _heads_outside(p: Pool) -> Pair:
    pool = p.nan(2, p.num_kv_heads, p.num_pages, p.page_size, p.head_dim)
    return pool[0].permute(1, 2, 0, 3), pool[1].permute(1, 2, 0, 3)


def _tokens_outside(p: Pool) -> Pair:
    pool = p.nan(2, p.page_size, p.num_pages, p.num_kv_heads, p.head_dim)
    return pool[0].transpose(0, 1), pool[1].transpose(0, 1)


def _unequal(p: Pool) -> Pair:
    k = p.nan(p.num_pages, 2, p.page_size, p.num_kv_heads, p.head_dim)[:, 1]
    v = p.nan(p.num_pages, 3, p.num_kv_heads, p.page_size, p.head_dim)[:, 2].transpose(1, 2)
    return k, v


def _padded(p: Pool) -> Pair:
    head = p.head_dim + 8
    token = p.num_kv_heads * head + 16
    strides = (p.page_size * token + 8, token, head)
    return p.strided(strides, 8), p.strided(strides, 0)


def _odd_base(p: Pool) -> Pair:
    strides = (p.page_size * p.num_kv_heads * p.head_dim, p.num_kv_heads * p.head_dim, p.head_dim)
    return p.strided(strides, 1), p.strided(strides, 3)


def _odd_strides(p: Pool) -> Pair:
    head = p.head_dim + 3
    token = p.num_kv_heads * head + 2
    strides = (p.page_size * token + 1, token, head)
    return p.strided(strides, 0), p.strided(strides, 5)


def _odd_values(p: Pool) -> Pair:
    # K could be read in vectors; V alone can't.
    return p.nan(*p.nhd), _odd_strides(p)[1]


def _twice(p: Pool) -> Pair:
    pool = p.nan(2 * p.num_pages, p.page_size, p.num_kv_heads, p.head_dim)
    return pool, pool


CACHES: dict[str, Callable[[Pool], Tensor | Pair]] = {
    "one_nhd": _one_nhd,
    "one_hnd": _one_hnd,
    "pair_nhd": _pair_nhd,
    "pair_hnd": _pair_hnd,
    "interleaved": _interleaved,
    "layer_inside": _layer_inside,
    "cross_layer": _cross_layer,
    "packed": _packed,
    "heads_outside": _heads_outside,
    "tokens_outside": _tokens_outside,
    "unequal": _unequal,
    "padded": _padded,
    "odd_base": _odd_base,
    "odd_strides": _odd_strides,
    "odd_values": _odd_values,
    "size_1": _pair_nhd,
    "twice": _twice,
}
"""Builders of NaN caches: one 5-D tensor or a (k, v) pair, dimensions named NHD."""


def name_cache(cache: Tensor | Pair, case: Case) -> Tensor | Pair:
    """The cache as the planner is given it: NHD dimensions renamed to the case's kv_layout."""
    swap = case.kv_layout == "HND"
    if isinstance(cache, Tensor):
        return cache.transpose(2, 3) if swap else cache
    if case.cache == "size_1":
        cache = with_head_stride(cache[0], 3), with_head_stride(cache[1], 2**40)
    return (cache[0].transpose(1, 2), cache[1].transpose(1, 2)) if swap else cache


def with_head_stride(cache: Tensor, stride: int) -> Tensor:
    """The same memory with another, meaningless stride of its only head."""
    assert cache.shape[2] == 1
    page, token, _, dim = cache.stride()
    return cache.as_strided(cache.shape, (page, token, stride, dim), cache.storage_offset())


def row_view(view: str, num_tokens: int, num_heads: int, head_dim: int, like: Tensor) -> Tensor:
    """An uninitialised [num_tokens, num_heads, head_dim] tensor in one of `ROW_VIEWS`."""
    if view == "contiguous":
        return like.new_empty((num_tokens, num_heads, head_dim))
    if view == "qkv":  # the query part of a fused projection
        fused = like.new_empty((num_tokens, (num_heads + 4) * head_dim))
        return fused[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    if view == "padded":
        return like.new_empty((num_tokens, num_heads, head_dim + 8))[..., :head_dim]
    if view == "odd":  # 2-byte alignment
        return like.new_empty((num_tokens, num_heads, head_dim + 3))[..., 1 : head_dim + 1]
    if view == "heads_outside":
        return like.new_empty((num_heads, num_tokens, head_dim)).transpose(0, 1)
    raise ValueError(view)


ROW_VIEWS = ("contiguous", "qkv", "padded", "odd", "heads_outside")


@dataclass
class Inputs:
    """Everything a call takes, and the dense tokens for the reference."""

    case: Case
    q: Tensor
    k: Tensor  # dense, [total, Hkv, D]
    v: Tensor
    kv_indptr: list[int]
    cache: Tensor | Pair
    table: Tensor
    rows: Tensor | None
    seq_lens: Tensor
    sinks: Tensor | None
    garbage: Tensor  # bool, like table: entries that must not be read
    dead_page: int  # the id of a page full of NaN

    @property
    def device(self) -> torch.device:
        return self.q.device

    def new_out(self) -> Tensor:
        """An out of NaN whose surroundings carry the canary."""
        case, dtype = self.case, getattr(torch, self.case.out_dtype or self.case.dtype)
        like = torch.empty(0, dtype=dtype, device=self.device)
        shape = (self.q.shape[0], case.num_qo_heads, case.head_dim)
        out = row_view(case.out_view, *shape, like)
        surroundings(out).fill_(CANARY)
        return out.fill_(math.nan)

    def new_lse(self) -> Tensor:
        shape = (self.q.shape[0], self.case.num_qo_heads)
        return torch.full(shape, math.nan, dtype=torch.float32, device=self.device)


def surroundings(view: Tensor) -> Tensor:
    """The whole storage under a view, as one flat tensor."""
    numel = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((numel,), (1,), 0)


def generator(case: Case, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(1000 + case.seed)


def random_tokens(case: Case, device: torch.device | str) -> Tokens:
    """Dense q, k, v in the case's dtype; scores with a spread of about 2, so that keys differ."""
    rng, dtype = generator(case, device), getattr(torch, case.dtype)
    total = sum(max(0, length) for length in case.lengths)

    def normal(rows: int, heads: int, std: float) -> Tensor:
        shape = (rows, heads, case.head_dim)
        return (std * torch.randn(shape, generator=rng, device=device)).to(dtype)

    q_std = 2.0 / (case.scale * math.sqrt(case.head_dim))
    return (
        normal(len(case.lengths), case.num_qo_heads, min(q_std, 8.0)),
        normal(total, case.num_kv_heads, 1.0),
        normal(total, case.num_kv_heads, 1.0),
    )


def uniform_probe(case: Case, device: torch.device | str) -> Tokens:
    """Take q = 0: out is the mean of the visible V rows and exp(lse) counts the visible keys."""
    q, k, v = random_tokens(case, device)
    return torch.zeros_like(q), k, v


def address_probe(case: Case, device: torch.device | str, targets: list[int]) -> Tokens:
    """Scores that leave weight to one token a request: out must be its V row, bit for bit.

    ``targets[b]`` is a token of request b. Its score is at least 120 above every other one, so
    their weights are 0 in float32. V rows carry their own address in integers that every dtype
    holds exactly: the token's base-16 digits, its KV head and its page's column, then a hash.
    """
    q, k, v = (torch.zeros_like(x) for x in random_tokens(case, device))
    level = 2.0 ** math.ceil(math.log2(math.sqrt(120 / (case.scale * case.head_dim))))
    q.fill_(level)
    starts = _indptr(case)
    k[[start + target for start, target in zip(starts[:-1], targets, strict=True)]] = level
    request, position = _request_and_position(case, q.device)
    head = torch.arange(case.num_kv_heads, device=q.device)[None, :, None]
    column = torch.arange(case.head_dim, device=q.device)[None, None, :]
    token = position[:, None, None]
    address = (token * 7 + column * 5 + head * 3 + request[:, None, None]) % 16
    digits = (token, token // 16, token // 256, head, token // case.page_size)
    for i, digit in enumerate(digits):
        address[..., i] = (digit % 16).expand(*address.shape[:2], 1)[..., 0]
    v.copy_(address)
    return q, k, v


def make_inputs(case: Case, device: torch.device | str, tokens: Tokens | None = None) -> Inputs:
    """Scatter tokens (default: `random_tokens`) into a poisoned cache."""
    device = torch.device(device)
    dense_q, k, v = random_tokens(case, device) if tokens is None else tokens
    rng = generator(case, device)
    lengths = torch.tensor([max(0, length) for length in case.lengths], device=device)
    num_pages = -(-lengths // case.page_size)
    total_pages = int(num_pages.sum())
    pool = Pool(
        num_pages=total_pages + DEAD_PAGES,
        page_size=case.page_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=dense_q.dtype,
        device=device,
    )
    k_ids, v_ids = _deal_pages(case, pool, rng)
    cache = CACHES[case.cache](pool)
    k_cache, v_cache = (cache[:, 0], cache[:, 1]) if isinstance(cache, Tensor) else cache
    _scatter(case, k, k_cache, k_ids, num_pages)
    _scatter(case, v, v_cache, v_ids, num_pages)

    q = row_view(case.q_view, *dense_q.shape, dense_q)
    surroundings(q).fill_(math.nan)
    q.copy_(dense_q)
    tables = [
        _table(case, ids, num_pages, k_cache.shape[0], rng)
        for ids in ((k_ids, v_ids) if case.page_table == "separate" else (k_ids,))
    ]
    table, rows = _place_rows(case, tables, rng)
    return Inputs(
        case=case,
        q=q,
        k=k,
        v=v,
        kv_indptr=_indptr(case),
        cache=name_cache(cache, case),
        table=table,
        rows=rows,
        seq_lens=torch.tensor(case.lengths, device=device).to(getattr(torch, case.lengths_dtype)),
        sinks=_sinks(case, rng),
        garbage=_garbage(case, table, rows, num_pages),
        dead_page=int(k_ids[-1]),
    )


def _indptr(case: Case) -> list[int]:
    starts = [0]
    for length in case.lengths:
        starts.append(starts[-1] + max(0, length))
    return starts


def _request_and_position(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Request and position of every dense token."""
    starts = torch.tensor(_indptr(case), device=device)
    request = torch.repeat_interleave(
        torch.arange(len(case.lengths), device=device), starts.diff(), output_size=int(starts[-1])
    )
    return request, torch.arange(request.shape[0], device=device) - starts[request]


def first_visible(case: Case, device: torch.device) -> Tensor:
    """The first key that each request's one query can see, [batch_size]."""
    lengths = torch.tensor([max(0, length) for length in case.lengths], device=device)
    if case.window_left < 0:
        return torch.zeros_like(lengths)
    return (lengths - 1 - case.window_left).clamp(min=0)


def _deal_pages(case: Case, pool: Pool, rng: torch.Generator) -> Pair:
    """Page ids in random order for K and V; the last ones are live in neither."""

    def shuffled(num_ids: int) -> Tensor:
        return torch.randperm(num_ids, generator=rng, device=pool.device)

    k_ids = shuffled(pool.num_pages)
    if case.cache == "twice":
        return 2 * k_ids, 2 * k_ids + 1
    if case.page_table == "shared":
        return k_ids, k_ids
    num_live = pool.num_pages - DEAD_PAGES
    return k_ids, torch.cat((k_ids[shuffled(num_live)], k_ids[num_live:]))


def _scatter(case: Case, tokens: Tensor, cache: Tensor, ids: Tensor, num_pages: Tensor) -> None:
    """Write the tokens that some query sees; the others stay NaN."""
    request, position = _request_and_position(case, tokens.device)
    first_page = num_pages.cumsum(0) - num_pages
    page = ids[first_page[request] + position // case.page_size]
    live = position >= first_visible(case, tokens.device)[request]
    cache[page[live], position[live] % case.page_size] = tokens[live]


def _table(
    case: Case, ids: Tensor, num_pages: Tensor, pool_pages: int, rng: torch.Generator
) -> Tensor:
    """One [batch_size, width] table with garbage wherever nothing may be read."""
    width = max(1, int(num_pages.max())) + 3
    column = torch.arange(width, device=ids.device)[None, :]
    first_page = num_pages.cumsum(0) - num_pages
    live = (first_page[:, None] + column).clamp(max=ids.shape[0] - 1)
    dead = int(ids[-1])
    junk = torch.tensor(
        [-1, 2**31 - 1, pool_pages, pool_pages + 7, -(2**31), dead, dead], device=ids.device
    )
    picks = torch.randint(0, len(junk), live.shape, generator=rng, device=ids.device)
    wanted = _wanted(case, num_pages, width)
    return torch.where(wanted, ids[live], junk[picks])


def _wanted(case: Case, num_pages: Tensor, width: int) -> Tensor:
    """Which entries [batch_size, width] hold a key that the request's query sees."""
    column = torch.arange(width, device=num_pages.device)[None, :]
    first = first_visible(case, num_pages.device) // case.page_size
    return (column >= first[:, None]) & (column < num_pages[:, None])


def _place_rows(
    case: Case, tables: list[Tensor], rng: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Cut the tables out of a larger int32 tensor, and with ``rows`` shuffle their rows."""
    batch_size, width = tables[0].shape
    device = tables[0].device
    rows = None
    num_rows = batch_size
    index = torch.arange(batch_size, device=device)
    if case.rows is not None:
        num_rows = batch_size + 3
        index = torch.randperm(num_rows, generator=rng, device=device)[:batch_size]
        rows = index.to(getattr(torch, case.rows))
    large = torch.full(
        (num_rows, len(tables) + 1, width + 5), 2**31 - 1, dtype=torch.int32, device=device
    )
    for i, table in enumerate(tables):
        large[index, i, 2 : 2 + width] = table.int()
    if case.page_table == "separate":
        return large[:, :2, 2 : 2 + width], rows
    return large[:, 0, 2 : 2 + width], rows


def _garbage(case: Case, table: Tensor, rows: Tensor | None, num_pages: Tensor) -> Tensor:
    wanted = _wanted(case, num_pages, table.shape[-1])
    garbage = torch.ones_like(table, dtype=torch.bool)
    index = torch.arange(len(case.lengths), device=table.device) if rows is None else rows.long()
    garbage[index] = ~wanted[:, None, :] if table.dim() == 3 else ~wanted
    return garbage


def _sinks(case: Case, rng: torch.Generator) -> Tensor | None:
    if case.sinks is None:
        return None
    name, _, column = case.sinks.partition("-")
    shape = (case.num_qo_heads, 3 if column else 1)
    values = 3.0 * torch.randn(shape, generator=rng, device=rng.device)
    matrix = values.to(getattr(torch, name))
    return matrix[:, 1] if column else matrix[:, 0].contiguous()
