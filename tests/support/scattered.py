"""Attention by its definition in float64, and caches that hold NaN wherever no request has a token.

What other packages' functions are tested against; shares no code with jitattn.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

NAN = math.nan
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GARBAGE = -(2**30)
"""An id that no cache has."""


def defined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, natural lse and sum of p * |v| of a request: q [n, heads, dim], k and v [m, heads, dim].

    ``mask`` is bool [n, m].
    """
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for i, j in itertools.product(range(n), range(m)):
        own = m - n + i
        hidden = (causal and j > own) or (window_left >= 0 and j < own - window_left)
        if hidden or (mask is not None and not mask[i, j]):
            scores[:, i, j] = -math.inf
    terms = scores
    if sinks is not None:
        terms = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), dim=2)
    lse = (
        torch.logsumexp(terms, -1)
        if terms.shape[2]
        else torch.full(terms.shape[:2], -math.inf).double()
    )
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out, size = (torch.einsum("hnm,mhd->nhd", p, x) for x in (values, values.abs()))
    return out, lse.t(), size


def check_out(found: Tensor, want: Tensor, size: Tensor, *, slack: float = 2.0**-24) -> None:
    bound = 1.01 * UNIT_ROUNDOFF[found.dtype] * size + slack * (1 + size)
    assert bool(((found.double() - want).abs() <= bound).all())


def check_lse(found: Tensor, natural: Tensor, *, base: float = 2.0) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), natural / math.log(base), rtol=1e-6, atol=1e-4)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nan_like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of NaN; FP8 has some, too."""
    return torch.full(shape, NAN).to(dtype)


@dataclass
class Scattered:
    """Requests of some lengths, their pages anywhere in a cache of NaN.

    Attributes:
        k, v: of each request [length, heads, dim], as stored.
        caches: K and V in ``layout``, [num_pages, ..].
        ids: pages of each request, K's and V's; the same where they are shared.
    """

    lens: list[int]
    page_size: int
    layout: str
    k: list[Tensor]
    v: list[Tensor]
    caches: tuple[Tensor, Tensor]
    ids: list[tuple[list[int], list[int]]]

    @classmethod
    def of(
        cls,
        rng: random.Random,
        lens: list[int],
        *,
        page_size: int,
        layout: str,
        heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        form: str = "pair",
        separate: bool = False,
    ) -> Scattered:
        """``form`` is "pair", "one" (of both, dims alike), "strided" or "interleaved"."""
        k, v = (
            [normal(rng.randrange(2**31), max(n, 0), heads, dim).to(dtype) for n in lens]
            for dim in dims
        )
        counts = [-(-max(n, 0) // page_size) for n in lens]
        num_pages = sum(counts) + 2
        caches = _caches(num_pages, page_size, layout, heads, dims, dtype, form)
        k_ids, v_ids = (rng.sample(range(num_pages), sum(counts)) for _ in range(2))
        v_ids = v_ids if separate else k_ids
        starts = [0, *itertools.accumulate(counts)]
        ids = [(k_ids[a:b], v_ids[a:b]) for a, b in itertools.pairwise(starts)]
        for b, pages in enumerate(ids):
            for cache, tokens, own in zip(caches, (k[b], v[b]), pages, strict=True):
                for t, token in enumerate(tokens):
                    page, place = own[t // page_size], t % page_size
                    if layout == "NHD":
                        cache[page, place] = token
                    else:
                        cache[page, :, place] = token
        return cls(lens, page_size, layout, k, v, caches, ids)

    def csr(self, rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets, indices with garbage behind them, and tokens in last pages."""
        indptr = [0, *itertools.accumulate(len(k) for k, _ in self.ids)]
        indices = [page for k, _ in self.ids for page in k] + [GARBAGE] * rng.choice([0, 3])
        last = [(n - 1) % self.page_size + 1 if n > 0 else 0 for n in self.lens]
        tensors = (torch.tensor(x, dtype=torch.int32) for x in (indptr, indices, last))
        first, second, third = tensors
        return first, second, third

    def table(self, *, separate: bool = False, spare: int = 1) -> Tensor:
        """A block table with garbage past the last page of each request."""
        width = max((len(k) for k, _ in self.ids), default=0) + spare
        table = torch.full((len(self.ids), 2, width), GARBAGE, dtype=torch.int32)
        for b, pair in enumerate(self.ids):
            for plane, pages in enumerate(pair):
                table[b, plane, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table if separate else table[:, 0]


def _caches(
    num_pages: int,
    page_size: int,
    layout: str,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    form: str,
) -> tuple[Tensor, Tensor]:
    middle = (page_size, heads) if layout == "NHD" else (heads, page_size)
    if form == "one":
        both = nan_like((num_pages, 2, *middle, dims[0]), dtype)
        return both[:, 0], both[:, 1]
    if form == "strided":
        # Rows between the rows, and heads besides the heads.
        whole = (nan_like((num_pages, 3, *(n + 1 for n in middle), dim), dtype) for dim in dims)
        k, v = (x[:, 1, : middle[0], 1 : 1 + middle[1]] for x in whole)
        return k, v
    if form == "interleaved":
        both = nan_like((num_pages, *middle, sum(dims)), dtype)
        return both[..., : dims[0]], both[..., dims[0] :]
    k, v = (nan_like((num_pages, *middle, dim), dtype) for dim in dims)
    return k, v


def indptr_of(lens: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(max(n, 0) for n in lens)], dtype=torch.int32)
