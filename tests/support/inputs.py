"""Tensors for a case, in memory that is poisoned wherever the kernel has no business.

* Every K/V slot that no request owns is NaN: dead pages, page tails, other layers, gaps between
  strides, and with a window the tokens that have left it.
* Table entries past a request's last page, and with a window those wholly before its first
  visible key, are -1, 2**31 - 1, ids past the pool or ids of pages full of NaN.
* Pages are dealt in random order, and a token table's tokens one by one; requests of CSR pages and
  of ragged K and V have room to spare between them.
* Rows of q past the last request are NaN.
* out and lse start as NaN; memory around a strided out carries a canary.

The dense tokens from which the cache was filled are kept, as the values that a quantised cache
stands for, so the reference reads neither tables nor strides nor scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import jitattn
from jitattn.tensors.page_table_base import PageTable
from tests.support.blocks import head_dim_of, in_blocks, split_blocks, values_of_blocks
from tests.support.cases import Case
from tests.support.queries import MaskOf, make_mask, offsets_of
from tests.support.variant_values import Change, Params, changed, params_of

Pair = tuple[Tensor, Tensor]
Tokens = tuple[Tensor, Tensor, Tensor]
"""q [rows, Hq, D], and k [total, Hkv, D] and v [total, Hkv, Dv] as the cache stores them.

Of four bits uint8 [total, Hkv, D / 2 + bytes of scales]: the numbers, then the scales of the
blocks, see `tests.support.blocks`."""
Scale = float | Tensor | None
CANARY = -1234.0
DEAD_PAGES = 3


_POISON = {torch.int8: 127, torch.uint8: 255}
"""Of types without NaN: the largest number of int8, and two of NVFP4, -6 each, would be seen."""


def is_poison(cache: Tensor) -> Tensor:
    """Where a cache holds what no request wrote."""
    return torch.isnan(cache) if cache.dtype.is_floating_point else cache == _POISON[cache.dtype]


@dataclass(frozen=True)
class Pool:
    """The shape of a cache, and how to allocate memory for it."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def head_dim(self) -> int:
        """Room for either; `build_cache` cuts K and V to their own width."""
        return max(self.key_dim, self.value_dim)

    @property
    def nhd(self) -> tuple[int, int, int, int]:
        return self.num_pages, self.page_size, self.num_kv_heads, self.head_dim

    def nan(self, *shape: int) -> Tensor:
        poison = _POISON.get(self.dtype, math.nan)
        return torch.full(shape, poison, dtype=self.dtype, device=self.device)

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
    return p.nan(*p.nhd[:3], p.key_dim), p.nan(*p.nhd[:3], p.value_dim)


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
    pool = p.nan(p.num_pages, p.page_size, p.num_kv_heads, p.key_dim + p.value_dim)
    return pool[..., : p.key_dim], pool[..., p.key_dim :]


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


def _apart(p: Pool, between: tuple[int, int, int], k_at: int, v_at: int) -> Pair:
    """Elements ``between`` pages, tokens and heads, and where K and V begin in their memory."""
    head = p.head_dim + between[2]
    token = p.num_kv_heads * head + between[1]
    strides = (p.page_size * token + between[0], token, head)
    return p.strided(strides, k_at), p.strided(strides, v_at)


def _padded(p: Pool) -> Pair:
    return _apart(p, (8, 16, 8), 8, 0)


def _odd_base(p: Pool) -> Pair:
    return _apart(p, (0, 0, 0), 1, 3)


def _odd_strides(p: Pool) -> Pair:
    return _apart(p, (1, 2, 3), 0, 5)


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


def build_cache(case: Case, pool: Pool, name: str | None = None) -> Tensor | Pair:
    """The case's cache, NHD; a pair wherever one tensor can't hold K and V."""
    cache = CACHES[name or case.cache](pool)
    if isinstance(cache, Tensor):
        is_one = case.page_table != "ragged" and case.value_dim == case.head_dim
        if is_one and not case.blocks:
            return cache
        cache = cache[:, 0], cache[:, 1]
    return cache[0][..., : pool.key_dim], cache[1][..., : pool.value_dim]


