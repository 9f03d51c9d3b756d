"""flash-attn's functions against their definition in float64, on the CPU.

Caches hold NaN wherever no request has a token, rows between the rows of a strided cache too, and
new tensors are made of NaN. The definition below is written from flash-attn's documentation alone.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jitattn.compat import flash_attn
from jitattn.compat.flash_attn import common as flash_attn_common
from jitattn.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from jitattn.compat.flash_attn.bert_padding import pad_input, unpad_input
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig
from tests.emulator import launch_recorder

NAN = math.nan
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
MANY = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


pytestmark = pytest.mark.usefixtures("new_tensors_are_nan")


# --- the definition -------------------------------------------------------------------------------


def defined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and sum of p * |v| of a request: q [n, heads, dim], k and v [m, heads_k, dim]."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window
    right = 0 if causal else right
    for i, j in itertools.product(range(n), range(m)):
        own = m - n + i
        if (left >= 0 and j < own - left) or (right >= 0 and j > own + right):
            scores[:, i, j] = -math.inf
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out, size = (torch.einsum("hnm,mhd->nhd", p, x) for x in (values, values.abs()))
    return out, lse, size


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], pairs: str) -> Tensor:
    """Rotate [n, heads, dim] in float64 and round, element by element."""
    result, half = x.double().clone(), cos.shape[1]
    for row, p in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if pairs == "neighbours" else (i, i + half)
            c, s = float(cos[p, i]), float(sin[p, i])
            first, second = x[row, :, a].double(), x[row, :, b].double()
            result[row, :, a] = first * c - second * s
            result[row, :, b] = first * s + second * c
    return result.to(x.dtype)


def check(found: Tensor, want: Tensor, size: Tensor) -> None:
    u = UNIT_ROUNDOFF[found.dtype]
    assert bool(((found.double() - want).abs() <= 1.01 * u * size + 2.0**-24).all())


def check_lse(found: Tensor, want: Tensor, bound: float) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=0, atol=bound)


# --- flash_attn_with_kvcache ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    cache: str  # "dense", "strided", "indexed", "padded" or "paged"
    cached: tuple[int, ...]  # tokens of each request; -1: padding
    seqlen_q: int
    seqlen_new: int  # 0: no k and v
    capacity: int
    page_size: int
    heads: tuple[int, int]
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    causal: bool
    window: tuple[int, int]
    softcap: float
    scale: float | None
    rotary: str  # "", "neighbours" or "halves"
    rotary_dim: int
    num_splits: int
    is_int: bool  # one cache_seqlens for all
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    cache = rng.choice(["dense", "strided", "indexed", "padded", "paged"])
    seqlen_new = rng.choice([0, 1, 1, 2, 5])
    capacity = rng.choice([9, 16, 32, 40, 64])
    page_size = rng.choice([1, 3, 4, 16]) if cache == "paged" else capacity
    capacity = -(-capacity // page_size) * page_size
    most = capacity - seqlen_new - (3 if cache == "padded" else 0)
    is_int = rng.random() < 0.2
    cached = [rng.choice([0, rng.randint(0, most), most, -1]) for _ in range(rng.randint(1, 4))]
    if is_int:
        cached = [rng.randint(0, most)] * len(cached)
    heads_k = rng.choice([1, 2])
    head_dim = rng.choice([16, 32])
    return Case(
        cache=cache,
        cached=tuple(cached),
        seqlen_q=rng.choice([1, 1, 2, 4, seqlen_new or 3]),
        seqlen_new=seqlen_new,
        capacity=capacity,
        page_size=page_size,
        heads=(heads_k * rng.choice([1, 3]), heads_k),
        head_dim=head_dim,
        value_dim=rng.choice([head_dim, head_dim, 48]),
        dtype=rng.choice([torch.float16, torch.bfloat16]),
        causal=rng.random() < 0.5,
        window=(rng.choice([-1, -1, 0, 3, 100]), rng.choice([-1, -1, 0, 1, 2, 100])),
        softcap=rng.choice([0.0, 0.0, 2.5]),
        scale=rng.choice([None, 0.3]),
        rotary=rng.choice(["", "neighbours", "halves"]) if seqlen_new else "",
        rotary_dim=rng.choice([8, head_dim]),
        num_splits=rng.choice([0, 1]),
        is_int=is_int,
        seed=rng.randint(0, 2**31),
    )


class Laid:
    """The tokens of a case, in a cache of NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        rng = random.Random(case.seed)
        batch, heads_k = len(case.cached), case.heads[1]
        self.tokens = [
            tuple(self.normal(max(n, 0), heads_k, dim) for dim in (case.head_dim, case.value_dim))
            for n in case.cached
        ]
        self.leftpad = [rng.randint(0, 3) if case.cache == "padded" else 0 for _ in case.cached]
        num_rows = batch + (rng.randint(0, 2) if case.cache != "paged" else 0)
        blocks = case.capacity // case.page_size
        if case.cache == "paged":
            num_rows = batch * blocks + 2
            ids = rng.sample(range(num_rows), batch * blocks)
            self.table = torch.tensor(ids, dtype=torch.int32).view(batch, blocks)
        self.rows = list(range(batch))
        if case.cache == "indexed" or (case.cache == "padded" and rng.random() < 0.5):
            self.rows = rng.sample(range(num_rows), batch)
        self.is_indexed = self.rows != list(range(batch)) or case.cache == "indexed"
        self.caches = tuple(self.new(num_rows, dim) for dim in (case.head_dim, case.value_dim))
        for b, pair in enumerate(self.tokens):
            for cache, tokens in zip(self.caches, pair, strict=True):
                for t, token in enumerate(tokens):
                    page, place = self.place(b, t)
                    cache[page, place] = token
        if case.cache == "paged":
            self.forget_unused_ids()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.case.dtype)

    def new(self, num_rows: int, dim: int) -> Tensor:
        case = self.case
        shape = (num_rows, case.page_size, case.heads[1], dim)
        if case.cache != "strided":
            return torch.full(shape, NAN, dtype=case.dtype)
        whole = torch.full((num_rows, case.page_size + 3, 5, dim), NAN, dtype=case.dtype)
        return whole[:, : case.page_size, 1 : 1 + case.heads[1]]

    def place(self, request: int, token: int) -> tuple[int, int]:
        case = self.case
        if case.cache == "paged":
            return int(self.table[request, token // case.page_size]), token % case.page_size
        return self.rows[request], self.leftpad[request] + token

    def forget_unused_ids(self) -> None:
        """No entry past a request's last page is read."""
        for b, n in enumerate(self.case.cached):
            total = 0 if n < 0 else n + self.case.seqlen_new
            self.table[b, -(-total // self.case.page_size) :] = -1

    def arguments(self) -> dict[str, object]:
        case = self.case
        lens: list[int] = [
            n + pad if n >= 0 else -1 for n, pad in zip(case.cached, self.leftpad, strict=True)
        ]
        dtype = torch.int64 if case.seed % 2 else torch.int32
        is_int = case.is_int and len(set(lens)) == 1
        given: dict[str, object] = {
            "cache_seqlens": lens[0] if is_int else torch.tensor(lens, dtype=dtype),
            "softmax_scale": case.scale,
            "causal": case.causal,
            "window_size": case.window,
            "softcap": case.softcap,
            "num_splits": case.num_splits,
        }
        if case.cache == "paged":
            given["block_table"] = self.table
        if self.is_indexed:
            given["cache_batch_idx"] = torch.tensor(self.rows, dtype=dtype)
        if case.cache == "padded":
            given["cache_leftpad"] = torch.tensor(self.leftpad, dtype=dtype)
        return given


@MANY
@given(case=cases())
def test_kvcache_is_its_definition(case: Case) -> None:
    laid = Laid(case)
    batch, (heads, heads_k) = len(case.cached), case.heads
    q = laid.normal(batch, case.seqlen_q, heads, case.head_dim)
    given = laid.arguments()
    new: tuple[Tensor, ...] = ()
    if case.seqlen_new:
        new = tuple(
            laid.normal(batch, case.seqlen_new, heads_k, dim)
            for dim in (case.head_dim, case.value_dim)
        )
        given |= {"k": new[0], "v": new[1]}
    tables: tuple[Tensor, ...] = ()
    if case.rotary:
        angles = torch.rand(case.capacity + 2, case.rotary_dim // 2, generator=laid.generator) * 6
        tables = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
        given |= {"rotary_cos": tables[0], "rotary_sin": tables[1]}
        given |= {"rotary_interleaved": case.rotary == "neighbours"}
    before = [cache.clone() for cache in laid.caches]
    inputs = [q.clone(), *(x.clone() for x in new)]
    out, lse = flash_attn_with_kvcache(q, *laid.caches, **given, return_softmax_lse=True)
    assert [torch.equal(a, b) for a, b in zip(inputs, (q, *new), strict=True)]
    assert out.shape == (batch, case.seqlen_q, heads, case.value_dim)
    assert out.dtype == case.dtype
    assert lse.shape == (batch, heads, case.seqlen_q)
    is_local = case.causal or any(0 <= n < case.capacity for n in case.window)
    for b, cached in enumerate(case.cached):
        if cached < 0:
            assert not out[b].any()
            assert bool((lse[b] == -math.inf).all())
            continue
        k, v = laid.tokens[b]
        queries = q[b]
        if new:
            k_new = new[0][b]
            if tables:
                steps = range(case.seqlen_q)
                first = laid.leftpad[b] + cached  # a token turns by its place in the row
                positions = [first + (i if is_local else 0) for i in steps]
                # A query may stand beyond the table where it has more rows than k.
                positions = [min(p, len(tables[0]) - 1) for p in positions]
                queries = turned(queries, *tables, positions, case.rotary)
                places = [first + i for i in range(case.seqlen_new)]
                k_new = turned(k_new, *tables, places, case.rotary)
            # What is stored is what was meant, to a rounding of a rounding.
            stored = [
                torch.stack([cache[laid.place(b, cached + i)] for i in range(case.seqlen_new)])
                for cache in laid.caches
            ]
            torch.testing.assert_close(
                stored[0].double(), k_new.double(), rtol=2.1 * UNIT_ROUNDOFF[case.dtype], atol=1e-6
            )
            assert torch.equal(stored[1], new[1][b])
            k, v = torch.cat((k, stored[0])), torch.cat((v, stored[1]))
            for cache, old in zip(laid.caches, before, strict=True):
                for i in range(case.seqlen_new):
                    old[laid.place(b, cached + i)] = cache[laid.place(b, cached + i)]
        want, want_lse, size = defined(
            queries,
            k,
            v,
            scale=case.scale or case.head_dim**-0.5,
            causal=case.causal,
            window=case.window,
            softcap=case.softcap,
        )
        # A few numbers of queries that were turned have another last bit.
        slack = 8.0 if tables else 1.0
        check_lse(lse[b], want_lse, 1e-4 if not tables else 16 * UNIT_ROUNDOFF[case.dtype])
        check(out[b], want, size * slack)
    # Nothing else was written.
    for cache, old in zip(laid.caches, before, strict=True):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


def test_a_full_cache_needs_no_lengths() -> None:
    q, cache = torch.randn(2, 3, 2, 16).half(), torch.randn(2, 2, 32, 1, 16).half()
    out = flash_attn_with_kvcache(q, cache[0], cache[1])
    for b in range(2):
        plain = {"scale": 0.25, "causal": False, "window": (-1, -1), "softcap": 0.0}
        want, _, size = defined(q[b], cache[0, b], cache[1, b], **plain)
        check(out[b], want, size)


# --- flash_attn_varlen_func -----------------------------------------------------------------------


@MANY
@given(seed=st.integers(0, 2**32 - 1))
def test_varlen_is_its_definition(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    heads_k, dim, value_dim = rng.choice([1, 2]), 16, rng.choice([16, 32])
    heads = heads_k * rng.choice([1, 4])
    q_lens = [rng.choice([0, 1, rng.randint(1, 9)]) for _ in range(rng.randint(1, 4))]
    kv_lens = [rng.choice([0, 1, q_len, rng.randint(1, 40)]) for q_len in q_lens]
    num_spare = rng.choice([0, 0, 3])  # rows past the last request
    starts = [torch.tensor([0, *itertools.accumulate(x)]).int() for x in (q_lens, kv_lens)]
    q = torch.randn(sum(q_lens) + num_spare, heads, dim, generator=generator).to(dtype)
    q[sum(q_lens) :] = NAN
    k, v = (
        torch.randn(sum(kv_lens) + num_spare, heads_k, d, generator=generator).to(dtype)
        for d in (dim, value_dim)
    )
    k[sum(kv_lens) :], v[sum(kv_lens) :] = NAN, NAN
    features: dict[str, object] = {
        "causal": rng.random() < 0.5,
        "window_size": (rng.choice([-1, 0, 3, 100]), rng.choice([-1, 0, 1, 3, 100])),
        "softcap": rng.choice([0.0, 3.0]),
    }
    scale = rng.choice([None, 0.4])
    given, pair = dict(features), (k, v)
    if rng.random() < 0.4:
        given["block_table"], pair = paged(k, v, kv_lens, rng.choice([1, 4, 16]), rng)
    maxima = (max(q_lens) + rng.choice([0, 2]), max(kv_lens) + rng.choice([0, 5]))
    found = flash_attn_varlen_func(
        q, *pair, *starts, *maxima, softmax_scale=scale, return_attn_probs=True, **given
    )
    out, lse, probs = found
    assert out.shape == (q.shape[0], heads, value_dim)
    assert lse.shape == (heads, q.shape[0])
    assert probs.numel() == 0
    for b, _ in enumerate(q_lens):
        rows, keys = (slice(int(s[b]), int(s[b + 1])) for s in starts)
        want, want_lse, size = defined(
            q[rows],
            k[keys],
            v[keys],
            scale=scale or dim**-0.5,
            causal=bool(features["causal"]),
            window=features["window_size"],
            softcap=features["softcap"],
        )
        check(out[rows], want, size)
        check_lse(lse[:, rows], want_lse, 1e-4)
    assert not out[sum(q_lens) :].any()
    assert bool((lse[:, sum(q_lens) :] == -math.inf).all())


def paged(
    k: Tensor, v: Tensor, kv_lens: list[int], page_size: int, rng: random.Random
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Scatter ragged tokens over pages of NaN."""
    counts = [-(-n // page_size) for n in kv_lens]
    num_pages = sum(counts) + 2
    ids = iter(rng.sample(range(num_pages), sum(counts)))
    table = torch.full((len(kv_lens), max(counts) + 1), -1, dtype=torch.int32)
    caches = [torch.full((num_pages, page_size, *x.shape[1:]), NAN, dtype=x.dtype) for x in (k, v)]
    start = 0
    for b, n in enumerate(kv_lens):
        for i in range(counts[b]):
            table[b, i] = next(ids)
        for t in range(n):
            for cache, tokens in zip(caches, (k, v), strict=True):
                cache[table[b, t // page_size], t % page_size] = tokens[start + t]
        start += n
    return table, (caches[0], caches[1])


# --- signatures, refusals, planners ---------------------------------------------------------------

KVCACHE = (
    "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
    "num_splits return_softmax_lse"
)
VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
    "window_size softcap alibi_slopes deterministic return_attn_probs block_table"
)


def test_signatures_are_those_of_flash_attn_2() -> None:
    for function, names in ((flash_attn_with_kvcache, KVCACHE), (flash_attn_varlen_func, VARLEN)):
        assert " ".join(inspect.signature(function).parameters) == f"{names} options"


def kvcache(**changes: object) -> object:
    given: dict[str, object] = {
        "q": torch.randn(2, 1, 4, 16).half(),
        "k_cache": torch.zeros(2, 32, 2, 16).half(),
        "v_cache": torch.zeros(2, 32, 2, 16).half(),
        "k": torch.ones(2, 1, 2, 16).half(),
        "v": torch.ones(2, 1, 2, 16).half(),
        "cache_seqlens": torch.tensor([3, 4]),
    }
    given |= changes
    caches = [x for x in (given["k_cache"], given["v_cache"]) if isinstance(x, Tensor)]
    before = [cache.detach().clone() for cache in caches]
    try:
        return flash_attn_with_kvcache(**given)
    except Exception:
        for cache, old in zip(caches, before, strict=True):
            assert torch.equal(cache, old), "refused, and written nevertheless"
        raise


HALVES = torch.ones(40, 8).half()
REFUSED = [
    ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
    ({"num_splits": 2}, "num_splits is 2"),
    ({"num_splits": True}, "num_splits is a bool"),
    ({"softcap": -1.0}, "softcap is -1"),
    ({"softcap": None}, "softcap is a NoneType"),
    ({"softmax_scale": math.inf}, "softmax_scale is inf"),
    ({"causal": 1}, "causal is a int"),
    ({"rotary_interleaved": None}, "rotary_interleaved"),
    ({"return_softmax_lse": "no"}, "return_softmax_lse"),
    ({"window_size": 3}, "window_size is 3"),
    ({"window_size": (1, 2.5)}, "window_size is a float"),
    ({"cache_seqlens": None}, "cache_seqlens is None"),
    ({"cache_seqlens": torch.tensor([1])}, r"cache_seqlens has shape \[1\]"),
    ({"cache_seqlens": torch.tensor([1.0, 2.0])}, "cache_seqlens has dtype float32"),
    ({"cache_seqlens": 33}, "cache_seqlens is 33"),
    ({"cache_batch_idx": torch.tensor([0.0, 1.0])}, "cache_batch_idx has dtype"),
    ({"cache_leftpad": torch.tensor([1])}, "cache_leftpad has shape"),
    ({"block_table": torch.zeros(2, 2)}, "block_table has dtype float32"),
    ({"block_table": torch.zeros(3, 2).int()}, r"block_table has shape \[3, 2\]"),
    (
        {"block_table": torch.zeros(2, 2).int(), "cache_batch_idx": torch.tensor([0, 1])},
        "cache_batch_idx is given",
    ),
    (
        {"block_table": torch.zeros(2, 2).int(), "cache_leftpad": torch.tensor([0, 1])},
        "cache_leftpad is given",
    ),
    ({"v": None}, "k is given"),
    ({"k": None}, "v is given"),
    ({"k": None, "v": None, "rotary_cos": HALVES}, "rotary_cos is given"),
    ({"rotary_cos": HALVES}, "rotary_sin is None"),
    ({"rotary_sin": HALVES}, "rotary_cos is None"),
    ({"rotary_cos": HALVES, "rotary_sin": HALVES[:, :4]}, "rotary_sin has shape"),
    ({"rotary_cos": HALVES[:20], "rotary_sin": HALVES[:20]}, "rotary_cos has 20 rows"),
    ({"rotary_cos": HALVES.float(), "rotary_sin": HALVES}, "rotary_cos has dtype float32"),
    ({"q": torch.randn(2, 1, 4, 16)}, "q has dtype float32"),
    ({"q": torch.randn(2, 4, 16).half()}, r"q has shape \[2, 4, 16\]"),
    ({"q": torch.randn(3, 1, 4, 16).half(), "cache_seqlens": 1}, "q has 3 requests"),
    ({"q": torch.randn(2, 1, 3, 16).half()}, "num_qo_heads=3"),
    ({"k": torch.ones(2, 1, 1, 16).half()}, "k has shape"),
    ({"v": torch.ones(2, 2, 2, 16).half()}, "v has shape"),
    ({"k_cache": torch.zeros(2, 32, 2, 32).half()}, "k_cache has heads of 32"),
    ({"v_cache": torch.zeros(2, 30, 2, 16).half()}, "v_cache has shape"),
    ({"v_cache": torch.zeros(2, 32, 2, 16)}, "v_cache has dtype float32"),
    ({"q": torch.randn(2, 1, 4, 16).half().requires_grad_()}, "q requires a gradient"),
    ({"k_cache": torch.zeros(2, 32, 2, 16).half().requires_grad_()}, "k_cache requires a grad"),
    ({"cache_seqlens": torch.tensor([3, 32])}, r"seq_lens\[1\] is 33|33"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda x: x if type(x) is str else "")
def test_what_kvcache_does_not_take(changes: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kvcache(**changes)


def test_gradients_are_no_matter_without_grad_mode() -> None:
    with torch.no_grad():
        kvcache(q=torch.randn(2, 1, 4, 16).half().requires_grad_())


def varlen(**changes: object) -> object:
    starts = torch.tensor([0, 2, 5]).int()
    given: dict[str, object] = {
        "q": torch.randn(5, 4, 16).half(),
        "k": torch.randn(5, 2, 16).half(),
        "v": torch.randn(5, 2, 16).half(),
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": 3,
        "max_seqlen_k": 3,
    }
    return flash_attn_varlen_func(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
        ({"deterministic": 1}, "deterministic is a int"),
        ({"return_attn_probs": None}, "return_attn_probs"),
        ({"softcap": -2.0}, "softcap is -2"),
        ({"window_size": (1, 2, 3)}, "window_size"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 5])}, "cu_seqlens_k has dtype int64"),
        ({"cu_seqlens_q": torch.tensor([1, 2, 5]).int()}, r"cu_seqlens_q\[0\] is 1"),
        ({"max_seqlen_q": 2}, "max_q_len is 2|3 query tokens"),
        ({"max_seqlen_k": 2}, r"seq_lens\[1\] is 3"),
        ({"max_seqlen_q": None}, "max_seqlen_q is a NoneType"),
        ({"max_seqlen_k": 2.5}, "max_seqlen_k is a float"),
        ({"q": torch.randn(5, 1, 4, 16).half()}, "q has shape"),
        ({"k": torch.randn(5, 1, 2, 16).half()}, r"k has shape .* without block_table"),
        ({"block_table": torch.zeros(2, 1).int()}, r"k has shape .* with block_table"),
        ({"v": torch.randn(5, 2, 16)}, "v has dtype float32"),
        ({"v": torch.randn(5, 2, 16).half().requires_grad_()}, "v requires a gradient"),
    ],
    ids=lambda x: x if type(x) is str else "",
)
def test_what_varlen_does_not_take(changes: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        varlen(**changes)


def test_deterministic_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = varlen()
    torch.manual_seed(0)
    assert torch.equal(plain, varlen(deterministic=True))


@pytest.mark.parametrize("most", [5, 2**31 - 1, 2**40])
def test_masks_are_no_wider_than_there_are_queries(most: int) -> None:
    outs = []
    for limit in (3, most):
        torch.manual_seed(0)
        outs.append(varlen(max_seqlen_q=limit, window_size=(3, 1)))
    assert torch.equal(*outs)


def test_equal_calls_share_a_planner() -> None:
    from jitattn.kernels.attention import functional

    kvcache()
    before = functional._planner.cache_info()
    kvcache()
    kvcache(cache_seqlens=torch.tensor([9, 1]))
    after = functional._planner.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The arguments of every planner that a call asks for."""
    found: list[dict[str, object]] = []
    made = flash_attn_common.planner_of

    def planner_of(arguments: dict[str, object], device: torch.device) -> object:
        found.append(arguments)
        return made(arguments, device)

    monkeypatch.setattr(flash_attn_common, "planner_of", planner_of)
    return found


@pytest.mark.parametrize(("seqlen", "page_size"), [(4096, 64), (48, 16), (32, 32), (100, 1)])
def test_contiguous_caches_are_pages_of_few_sizes(
    seqlen: int, page_size: int, asked: list[dict[str, object]]
) -> None:
    cache = torch.zeros(2, seqlen, 2, 16).half()
    kvcache(k_cache=cache, v_cache=cache.clone())
    assert [arguments["page_size"] for arguments in asked] == [page_size]


def test_no_length_compiles_a_kernel(asked: list[dict[str, object]]) -> None:
    """Lengths and slices of a batch share their kernels: names hold all that is compiled in."""
    whole = torch.zeros(6, 512, 2, 16).half()
    other = whole.clone()
    caches = [(torch.zeros(2, n, 2, 16).half(),) * 2 for n in range(33, 130)]
    for n in range(33, 400, 7):
        caches.append((whole[:2, :n], other[:2, :n]))  # slices of sequences
        caches.append((whole[1:5:2, :n], other[1:5:2, :n]))  # and of batches
    for k_cache, v_cache in caches:
        kvcache(k_cache=k_cache, v_cache=v_cache, k=None, v=None)
    names = {
        spec.symbol
        for arguments in asked
        for spec in specs_of(PlannerConfig.from_arguments(arguments), "sm_90a")
    }
    sizes = {arguments["page_size"] for arguments in asked}
    assert sizes == {1, 16, 32, 64}
    assert len(asked) == len(caches)
    assert len(names) <= 4 * len(specs_of(PlannerConfig.from_arguments(asked[0]), "sm_90a"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [37, 64])
def test_slices_of_a_batch_are_attended_and_written(seqlen: int, causal: bool) -> None:
    torch.manual_seed(seqlen)
    whole = torch.randn(7, 90, 2, 2, 16).half()
    k_cache, v_cache = whole[1:6:2, 5 : 5 + seqlen, 0], whole[1:6:2, 5 : 5 + seqlen, 1]
    q, k, v = (torch.randn(3, 2, heads, 16).half() for heads in (4, 2, 2))
    lens = [0, 11, seqlen - 2]
    kept = whole.clone()
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lens), causal=causal
    )
    for b, n in enumerate(lens):
        row, at = 1 + 2 * b, 5 + n
        kept[row, at : at + 2, 0], kept[row, at : at + 2, 1] = k[b], v[b]
        keys, values = kept[row, 5 : at + 2, 0], kept[row, 5 : at + 2, 1]
        found = defined(q[b], keys, values, scale=0.25, causal=causal, window=(-1, -1), softcap=0.0)
        assert (out[b].double() - found[0]).abs().max() < 2e-3
    assert torch.equal(whole, kept)


def test_rows_that_begin_between_tokens_are_refused() -> None:
    cache = torch.zeros(2 * 700).half().as_strided((2, 20, 2, 16), (650, 32, 16, 1))
    with pytest.raises(ValueError, match="k_cache has strides"):
        kvcache(k_cache=cache, v_cache=cache.clone())


# --- other functions, and keywords of flash-attn 3 and vLLM ---------------------------------------


def varlen_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, n, heads, 16).half() for n, heads in ((5, 4), (9, 2), (9, 2)))
    return q, k, v, torch.tensor([0, 5, 10]).int(), torch.tensor([0, 9, 18]).int()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_and_packed_functions_are_the_varlen_one(causal: bool) -> None:
    q, k, v, cu_q, cu_k = varlen_inputs()
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    how = {"causal": causal, "window_size": (3, -1), "softcap": 2.0, "return_attn_probs": True}
    out, lse, _ = flash_attn_varlen_func(*flat, cu_q, cu_k, 5, 9, **how)
    for found in (
        flash_attn.flash_attn_func(q, k, v, **how),
        flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **how),
    ):
        assert torch.equal(found[0].flatten(0, 1), out)
        assert torch.equal(found[1].transpose(0, 1).flatten(1), lse)
        assert found[2].numel() == 0
    packed = torch.stack(flat[1:], 1)
    found = flash_attn.flash_attn_varlen_kvpacked_func(flat[0], packed, cu_q, cu_k, 5, 9, **how)
    assert torch.equal(found[0], out)
    qkv = torch.stack((k, k, v), 2)
    found = flash_attn.flash_attn_qkvpacked_func(qkv, causal=causal)
    assert torch.equal(found, flash_attn.flash_attn_func(k, k, v, causal=causal))
    flat_qkv = flash_attn.flash_attn_varlen_qkvpacked_func(
        qkv.flatten(0, 1), cu_k, 9, causal=causal
    )
    assert torch.equal(flat_qkv, found.flatten(0, 1))


def test_bert_padding_goes_there_and_back() -> None:
    hidden = torch.randn(3, 7, 2, 4)
    mask = torch.arange(7) < torch.tensor([[4], [7], [0]])
    tokens, places, offsets, longest, used = unpad_input(hidden, mask)
    assert offsets.tolist() == [0, 4, 11, 11]
    assert (longest, used.tolist()) == (7, [4, 7, 0])
    assert torch.equal(tokens, hidden[mask])
    assert torch.equal(pad_input(tokens, places, 3, 7), hidden * mask[:, :, None, None])
    more = unpad_input(hidden, mask, torch.arange(7).eq(5).expand(3, 7) & ~mask)
    assert (more[2].tolist(), more[4].tolist()) == ([0, 5, 12, 13], [4, 7, 0])


def test_keywords_of_flash_attn_3_and_vllm() -> None:
    q, k, v, cu_q, _ = varlen_inputs()
    blocks = [torch.cat((x, x.new_zeros(2, 7, 2, 16)), 1).view(8, 4, 2, 16) for x in (k, v)]
    table = torch.arange(8).int().view(2, 4)
    used = torch.tensor([9, 6], dtype=torch.int32)
    flat = q.flatten(0, 1)
    sinks = torch.randn(4)
    want, lse, _ = flash_attn_varlen_func(
        flat, *blocks, cu_q, torch.tensor([0, 9, 15]).int(), 5, 9, causal=True, block_table=table,
        return_attn_probs=True,
    )  # fmt: skip
    out = torch.empty_like(flat)
    found = flash_attn_varlen_func(
        q=flat, k=blocks[0], v=blocks[1], max_seqlen_q=5, cu_seqlens_q=cu_q, max_seqlen_k=9,
        seqused_k=used, page_table=table, causal=True, out=out, return_softmax_lse=True,
        fa_version=3, scheduler_metadata=None, q_descale=None, s_aux=None, num_splits=0,
    )  # fmt: skip
    assert found[0] is out
    assert torch.equal(out, want)
    assert torch.equal(found[1], lse)
    cached = flash_attn_with_kvcache(
        flat, *blocks, cache_seqlens=used, page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=5,
        causal=True, pack_gqa=True, return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(cached[0], want)
    assert torch.equal(cached[1], lse)
    even = flash_attn_with_kvcache(q, *blocks, cache_seqlens=used, page_table=table, causal=True)
    assert torch.equal(even.flatten(0, 1), want)
    with_sinks = flash_attn_varlen_func(
        flat, *blocks, cu_q, None, 5, 9, causal=True, page_table=table, seqused_k=used, s_aux=sinks
    )
    share = torch.sigmoid(lse.T - sinks)[:, :, None]  # of the keys, beside the sink
    assert (with_sinks.float() - want.float() * share).abs().max() < 2e-3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_table": torch.zeros(2, 1).int(), "block_table": torch.zeros(2, 1).int()},
         ValueError, "page_table is given"),
        ({"qv": torch.zeros(1)}, ValueError, "qv is a tensor"),
        ({"k_descale": torch.ones(1)}, ValueError, "k_descale is a tensor"),
        ({"attention_chunk": 128}, ValueError, "attention_chunk is 128"),
        ({"rotary_seqlens": torch.ones(2)}, ValueError, "rotary_seqlens is a tensor"),
        ({"seqused_k": torch.ones(2)}, ValueError, "seqused_k is a tensor"),
        ({"s_aux": torch.ones(3)}, ValueError, "s_aux has shape"),
        ({"cu_seqlens_q": torch.ones(3).int()}, ValueError, "cu_seqlens_q is given"),
        ({"page_tabel": None}, TypeError, "page_tabel is no argument"),
    ],
)  # fmt: skip
def test_keywords_are_refused_by_name(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kvcache(**change)


def test_splits_are_one_or_the_devices_choice_without_a_cache_too() -> None:
    q, k = torch.zeros(3, 2, 16).half(), torch.zeros(3, 1, 16).half()
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="num_splits is 2"):
        flash_attn.flash_attn_varlen_func(q, k, k, indptr, indptr, 3, 3, num_splits=2)


def test_names_that_are_not_here_say_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"merge_states"):
        exec("from jitattn.compat.flash_attn.flash_attn_interface import flash_attn_combine", {})
    with pytest.raises(AttributeError, match="forward"):
        flash_attn.losses  # noqa: B018


