"""Lists of tokens and of pages, their caches in poisoned memory, and what is right.

Slots that no list has are NaN, entries behind a list's count are garbage, and out and lse start as
NaN. ``expected`` computes from values of slots and sets of what each row sees: it reads no table,
and shares no code with the package.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import jitattn
from jitattn.spec.config import MLAConfig, PlannerConfig
from tests.support.harness import Expected, Result, check_rounded

GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6)
Seen = list[list[Tensor | None]]
"""Slots that each row sees through each KV head; None is a list that leaves the pool."""


@dataclass(frozen=True, kw_only=True)
class ListCase:
    """One call.

    Attributes:
        latent: heads of latent attention; None is grouped-query attention.
        form: of a latent cache: "one", "pair", "fp8" or "rows", of 656 bytes.
        num_tokens: query tokens, or with ``page_lists`` requests.
        k: entries of a list.
        own: whether KV heads have lists of their own.
        counts: None, "token", or "head".
        first_holes: entries of each list before the first that is a slot.
        outside: query tokens, or requests, one of whose entries is beyond the pool.
        q_lens: with ``page_lists``: query tokens of each request, of these numbers at most.
        cache: how it lies: "joint", "pair" or "padded", whose rows allow no vectors.
    """

    page_lists: bool = False
    latent: int | None = None
    form: str = "one"
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 64
    page_size: int = 5
    num_pages: int = 24
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    out_dtype: str | None = None
    num_tokens: int = 5
    k: int = 37
    own: bool = False
    counts: str | None = "token"
    holes: float = 0.2
    first_holes: int = 0
    outside: tuple[int, ...] = ()
    q_lens: int = 1
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: bool = False
    scales: bool = False
    cache: str = "joint"
    batch_invariant: bool = False
    seed: int = 0

    @property
    def num_qo_heads(self) -> int:
        return self.latent or self.num_kv_heads * self.group_size

    @property
    def kv_heads(self) -> int:
        return 1 if self.latent else self.num_kv_heads

    def planner_arguments(self) -> dict[str, Any]:
        shared = {
            "page_size": self.page_size,
            "q_dtype": self.dtype,
            "out_dtype": self.out_dtype,
            "page_table": "page_lists" if self.page_lists else "indices",
            "causal": self.causal,
            "batch_invariant": self.batch_invariant,
        }
        if self.latent:
            kv_dtype = self.dtype if self.form in ("one", "pair") else "float8_e4m3fn"
            return {"num_heads": self.latent, "sm_scale": 0.05, "kv_dtype": kv_dtype} | shared
        return shared | {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "kv_dtype": self.kv_dtype or self.dtype,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "use_sinks": self.sinks,
        }

    def planner(self, device: str) -> Any:
        kind = jitattn.MLAPlanner if self.latent else jitattn.AttentionPlanner
        return kind(**self.planner_arguments(), device=device)


@dataclass
class ListInputs:
    """Everything a call takes, and the values for `expected`."""

    case: ListCase
    queries: tuple[Tensor, ...]
    kv: Any
    scales: dict[str, Any]
    lists: Any
    seq_lens: Tensor | None
    qo_indptr: Tensor | None
    sinks: Tensor | None
    seen: Seen
    keys: Tensor  # float64 [num_slots, kv_heads, dim]
    values: Tensor

    def plan(self, planner: Any, lists: Any = None) -> Any:
        lists = lists or self.lists
        if self.seq_lens is None:
            return planner.plan(lists, self.queries[0].shape[0])
        return planner.plan(lists, self.seq_lens, self.qo_indptr, max_q_len=self.case.q_lens)

    def run(self, planner: Any, plan: Any = None, **arguments: Any) -> Result:
        """Out and lse, of buffers that were NaN."""
        case, q = self.case, self.queries[0]
        width = 512 if case.latent else case.head_dim
        dtype = getattr(torch, case.out_dtype or case.dtype)
        out = torch.full((*q.shape[:2], width), math.nan, dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:2], math.nan, device=q.device)
        if self.sinks is not None:
            arguments["sinks"] = self.sinks
        kv = planner.bind(self.kv, **self.scales)
        (plan or self.plan(planner)).run(*self.queries, kv, out=out, lse=lse, **arguments)
        return out, lse


def make_inputs(case: ListCase, device: str = "cpu") -> ListInputs:
    """Random lists over a poisoned cache."""
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    found = _page_lists(case, rng) if case.page_lists else _index_lists(case, rng)
    lists, seen, seq_lens, qo_indptr = found
    rows = len(seen)
    dims = (512, 64) if case.latent else (case.head_dim,)
    dtype = getattr(torch, case.dtype)
    scale = 1.5 if case.latent else 2.0
    queries = tuple(
        (scale * torch.randn(rows, case.num_qo_heads, dim, generator=generator)).to(dtype)
        for dim in dims
    )
    sinks = torch.randn(case.num_qo_heads, generator=generator) if case.sinks else None
    kv, scales, keys, values = _cache(case, seen, generator)

    def there(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(there, value))
        return value.to(device) if isinstance(value, Tensor) else value

    return ListInputs(
        case,
        there(queries),
        there(kv),
        {name: there(scale) for name, scale in scales.items()},
        type(lists).from_tensors([there(tensor) for tensor in lists.tensors]),
        there(seq_lens),
        there(qo_indptr),
        there(sinks),
        [[there(slots) for slots in heads] for heads in seen],
        there(keys),
        there(values),
    )


def extra_inputs(case: ListCase, device: str = "cpu") -> tuple[ListInputs, ListInputs]:
    """A call, and other lists over another cache for the same queries."""
    other = replace(case, k=case.k + 29, seed=case.seed + 1, num_pages=case.num_pages + 3)
    one, two = make_inputs(case, device), make_inputs(other, device)
    return one, replace(two, queries=one.queries, sinks=one.sinks)


def _index_lists(case: ListCase, rng: random.Random) -> tuple[Any, Seen, None, None]:
    n, k, heads = case.num_tokens, case.k, case.kv_heads
    num_slots = case.num_pages * case.page_size
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def draw(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator)

    # A few slots are listed often, so that there are repeats, and others never.
    pool = torch.randperm(num_slots, generator=generator)[: max(1, num_slots // 2)]
    counts = torch.tensor(_counts(case, rng, n, heads))
    lists = heads if case.own else 1
    entries = pool[draw(pool.shape[0], n, lists, k)]
    is_hole = torch.rand(n, lists, k, generator=generator) < case.holes
    is_hole[..., : case.first_holes] = True
    entries = torch.where(is_hole, torch.tensor([-1, -7, -(2**31)])[draw(3, n, lists, k)], entries)
    longest = counts if case.own else counts.amax(dim=1, keepdim=True)
    for t in case.outside:
        if t < n and longest[t, 0] > 0:
            entries[t, 0, longest[t, 0] // 2] = num_slots + rng.choice((0, 5))
    is_behind = torch.arange(k) >= longest[..., None]
    entries = torch.where(
        is_behind, torch.tensor(GARBAGE)[draw(len(GARBAGE), n, lists, k)], entries
    )
    seen: Seen = []
    for t in range(n):
        rows = [entries[t, h if case.own else 0, : counts[t, h]] for h in range(heads)]
        seen.append([None if bool((row >= num_slots).any()) else row[row >= 0] for row in rows])
    given = _given_counts(case, counts.tolist(), rng)
    slots = entries.int()
    return jitattn.IndexLists(slots if case.own else slots[:, 0], given), seen, None, None


def _counts(case: ListCase, rng: random.Random, n: int, heads: int) -> list[list[int]]:
    if case.counts is None:
        return [[case.k] * heads for _ in range(n)]
    counts = []
    for t in range(n):
        count = [0, case.k][t] if t < 2 else rng.randint(0, case.k)
        own = [rng.randint(0, case.k) for _ in range(heads)]
        counts.append(own if case.counts == "head" and t > 1 else [count] * heads)
    return counts


def _given_counts(case: ListCase, counts: list[list[int]], rng: random.Random) -> Tensor | None:
    """As tensors have them: less than 0 is 0, and more than k is k."""
    if case.counts is None:
        return None
    found = torch.tensor(counts, dtype=torch.int32)
    found[found == 0] = -rng.randint(0, 3)
    found[found == case.k] = case.k + rng.randint(0, 3)
    return found[:, 0].clone() if case.counts == "token" else found


def _page_lists(case: ListCase, rng: random.Random) -> tuple[Any, Seen, Tensor, Tensor]:
    n, k, heads, size = case.num_tokens, case.k, case.num_kv_heads, case.page_size
    pages = torch.zeros(n, heads, k, dtype=torch.int32)
    numbers = torch.zeros_like(pages)
    free = list(range(case.num_pages))
    rng.shuffle(free)
    counts, lens, starts, seen = [], [], [0], []
    for r in range(n):
        # Twice as many pages as a list has, as far as there are any, the last of them not full.
        own = [free.pop() for _ in range(min(2 * k, len(free) // (n - r)))]
        kv_len = 0 if r == 0 else (len(own) - 1) * size + rng.randint(1, size)
        q_len = rng.randint(1, case.q_lens) if r != 1 else case.q_lens
        lens.append(kv_len)
        starts.append(starts[-1] + q_len)
        chosen = [
            sorted(rng.sample(range(len(own)), rng.randint(0, min(k, len(own)))))
            for _ in range(heads)
        ]
        counts.append([len(found) for found in chosen])
        is_outside = [False] * heads
        for h, found in enumerate(chosen):
            entries = [own[i] for i in found]
            if entries and rng.random() < case.holes:
                entries[rng.randrange(len(entries))] = -rng.randint(1, 9)
            if r in case.outside and entries and h == 0:
                entries[-1], is_outside[h] = case.num_pages + rng.randint(0, 3), kv_len > 0
            pages[r, h] = torch.tensor(entries + [rng.choice(GARBAGE)] * (k - len(entries)))
            numbers[r, h] = torch.tensor(found + [rng.choice(GARBAGE)] * (k - len(found)))
        for i in range(q_len):
            seen.append(
                [
                    None
                    if is_outside[h]
                    else _slots_of(case, own, pages[r, h], chosen[h], kv_len, kv_len - q_len + i)
                    for h in range(heads)
                ]
            )
    given = _given_counts(replace(case, counts="head"), counts, rng)
    if case.counts is None:
        pages.masked_fill_(torch.arange(k) >= torch.tensor(counts)[..., None], -1)
        numbers.copy_(torch.where(pages < 0, numbers, numbers))
        given = None
    lists = jitattn.PageLists(pages, numbers, given)
    return lists, seen, *(torch.tensor(x, dtype=torch.int32) for x in (lens, starts))


def _slots_of(
    case: ListCase, own: list[int], pages: Tensor, chosen: list[int], kv_len: int, row: int
) -> Tensor:
    """Slots of the keys of chosen pages that a row of a request sees, by their positions."""
    slots = []
    for place, number in enumerate(chosen):
        if int(pages[place]) < 0:
            continue
        for t in range(case.page_size):
            key = number * case.page_size + t
            is_near = case.window_left < 0 or key >= row - case.window_left
            if key < kv_len and is_near and (key <= row or not case.causal):
                slots.append(own[number] * case.page_size + t)
    return torch.tensor(slots, dtype=torch.int64)


# --- caches ---------------------------------------------------------------------------------------


def _cache(
    case: ListCase, seen: Seen, generator: torch.Generator
) -> tuple[Any, dict[str, Any], Tensor, Tensor]:
    """The cache, its scales, and the values [num_slots, kv_heads, dim] that it stands for."""
    num_slots, heads = case.num_pages * case.page_size, case.kv_heads
    is_read = torch.zeros(num_slots, heads, dtype=torch.bool)
    for row in seen:
        for h, slots in enumerate(row):
            if slots is not None:
                is_read[slots, h] = True
    if case.latent:
        return _latent_cache(case, is_read[:, 0], generator)
    stored = getattr(torch, case.kv_dtype or case.dtype)
    shape = (num_slots, heads, case.head_dim)
    k, v = (torch.randn(shape, generator=generator).to(stored) for _ in range(2))
    has_scales = case.scales and stored.itemsize == 1
    factors = (0.7, torch.rand(heads, generator=generator) + 0.5) if has_scales else (1.0, 1.0)
    values = [t.double() * (f if isinstance(f, float) else f.double()[:, None])
              for t, f in zip((k, v), factors, strict=True)]  # fmt: skip
    for t in (k, v):
        _as_bits(t)[~is_read] = _nan_bits(stored)
    paged = [t.view(case.num_pages, case.page_size, heads, case.head_dim) for t in (k, v)]
    scales = dict(zip(("k_scale", "v_scale"), factors, strict=True)) if has_scales else {}
    if case.cache == "joint":
        return _stack(paged), scales, values[0], values[1]
    if case.cache == "padded":  # rows that begin at odd addresses
        paged = [_padded(t) for t in paged]
    return tuple(paged), scales, values[0], values[1]


def _latent_cache(
    case: ListCase, is_read: Tensor, generator: torch.Generator
) -> tuple[Any, dict[str, Any], Tensor, Tensor]:
    num_slots = case.num_pages * case.page_size
    latent = torch.randn(num_slots, 512, generator=generator)
    rope = torch.randn(num_slots, 64, generator=generator)
    scales: dict[str, Any] = {}
    dtype = getattr(torch, case.dtype)
    if case.form == "rows":
        blocks = latent.unflatten(1, (4, 128))
        factors = blocks.abs().amax(-1) / 448
        codes = (blocks / factors[..., None]).to(torch.float8_e4m3fn)
        rope = rope.to(torch.bfloat16)
        parts = (codes.flatten(1), factors, rope)
        rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        rows[~is_read] = 0xFF
        kv: Any = rows.view(case.num_pages, case.page_size, 656)
        latent = (codes.double() * factors.double()[..., None]).flatten(1)
    else:
        stored = torch.float8_e4m3fn if case.form == "fp8" else dtype
        factor = 1.5 if case.form == "fp8" and case.scales else 1.0
        latent, rope = latent.to(stored), rope.to(stored)
        both = torch.cat((latent.float(), rope.float()), dim=1).to(stored)
        _as_bits(both)[~is_read] = _nan_bits(stored)
        kv = both.view(case.num_pages, case.page_size, 576)
        if case.form == "pair":
            kv = tuple(part.contiguous() for part in kv.split((512, 64), dim=-1))
        if factor != 1.0:
            scales["k_scale"] = factor
        latent, rope = latent.double() * factor, rope.double() * factor
    keys = torch.cat((latent.double(), rope.double()), dim=1)[:, None]
    return kv, scales, keys, latent.double()[:, None]


def _as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _nan_bits(dtype: torch.dtype) -> float:
    return 0x7F if dtype.itemsize == 1 else math.nan


def _stack(pair: list[Tensor]) -> Tensor:
    bits = [_as_bits(t) for t in pair]
    return torch.stack(bits, dim=1).view(pair[0].dtype)


def _padded(tensor: Tensor) -> Tensor:
    bits = _as_bits(tensor)
    wide = torch.empty(*bits.shape[:-1], bits.shape[-1] + 3, dtype=bits.dtype)
    wide[..., 1:-2] = bits
    return wide.view(tensor.dtype)[..., 1:-2]


# --- what is right --------------------------------------------------------------------------------


def expected(inputs: ListInputs, *others: ListInputs) -> Expected:
    """By the definition, in float64; of ``others`` what they see besides, over their own caches."""
    case = inputs.case
    q = torch.cat([q.double() for q in inputs.queries], dim=-1)
    rows, heads, group = len(inputs.seen), case.num_qo_heads, case.num_qo_heads // case.kv_heads
    out = torch.zeros(rows, heads, inputs.values.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64, device=q.device)
    size, ceiling = torch.zeros_like(out), torch.zeros_like(out)
    scale = 0.05 if case.latent else case.head_dim**-0.5
    for row in range(rows):
        for h in range(case.kv_heads):
            own = slice(h * group, (h + 1) * group)
            parts = [(part.seen[row][h], part) for part in (inputs, *others)]
            if any(slots is None for slots, _ in parts):
                out[row, own], lse[row, own] = math.nan, math.nan
                continue
            k = torch.cat([part.keys[slots, h] for slots, part in parts])
            v = torch.cat([part.values[slots, h] for slots, part in parts])
            scores = q[row, own] @ k.T * scale
            if case.logits_soft_cap:
                scores = case.logits_soft_cap * torch.tanh(scores / case.logits_soft_cap)
            logits = scores
            if inputs.sinks is not None:
                logits = torch.cat((scores, inputs.sinks[own, None].double()), dim=1)
            if logits.shape[1] == 0:
                continue
            lse[row, own] = torch.logsumexp(logits, dim=1)
            p = torch.exp(scores - lse[row, own, None])
            out[row, own], size[row, own] = p @ v, p @ v.abs()
            ceiling[row, own] = v.abs().sum(dim=0)
    return Expected(out, lse, size, ceiling)


def check_lists(inputs: ListInputs, result: Result, *others: ListInputs) -> None:
    """Assert that rows are right, and NaN exactly where a list leaves the pool."""
    case, want = inputs.case, expected(inputs, *others)
    check_right(
        *(case.dtype, case.out_dtype, result, want),
        is_scaled=case.form == "rows",
        is_quantised=case.form in ("fp8", "rows") or case.kv_dtype not in (None, case.dtype),
    )


def check_right(
    dtype: str,
    out_dtype: str | None,
    result: Result,
    want: Expected,
    *,
    is_scaled: bool,
    is_quantised: bool,
) -> None:
    """Assert the same of rows that are NaN where a list leaves the pool.

    Scaled rows become 16-bit numbers, keys and values alike: scores are off, and with them p.
    """
    out, lse = result
    is_nan = want.lse.isnan()
    assert torch.equal(lse.isnan(), is_nan), "lse is NaN where a list leaves the pool"
    assert torch.equal(out.isnan().any(dim=-1), is_nan), "out is NaN there"
    assert torch.equal(out.isnan().all(dim=-1), is_nan), "out is NaN there"
    kept = ~is_nan
    found = Expected(want.out[kept][:, None], want.lse[kept][:, None],
                     want.magnitude[kept][:, None] * (4 if is_scaled else 1),
                     None if want.ceiling is None else want.ceiling[kept][:, None])  # fmt: skip
    loose = 0.02 if is_scaled else 0.0
    close = lse[kept].double() + (want.lse[kept] - lse[kept].double()).clamp(-loose, loose)
    close = torch.where(want.lse[kept] == -math.inf, lse[kept].double(), close).float()
    check_rounded(
        dtype, out_dtype, out[kept][:, None], close[:, None], found, is_quantised=is_quantised
    )


# --- cases ----------------------------------------------------------------------------------------


def random_case(seed: int) -> ListCase:
    """One of many, of small batches."""
    rng = random.Random(seed)
    kind = rng.choice(("indices", "indices", "latent", "pages"))
    base = ListCase(
        page_size=rng.choice((3, 64)),
        num_tokens=rng.randint(1, 9),
        holes=rng.choice((0.0, 0.1, 0.5, 1.0)),
        outside=tuple(t for t in range(9) if rng.random() < 0.1),
        batch_invariant=rng.random() < 0.2,
        out_dtype=rng.choice((None, "float32")),
        seed=seed,
    )
    if kind == "latent":
        return replace(
            base,
            latent=rng.choice((1, 8, 16, 17, 64, 65, 128)),
            form=rng.choice(("one", "pair", "fp8", "rows")),
            k=rng.choice((1, 63, 64, 65, 500, 2048, 4096)),
            counts=rng.choice((None, "token")),
            scales=rng.random() < 0.5,
            num_pages=rng.choice((9, 40)),
        )
    is_pages, head_dim = kind == "pages", rng.choice((64, 128))
    return replace(
        base,
        page_lists=is_pages,
        num_kv_heads=rng.choice((1, 2, 8)),
        group_size=rng.choice((1, 4, 8)),
        head_dim=head_dim,
        kv_dtype=rng.choice((None, "float8_e4m3fn")),
        k=rng.choice((1, 5, 16)) if is_pages else rng.choice((1, 63, 130, 1000, 4096)),
        own=rng.random() < 0.5,
        counts=rng.choice((None, "token", "head")),
        num_pages=rng.choice((40, 300)),
        q_lens=rng.choice((1, 3, 16)),
        causal=rng.random() < 0.8,
        window_left=rng.choice((-1, -1, 40)) if is_pages else -1,
        logits_soft_cap=20.0 if head_dim == 64 else 0.0,
        sinks=rng.random() < 0.5,
        scales=rng.random() < 0.5,
        cache=rng.choice(("joint", "pair", "padded")),
    )


NUM_EXAMPLES = int(os.environ.get("JITATTN_TEST_EXAMPLES", "300"))


def gpu_configs() -> list[PlannerConfig | MLAConfig]:
    """The arguments of the planners of the GPU tests, for a bundle: of a thousand seeds all."""
    found: dict[PlannerConfig | MLAConfig, None] = {}
    for case in (*GPU_CASES.values(), *map(random_case, range(1000))):
        kind = MLAConfig if case.latent else PlannerConfig
        config = kind.from_arguments(case.planner_arguments())
        # What kernels don't depend on would only make the list long.
        found[_of_kernels(config)] = None
    return list(found)


def _of_kernels(config: Any) -> Any:
    same = {"causal": True, "batch_invariant": False}
    if isinstance(config, MLAConfig):
        # Those of as many heads as a kernel has rows, of compute capability 9.0 and of others.
        num_heads = min(n for n in (16, 32, 64, 128) if config.num_heads <= n)
        return replace(config, num_heads=num_heads, sm_scale=None, **same)
    group = 8 * config.group_size if config.page_table == "page_lists" else 8
    return replace(
        config, num_qo_heads=min(group, 8), num_kv_heads=1, window_left=-1, use_sinks=False, **same
    )


BIG = ListCase(num_kv_heads=8, group_size=4, head_dim=128, page_size=64, num_tokens=40, k=2048)
GPU_CASES = {
    "grouped": replace(BIG, num_pages=300, outside=(7,), own=True, counts="head", sinks=True),
    "8 bits": replace(BIG, num_pages=300, kv_dtype="float8_e4m3fn", scales=True),
    "8 heads": ListCase(latent=8, num_tokens=40, k=2048, page_size=64, num_pages=200, outside=(9,)),
    "24 heads": ListCase(
        latent=24, num_tokens=40, k=2048, page_size=64, num_pages=200, first_holes=70
    ),
    "24 heads, rows": ListCase(
        latent=24, num_tokens=40, k=700, page_size=64, num_pages=200, form="rows"
    ),
    "128 heads": ListCase(latent=128, num_tokens=40, k=1500, page_size=64, num_pages=200),
    "rows": ListCase(latent=64, num_tokens=40, k=2048, page_size=64, num_pages=200, form="rows"),
    "pages": replace(BIG, page_lists=True, k=16, num_tokens=12, num_pages=600, outside=(5,)),
    "many query tokens": replace(
        BIG, page_lists=True, k=9, num_tokens=12, num_pages=600, q_lens=16, window_left=300
    ),
}
"""Larger batches, whose lists several CTAs share."""