def name_cache(cache: Tensor | Pair, case: Case, name: str | None = None) -> Tensor | Pair:
    """The cache as the planner is given it: NHD dimensions renamed to the case's kv_layout."""
    swap = case.kv_layout == "HND"
    if isinstance(cache, Tensor):
        return cache.transpose(2, 3) if swap else cache
    if (name or case.cache) == "size_1":
        cache = with_head_stride(cache[0], 3), with_head_stride(cache[1], 2**40)
    if case.page_table == "ragged":
        return cache[0][:, 0], cache[1][:, 0]
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


def given_table(kind: str, table: Tensor, indptr: Tensor | None, rows: Tensor | None) -> PageTable:
    """The table of a case as the planner is given it."""
    match kind:
        case "csr":
            return jitattn.CsrPages(indptr, table)
        case "token":
            return jitattn.TokenTable(table, rows=rows)
        case "ragged":
            return jitattn.RaggedKV(indptr)
    return jitattn.BlockTable(table, rows=rows)


@dataclass
class Inputs:
    """Everything a call takes, and the dense tokens for the reference."""

    case: Case
    q: Tensor
    k: Tensor  # dense, [total, Hkv, D]; float64 and scaled where the cache is quantised
    v: Tensor
    kv_indptr: list[int]  # of the dense tokens
    cache: Tensor | Pair
    table: Tensor  # page ids, slots, kv_indices, or nothing
    rows: Tensor | None
    indptr: Tensor | None  # kv_indptr of the layouts "csr" and "ragged"
    seq_lens: Tensor
    k_scale: Scale
    v_scale: Scale
    sinks: Tensor | None
    qo_indptr: Tensor | None
    mask: MaskOf | None
    garbage: Tensor  # bool, like table: entries that must not be read
    dead_page: int  # the id of a page full of NaN
    blocks: Pair | None = None  # the scales of K and V: float8_e4m3fn, or float16 with zeros

    @property
    def given(self) -> jitattn.QuantizedKV | Tensor | Pair:
        """The cache as the planner takes it."""
        if self.blocks is None:
            return self.cache
        k, v = self.blocks
        if k.dtype is torch.float16:
            k, v = (x.unflatten(-1, (-1, 2)) for x in (k, v))
        return jitattn.QuantizedKV(*self.cache, k, v)

    @property
    def poisoned(self) -> Tensor | Pair:
        """What holds NaN wherever the kernel has no business."""
        return self.cache if self.blocks is None else self.blocks

    @poisoned.setter
    def poisoned(self, caches: Pair) -> None:
        if self.blocks is None:
            self.cache = caches
        else:
            self.blocks = caches

    @property
    def device(self) -> torch.device:
        return self.q.device

    @functools.cached_property
    def variant_params(self) -> Params | None:
        """What the case's variant is given."""
        case = self.case
        return params_of(case.variant, case.num_qo_heads, case.num_kv_heads, case.seed, self.device)

    @property
    def change(self) -> Change | None:
        """What the case's variant makes of scores."""
        case, params = self.case, self.variant_params
        if case.variant is None or params is None:
            return None

        def change(request: int, scores: Tensor, qo_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return changed(
                case.variant,
                params,
                scores,
                qo_idx,
                kv_idx,
                qo_len=case.queries[request],
                kv_len=max(0, case.lengths[request]),
                request=request,
                group_size=case.group_size,
            )

        return change

    def pages(self) -> PageTable:
        """The tables as the planner is given them."""
        return given_table(self.case.page_table, self.table, self.indptr, self.rows)

    def spread(self, pool: Tensor, stride: int) -> None:
        """Move 8 pages of 16 tokens and 8 heads into ``pool``, ``stride`` elements apart."""
        shape, strides = (8, 16, 8, 128), (stride, 8 * 128, 128, 1)
        flat = pool.flatten()
        k, v = flat.as_strided(shape, strides), flat[2**20 :].as_strided(shape, strides)
        ids = [[7, 0], [5, 4], [3, 6], [2, 1]]
        self.table = torch.tensor(ids, dtype=torch.int32, device=self.device)
        for dense, cache in ((self.k, k), (self.v, v)):
            cache[self.table.flatten().long()] = dense.view(shape)
        self.cache = k, v

    def bind(self, planner: jitattn.AttentionPlanner) -> jitattn.types.BoundCache:
        """The cache with its scales."""
        return planner.bind(self.given, k_scale=self.k_scale, v_scale=self.v_scale)

    def new_out(self) -> Tensor:
        """An out of NaN whose surroundings carry the canary."""
        case, dtype = self.case, getattr(torch, self.case.out_dtype or self.case.dtype)
        like = torch.empty(0, dtype=dtype, device=self.device)
        shape = (self.q.shape[0], case.num_qo_heads, case.value_dim)
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
    """Dense q, k, v in the case's dtypes; scores with a spread of about 2, so that keys differ."""
    rng = generator(case, device)
    total = sum(max(0, length) for length in case.lengths)

    def normal(rows: int, heads: int, std: float, dim: int = case.head_dim) -> Tensor:
        return std * torch.randn((rows, heads, dim), generator=rng, device=device)

    q_std = 2.0 / ((case.scale or 1.0) * math.sqrt(case.head_dim))
    return stored(
        case,
        normal(case.num_tokens, case.num_qo_heads, min(q_std, 8.0)),
        normal(total, case.num_kv_heads, 1.0),
        normal(total, case.num_kv_heads, 1.0, case.value_dim),
    )


def stored(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tokens:
    """The tokens in the case's dtypes."""
    q = q.to(getattr(torch, case.dtype))
    if case.kv_dtype and case.blocks:
        return q, in_blocks(k, case.kv_dtype), in_blocks(v, case.kv_dtype)
    dtype = getattr(torch, case.stored_dtype)
    if dtype == torch.int8:
        k, v = k.round(), v.round()
    return q, k.to(dtype), v.to(dtype)


def zeros_of(tokens: Tensor, kv_dtype: str | None = "nvfp4") -> Tensor:
    """Float zeros, one for each element of stored tokens; ``kv_dtype`` says what bytes are of."""
    size = tokens.shape[-1]
    if tokens.dtype == torch.uint8:
        size = head_dim_of(tokens, str(kv_dtype))
    return torch.zeros((*tokens.shape[:-1], size), device=tokens.device)


def values(tokens: Tensor, scale: Scale, kv_dtype: str | None = "nvfp4") -> Tensor:
    """What stored tokens [total, Hkv, D] stand for; ``kv_dtype`` says what bytes are of."""
    if not is_quantised(tokens):
        return tokens
    if tokens.dtype == torch.uint8:
        tokens = values_of_blocks(tokens, str(kv_dtype))
    factor = torch.as_tensor(1.0 if scale is None else scale, device=tokens.device).double()
    return tokens.double() * factor.reshape(-1, 1)


def is_quantised(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


def uniform_probe(case: Case, device: torch.device | str) -> Tokens:
    """Take q = 0: out is the mean of the visible V rows and exp(lse) counts the visible keys."""
    q, k, v = random_tokens(case, device)
    return torch.zeros_like(q), k, v


def address_probe(case: Case, device: torch.device | str, targets: list[int]) -> Tokens:
    """Scores that leave weight to one token a request: out must be its V row, bit for bit.

    ``targets[b]`` is a token of request b. Its score is at least 120 above every other one, so
    their weights are 0 in float32. V rows carry their own address in integers that every dtype
    holds exactly: the token's base-16 digits (base 8 in e5m2), its KV head and its page's column,
    then a hash. In NVFP4 they are the numbers of four bits, in order.
    """
    q, k, v = (zeros_of(x, case.kv_dtype) for x in random_tokens(case, device))
    level = 2.0 ** math.ceil(math.log2(math.sqrt(120 / (case.scale * case.head_dim))))
    q.fill_(level if case.scales is None else 2 * level)  # a k_scale is 1/2 at the least
    starts = _indptr(case)
    k[[start + target for start, target in zip(starts[:-1], targets, strict=True)]] = level
    request, position = _request_and_position(case, q.device)
    head = torch.arange(case.num_kv_heads, device=q.device)[None, :, None]
    column = torch.arange(case.value_dim, device=q.device)[None, None, :]
    token = position[:, None, None]
    base = 8 if case.kv_dtype in ("float8_e5m2", "nvfp4") else 16
    address = (token * 7 + column * 5 + head * 3 + request[:, None, None]) % base
    digits = (token, token // base, token // base**2, head, token // case.page_size)
    for i, digit in enumerate(digits):
        address[..., i] = (digit % base).expand(*address.shape[:2], 1)[..., 0]
    if case.kv_dtype == "nvfp4":
        numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=q.device)
        address = numbers[address] * (1 - 2 * (column % 3 == 1).float())
    v.copy_(address)
    return stored(case, q, k, v)


def make_inputs(case: Case, device: torch.device | str, tokens: Tokens | None = None) -> Inputs:
    """Scatter tokens (default: `random_tokens`) into a poisoned cache."""
    device = torch.device(device)
    dense_q, k, v = random_tokens(case, device) if tokens is None else tokens
    rng = generator(case, device)
    lengths = torch.tensor([max(0, length) for length in case.lengths], device=device)
    starts = _starts(case, rng, lengths)
    per_element = 2 if case.blocks else 1
    pool = Pool(
        num_pages=int(starts[-1]) + DEAD_PAGES,
        page_size=case.page_size,
        num_kv_heads=case.num_kv_heads,
        key_dim=case.head_dim // per_element,
        value_dim=case.value_dim // per_element,
        dtype=k.dtype,
        device=device,
    )
    slots = _deal_slots(case, pool, starts, rng)
    cache = build_cache(case, pool)
    caches = (cache[:, 0], cache[:, 1]) if isinstance(cache, Tensor) else cache
    blocks = None
    if case.kv_dtype and case.blocks:
        (k_data, k_blocks), (v_data, v_blocks) = (split_blocks(x, case.kv_dtype) for x in (k, v))
        blocks = _scatter_blocks(case, pool, (k_blocks, v_blocks), slots)
        parts = k_data, v_data
    else:
        parts = k, v
    for tokens_of, cache_of, slots_of in zip(parts, caches, slots, strict=True):
        _scatter(case, tokens_of, cache_of, slots_of)

    q = row_view(case.q_view, *dense_q.shape, dense_q)
    surroundings(q).fill_(math.nan)
    q.copy_(dense_q)
    q[sum(case.queries) :] = math.nan
    lists = _Lists(case, lengths, starts, _dead_page(case, pool), caches[0].shape[0])
    table, garbage, rows = lists.write(slots, rng)
    has_indptr = case.page_table in ("csr", "ragged")
    k_scale, v_scale = make_scale(case, device, K_SCALES), make_scale(case, device, V_SCALES)
    return Inputs(
        case=case,
        q=q,
        k=values(k, k_scale, case.kv_dtype),
        v=values(v, v_scale, case.kv_dtype),
        kv_indptr=_indptr(case),
        cache=name_cache(cache, case),
        table=table,
        rows=rows,
        indptr=spread(starts.int(), 1 + case.seed % 2) if has_indptr else None,
        seq_lens=torch.tensor(case.lengths, device=device).to(getattr(torch, case.lengths_dtype)),
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=_sinks(case, rng),
        qo_indptr=offsets_of(case, device),
        mask=make_mask(case, rng),
        garbage=garbage,
        dead_page=_dead_page(case, pool),
        blocks=blocks,
    )


def _scatter_blocks(case: Case, pool: Pool, scales: Pair, slots: Pair) -> Pair:
    """The scales of blocks in a cache of their own; those of int4 beside their zeros."""
    assert case.blocks is not None
    has_zeros = case.blocks.has_zeros
    dtype = torch.float16 if has_zeros else torch.float8_e4m3fn
    if has_zeros:
        scales = scales[0].flatten(-2), scales[1].flatten(-2)
    dims = {"key_dim": scales[0].shape[-1], "value_dim": scales[1].shape[-1]}
    pair = build_cache(case, replace(pool, dtype=dtype, **dims), case.block_cache)
    assert isinstance(pair, tuple)
    for tokens_of, cache_of, slots_of in zip(scales, pair, slots, strict=True):
        _scatter(case, tokens_of, cache_of, slots_of)
    named = name_cache(pair, case, case.block_cache)
    assert isinstance(named, tuple)
    return named


def spread(vector: Tensor, step: int) -> Tensor:
    """The same values at a stride, with garbage between them."""
    wide = torch.full((vector.shape[0], step), 2**31 - 1, dtype=vector.dtype, device=vector.device)
    wide[:, 0] = vector
    return wide[:, 0]


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
    """The first key that each request's first query can see, [batch_size]."""
    lengths = torch.tensor([max(0, length) for length in case.lengths], device=device)
    if case.window_left < 0:
        return torch.zeros_like(lengths)
    q_lens = torch.tensor(case.queries, device=device)
    return torch.minimum((lengths - q_lens - case.window_left).clamp(min=0), lengths)


def _entry_tokens(case: Case) -> int:
    """Tokens that one entry of the table stands for."""
    return 1 if case.page_table in ("token", "ragged") else case.page_size


def _starts(case: Case, rng: torch.Generator, lengths: Tensor) -> Tensor:
    """Where the pages of each request begin, and its tokens if ragged, [batch_size + 1]."""
    num_pages = -(-lengths // case.page_size)
    if case.page_table in ("csr", "ragged"):  # room that a request doesn't use
        num_pages = num_pages + torch.randint(
            0, 3, num_pages.shape, generator=rng, device=rng.device
        )
    return torch.cat((num_pages.new_zeros(1), num_pages.cumsum(0)))


def _dead_page(case: Case, pool: Pool) -> int:
    """The last page of the pool is never dealt."""
    return 2 * (pool.num_pages - 1) if case.cache == "twice" else pool.num_pages - 1


def _deal_slots(case: Case, pool: Pool, starts: Tensor, rng: torch.Generator) -> Pair:
    """Page * page_size + place of every dense token in the caches of K and V.

    Pages, or the tokens of a token table, lie in random order.
    """
    request, position = _request_and_position(case, pool.device)
    size = case.page_size
    num_live = pool.num_pages - DEAD_PAGES

    def shuffled(num_ids: int) -> Tensor:
        return torch.randperm(num_ids, generator=rng, device=pool.device)

    if case.page_table == "ragged":
        slots = starts[request] + position
        return slots, slots
    if case.page_table == "token":
        slots = shuffled(num_live * size)[: request.shape[0]]
        return slots, slots
    page, place = starts[request] + position // size, position % size
    k_ids = shuffled(num_live)
    if case.cache == "twice":
        return 2 * k_ids[page] * size + place, (2 * k_ids[page] + 1) * size + place
    v_ids = shuffled(num_live) if case.page_table == "separate" else k_ids
    return k_ids[page] * size + place, v_ids[page] * size + place


def _scatter(case: Case, tokens: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write the tokens that some query sees; the others stay NaN."""
    request, position = _request_and_position(case, tokens.device)
    live = position >= first_visible(case, tokens.device)[request]
    slots = slots[live]
    if is_quantised(cache):
        tokens, cache = tokens.view(torch.uint8), cache.view(torch.uint8)
    cache[slots // case.page_size, slots % case.page_size] = tokens[live]


@dataclass(frozen=True)
class _Lists:
    """Writes page tables, with garbage wherever nothing may be read."""

    case: Case
    lengths: Tensor
    starts: Tensor
    dead_page: int
    pool: int  # pages of the cache

    def write(self, slots: Pair, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
        """The table, where it holds garbage, and the row indices."""
        match self.case.page_table:
            case "ragged":
                empty = torch.empty(0, dtype=torch.int32, device=rng.device)
                return empty, empty.bool(), None
            case "csr":
                return *self._indices(slots[0], rng), None
            case "separate":
                grids = [self._grid(slots_of, rng) for slots_of in slots]
            case _:
                grids = [self._grid(slots[0], rng)]
        return self._place_rows(grids, rng)

    def _entries(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Request, column and value of the entries that hold a key which some query sees."""
        size = _entry_tokens(self.case)
        request, position = _request_and_position(self.case, slots.device)
        first = first_visible(self.case, slots.device)[request]
        # The first token of each entry stands for it.
        live = (position % size == 0) & (position // size >= first // size)
        value = slots if self.case.page_table == "token" else slots // self.case.page_size
        return request[live], position[live] // size, value[live].int()

    def _junk(self, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        unit = self.case.page_size if self.case.page_table == "token" else 1
        dead, end = self.dead_page * unit, self.pool * unit
        values = [-1, 2**31 - 1, end, end + 7, -(2**31), dead, dead]
        junk = torch.tensor(values, dtype=torch.int32, device=rng.device)
        return junk[torch.randint(0, len(values), shape, generator=rng, device=rng.device)]

    def _grid(self, slots: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """One [batch_size, width] table, and where it holds garbage."""
        width = max(1, -(-int(self.lengths.max()) // _entry_tokens(self.case))) + 3
        table = self._junk((len(self.case.lengths), width), rng)
        garbage = torch.ones_like(table, dtype=torch.bool)
        request, column, value = self._entries(slots)
        table[request, column] = value
        garbage[request, column] = False
        return table, garbage

    def _indices(self, slots: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """kv_indices with some entries too many, at a stride for odd seeds."""
        table = self._junk((int(self.starts[-1]) + 64,), rng)
        garbage = torch.ones_like(table, dtype=torch.bool)
        request, column, value = self._entries(slots)
        entry = self.starts[request] + column
        table[entry] = value
        garbage[entry] = False
        return spread(table, 1 + self.case.seed % 2), garbage

    def _place_rows(
        self, grids: list[tuple[Tensor, Tensor]], rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cut the tables out of a larger int32 tensor, and with ``rows`` shuffle their rows."""
        batch_size, width = grids[0][0].shape
        device = rng.device
        rows = None
        num_rows = batch_size
        index = torch.arange(batch_size, device=device)
        if self.case.rows is not None:
            num_rows = batch_size + 3
            index = torch.randperm(num_rows, generator=rng, device=device)[:batch_size]
            rows = index.to(getattr(torch, self.case.rows))
        large = torch.full(
            (num_rows, len(grids) + 1, width + 5), 2**31 - 1, dtype=torch.int32, device=device
        )
        garbage = torch.ones((num_rows, len(grids), width), dtype=torch.bool, device=device)
        for i, (table, is_garbage) in enumerate(grids):
            large[index, i, 2 : 2 + width] = table
            garbage[index, i] = is_garbage
        if len(grids) == 2:
            return large[:, :2, 2 : 2 + width], garbage, rows
        return large[:, 0, 2 : 2 + width], garbage[:, 0], rows


def _sinks(case: Case, rng: torch.Generator) -> Tensor | None:
    if case.sinks is None:
        return None
    name, _, column = case.sinks.partition("-")
    shape = (case.num_qo_heads, 3 if column else 1)
    values = 3.0 * torch.randn(shape, generator=rng, device=rng.device)
    matrix = values.to(getattr(torch, name))
    return matrix[:, 1] if column else matrix[:, 0].contiguous()


K_SCALES = (0.75, 0.5, 1.0, 1.3)
V_SCALES = (3.0, 0.25, 1.0, 4.0)
"""Scales of the KV heads, in turn. Those of V keep the integers of an address probe exact."""


def make_scale(case: Case, device: torch.device | str, scales: tuple[float, ...]) -> Scale:
    """A scale in the case's form, one of `tests.support.cases.SCALES`."""
    if case.scales is None:
        return None
    if case.scales == "float":
        return scales[0]
    count = case.num_kv_heads if case.scales.startswith("heads") else 1
    matrix = torch.full((count, 3), math.nan, device=device)
    matrix[:, 1] = torch.tensor([scales[i % len(scales)] for i in range(count)])
    column = matrix[:, 1] if case.scales == "heads-column" else matrix[:, 1].contiguous()
    return column[0] if case.scales == "0-d" else column