# --- engines --------------------------------------------------------------------------------------


def small_cache() -> dict[str, Tensor]:
    torch.manual_seed(0)
    bf16 = {"dtype": torch.bfloat16}
    return {
        "q": torch.randn(3, 1, 4, 16, **bf16),
        "k_cache": torch.randn(5, 16, 2, 16, **bf16),
        "v_cache": torch.randn(5, 16, 2, 16, **bf16),
        "k": torch.randn(3, 1, 2, 16, **bf16),
        "v": torch.randn(3, 1, 2, 16, **bf16),
        "cache_seqlens": torch.tensor([20, 0, 7], dtype=torch.int32),
        "block_table": torch.tensor([[3, 1], [0, -1], [4, -1]], dtype=torch.int32),
    }


def every_call(device: str | None = None) -> list[Tensor]:
    """Both functions, over pages, rows and ragged tokens, with windows and lse."""
    with torch.device(device) if device else contextlib.nullcontext():
        given = {name: tensor.clone() for name, tensor in SMALL.items()}
        outs = [flash_attn_with_kvcache(**given, causal=True)]
        rows = {
            "k_cache": given["k_cache"].reshape(1, 80, 2, 16).expand(3, -1, -1, -1).contiguous(),
            "v_cache": given["v_cache"].reshape(1, 80, 2, 16).expand(3, -1, -1, -1).contiguous(),
        }
        for more in (
            {"cache_leftpad": SMALL["cache_seqlens"]},
            {"cache_seqlens": 33, "window_size": (8, 0)},
            {"cache_seqlens": 9, "cache_batch_idx": SMALL["block_table"][:, 1] + 1},
        ):
            outs += flash_attn_with_kvcache(
                given["q"].expand(3, 3, 4, 16), **rows, return_softmax_lse=True, **more
            )
        offsets = SMALL["cache_seqlens"].cumsum(0, dtype=torch.int32)
        tokens = torch.arange(27 * 32, device="cpu").sin().bfloat16().view(27, 2, 16)
        outs += flash_attn_varlen_func(
            tokens, tokens, tokens, offsets - 20, offsets - 20, 9, 9,
            window_size=(-1, 2), return_attn_probs=True,
        )  # fmt: skip
    return [out for out in outs if out.numel()]


SMALL = small_cache()


def test_new_tensors_lie_where_the_callers_do() -> None:
    """Whatever torch makes new ones of by default, as engines set it while they begin."""
    expected = every_call()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = every_call("meta")
    finally:
        torch.set_default_dtype(dtype)
    assert len(found) == len(expected) == 1 + 3 * 2 + 2
    for a, b in zip(found, expected, strict=True):
        assert (a.device.type, a.dtype) == ("cpu", b.dtype)
        assert torch.equal(a, b)


def test_calls_are_captured_with_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = launch_recorder.install(monkeypatch)
    planners: dict[str, object] = {}

    def planner_of(arguments: dict[str, object], device: torch.device) -> object:
        return (
            planners.setdefault(str(arguments), None)
            or planners.update({str(arguments): cuda.planner(**arguments)})
            or planners[str(arguments)]
        )

    monkeypatch.setattr(flash_attn_common, "planner_of", planner_of)
    given = {name: tensor.clone() for name, tensor in SMALL.items()}
    flash_attn_with_kvcache(**given, causal=True)
    eager = [launch.symbol for launch in cuda.launches]
    assert [symbol.split("_")[1] for symbol in eager] == ["schedule", "decode"]
    cuda.is_capturing, cuda.stream = True, 3
    cuda.launches.clear()
    flash_attn_with_kvcache(**given, causal=True)
    assert [launch.symbol for launch in cuda.launches] == eager
    assert {launch.stream for launch in cuda.launches} == {3}
    assert [*cuda.workspaces] == [0]
    cuda.is_capturing = False
