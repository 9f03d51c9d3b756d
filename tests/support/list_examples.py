"""Random lists over a few planners, made and judged on the device: thousands of examples a minute.

A form is a planner, so that a card has few kernels to load; an example is lists and a cache of a
seed, of any number of query tokens. What is right is computed for all rows at once, in float64 and
from the values that were stored: no table is read, and no code of the package.
"""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.registry import config_of
from jitattn.spec.config import MLAConfig, PlannerConfig
from tests.support.harness import Expected, Result
from tests.support.lists import GARBAGE, check_right

NUM_EXAMPLES = int(os.environ.get("JITATTN_TEST_EXAMPLES", "400"))
_BLOCK_DIMS = {"nvfp4": 16, "int4_g32": 32, "int4_g64": 64, "int4": 0}  # 0: a row
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Room(NamedTuple):
    """How large examples are.

    Attributes:
        widths: of lists, besides random ones.
        slots: the most of a pool.
        rows: the most query tokens that have lists.
        keys: elements of the keys that all rows see, at most: 8 bytes each, and V as many.
    """

    widths: tuple[int, ...]
    slots: int
    rows: int
    keys: int


ON_CARD = Room((1, 2, 7, 63, 64, 65, 130, 512, 1000, 2048, 4096), 6000, 300, 2**25)
ON_HOST = Room((1, 2, 7, 33, 64), 100, 6, 2**13)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A planner.

    Attributes:
        latent: heads of latent attention; 0 is grouped-query attention.
        rows: of a latent cache: "one", "pair", "fp8" or "rows", of 656 bytes.
        pages: whether lists are of pages.
    """

    latent: int = 0
    rows: str = "one"
    pages: bool = False
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    out_dtype: str | None = None
    kv_layout: str = "NHD"
    sinks: bool = False
    logits_soft_cap: float = 0.0
    window_left: int = -1
    causal: bool = True
    batch_invariant: bool = False

    @property
    def stored(self) -> str:
        if self.latent:
            return self.dtype if self.rows in ("one", "pair") else "float8_e4m3fn"
        return self.kv_dtype or self.dtype

    @property
    def heads(self) -> int:
        """Of K and V."""
        return 1 if self.latent else self.kv_heads

    @property
    def group_size(self) -> int:
        return self.latent or self.group

    @property
    def scale(self) -> float:
        return 0.05 if self.latent else self.head_dim**-0.5

    @property
    def dims(self) -> tuple[int, int]:
        """Of keys and of values."""
        return (576, 512) if self.latent else (self.head_dim, self.head_dim)

    def arguments(self) -> dict[str, Any]:
        shared = {
            "page_size": self.page_size,
            "q_dtype": self.dtype,
            "kv_dtype": self.stored,
            "out_dtype": self.out_dtype,
            "page_table": "page_lists" if self.pages else "indices",
            "causal": self.causal,
            "batch_invariant": self.batch_invariant,
        }
        if self.latent:
            return {"num_heads": self.latent, "sm_scale": self.scale} | shared
        return shared | {
            "num_qo_heads": self.kv_heads * self.group,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "kv_layout": self.kv_layout,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "use_sinks": self.sinks,
        }

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in vars(self).items()
                 if value != getattr(Form, name)]  # fmt: skip
        return ",".join(given)


@functools.cache
def planner_of(form: Form, device: str) -> Any:
    """The planner of a form, made once."""
    kind = jitattn.MLAPlanner if form.latent else jitattn.AttentionPlanner
    return kind(**form.arguments(), device=device)


_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
_WIDE = {"head_dim": 128, "kv_heads": 8, "group": 4}
FORMS = (
    *(Form(kv_heads=h, group=g) for h, g in ((1, 1), (1, 8), (4, 16), (2, 64), (128, 1))),
    Form(**_WIDE),
    Form(**_WIDE, kv_layout="HND", page_size=3),
    Form(**_WIDE, page_size=3, out_dtype="float32", sinks=True),
    Form(**_WIDE, kv_dtype=_E4M3),
    Form(**_WIDE, kv_dtype=_E4M3, sinks=True, batch_invariant=True),
    Form(head_dim=128, kv_heads=1, group=71, kv_dtype=_E5M2),
    Form(head_dim=128, kv_heads=2, group=8, kv_dtype="int8", page_size=3),
    Form(head_dim=128, kv_heads=4, group=8, kv_dtype="nvfp4"),
    Form(head_dim=128, kv_heads=2, group=16, kv_dtype="int4_g32"),
    Form(kv_dtype="int4"),
    Form(dtype="float16", logits_soft_cap=20.0, sinks=True),
    Form(dtype="float16", head_dim=128, kv_heads=2, group=5, batch_invariant=True),
    Form(kv_heads=3, group=7, kv_dtype=_E4M3, page_size=3, logits_soft_cap=20.0),
    *(Form(latent=n) for n in (1, 8, 16, 17, 64, 65, 128)),
    *(Form(latent=n, rows="rows") for n in (1, 16, 64, 128)),
    *(Form(latent=n, rows="fp8") for n in (8, 128)),
    *(Form(latent=n, rows="pair", page_size=3) for n in (16, 128)),
    Form(latent=16, out_dtype="float32", batch_invariant=True),
    Form(latent=128, dtype="float16"),
    *(Form(pages=True, **_WIDE, page_size=s) for s in (3, 16, 64)),
    Form(pages=True, **_WIDE, kv_dtype=_E4M3, sinks=True),
    Form(pages=True, kv_heads=2, group=8, window_left=40, page_size=16),
    Form(pages=True, kv_heads=1, group=64, causal=False),
    Form(pages=True, dtype="float16", logits_soft_cap=20.0, kv_layout="HND", page_size=16),
    Form(pages=True, head_dim=128, kv_heads=4, group=8, kv_dtype="nvfp4"),
    Form(pages=True, head_dim=128, kv_heads=2, group=8, kv_dtype="int4_g64"),
)
"""Planners of 1 to 128 query heads over every form of a cache."""


class Lists(NamedTuple):
    """What rows see.

    Attributes:
        value: ``IndexLists`` or ``PageLists``.
        slots: int64 [rows, heads, n], any where nothing is seen.
        seen: bool of the same shape.
        is_outside: bool [rows, heads], whether the list leaves the pool.
        seq_lens, qo_indptr, max_q_len: of lists of pages.
    """

    value: Any
    slots: Tensor
    seen: Tensor
    is_outside: Tensor
    seq_lens: Tensor | None = None
    qo_indptr: Tensor | None = None
    max_q_len: int = 1


@dataclass
class Example:
    """A call, its arguments and what they stand for; K and V as [num_slots, heads, dim]."""

    form: Form
    queries: tuple[Tensor, ...]
    kv: Any
    scales: dict[str, Any]
    lists: Lists
    sinks: Tensor | None
    keys: Tensor
    values: Tensor

    def run(self) -> Result:
        """Out and lse, of buffers that were NaN."""
        form, lists, q = self.form, self.lists, self.queries[0]
        planner = planner_of(form, q.device.type)
        out = torch.full(
            (*q.shape[:2], form.dims[1]), math.nan, device=q.device,
            dtype=getattr(torch, form.out_dtype or form.dtype),
        )  # fmt: skip
        lse = torch.full(q.shape[:2], math.nan, device=q.device)
        if lists.seq_lens is None:
            plan = planner.plan(lists.value, q.shape[0])
        else:
            most = lists.max_q_len
            plan = planner.plan(lists.value, lists.seq_lens, lists.qo_indptr, max_q_len=most)
        given = {} if self.sinks is None else {"sinks": self.sinks}
        plan.run(*self.queries, planner.bind(self.kv, **self.scales), out=out, lse=lse, **given)
        return out, lse

    def expected(self) -> Expected:
        """By the definition, all rows at once."""
        form, lists = self.form, self.lists
        q = torch.cat([q.double() for q in self.queries], dim=-1)
        q = q.unflatten(1, (form.heads, form.group_size))
        head = torch.arange(form.heads, device=q.device)[:, None]
        slots = lists.slots.masked_fill(~lists.seen, 0)
        k, v = self.keys[slots, head], self.values[slots, head]
        scores = q @ k.mT * form.scale
        if form.logits_soft_cap:
            scores = form.logits_soft_cap * torch.tanh(scores / form.logits_soft_cap)
        scores = scores.masked_fill(~lists.seen[:, :, None], -math.inf)
        logits = scores
        if self.sinks is not None:
            sinks = self.sinks.double().view(form.heads, form.group_size, 1)
            logits = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        lse = torch.logsumexp(logits, dim=-1)
        p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        ceiling = (lists.seen[:, :, None].double() @ v.abs()).expand(*p.shape[:-1], -1)
        out, size = p @ v, p @ v.abs()
        gone = lists.is_outside[..., None]
        out, lse = out.masked_fill(gone[..., None], math.nan), lse.masked_fill(gone, math.nan)
        return Expected(*(x.flatten(1, 2) for x in (out, lse, size, ceiling)))

    def check(self) -> None:
        """Run, and assert that rows are right, and NaN exactly where a list leaves the pool."""
        form = self.form
        check_right(
            *(form.dtype, form.out_dtype, self.run(), self.expected()),
            is_scaled=form.rows == "rows",
            is_quantised=form.stored != form.dtype,
        )


def make_example(form: Form, seed: int, device: str, room: Room) -> Example:
    """The example of a seed."""
    rng = random.Random(f"{form} {seed}")
    generator = torch.Generator(device).manual_seed(rng.randrange(2**31))
    draw = Draw(rng, generator, device)
    num_pages = max(1, rng.randint(1, room.slots) // form.page_size)
    lists = (_page_lists if form.pages else _index_lists)(form, draw, num_pages, room)
    rows, num_slots = lists.slots.shape[0], num_pages * form.page_size
    is_read = torch.zeros(num_slots, form.heads, dtype=torch.bool, device=device)
    counted = lists.seen & ~lists.is_outside[..., None]
    head = torch.arange(form.heads, device=device)[:, None].expand(counted.shape)
    is_read[lists.slots[counted], head[counted]] = True
    kv, scales, keys, values = (_latent_cache if form.latent else _cache)(form, draw, is_read)
    dims = (512, 64) if form.latent else (form.head_dim,)
    size = 1.5 if form.latent else 2.0
    queries = tuple(
        (size * draw.normal(rows, form.heads * form.group_size, dim)).to(getattr(torch, form.dtype))
        for dim in dims
    )
    sinks = draw.normal(form.heads * form.group_size) if form.sinks else None
    return Example(form, queries, kv, scales, lists, sinks, keys, values)


@dataclass
class Draw:
    """Random numbers of the host and of the device."""

    rng: random.Random
    generator: torch.Generator
    device: str

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator, device=self.device)

    def among(self, values: Sequence[int], *shape: int) -> Tensor:
        return torch.tensor(values, device=self.device)[self.below(len(values), *shape)]


# --- lists ----------------------------------------------------------------------------------------


def _index_lists(form: Form, draw: Draw, num_pages: int, room: Room) -> Lists:
    rng, num_slots = draw.rng, num_pages * form.page_size
    k = rng.choice((*room.widths, rng.randint(1, max(room.widths))))
    most = min(room.rows, max(1, room.keys // (k * form.heads * form.dims[0])))
    n = min(rng.choice((1, 1, 2, 3, 5, 8, 17, 64, 300)), most)
    has_own = not form.latent and rng.random() < 0.5
    lists = form.heads if has_own else 1
    # A few slots that come again and again, some, or all.
    pool = torch.randperm(num_slots, generator=draw.generator, device=draw.device)
    pool = pool[: rng.choice((1, 9, -(-num_slots // 2), num_slots))]
    entries = pool[draw.below(pool.shape[0], n, lists, k)]
    holes = rng.choice((0.0, 0.0, 0.1, 0.5, 1.0))
    is_hole = draw.uniform(n, lists, k) < holes
    entries = torch.where(is_hole, draw.among((-1, -7, -(2**31)), n, lists, k), entries)
    kind = rng.choice(("none", "token", "head"))
    counts = draw.below(k + 1, n, form.heads if kind == "head" else 1)
    ends = draw.uniform(*counts.shape)
    counts = torch.where(ends < 0.2, 0, torch.where(ends > 0.8, k, counts))
    if kind == "none":
        counts = torch.full_like(counts, k)
    longest = counts if has_own or kind != "head" else counts.amax(dim=1, keepdim=True)
    places = torch.arange(k, device=draw.device)
    is_behind = places >= longest[..., None].expand(n, lists, 1)
    entries = torch.where(is_behind, draw.among(GARBAGE, n, lists, k), entries)
    if rng.random() < 0.3:
        row, head, place = rng.randrange(n), rng.randrange(lists), rng.randrange(k)
        far = num_slots + rng.choice((0, 5, 10**6))
        here = is_behind[row, head, place]
        entries[row, head, place] = torch.where(here, entries[row, head, place], far)
    # What each head looks at.
    looked_at = places < counts[..., None].expand(n, form.heads, 1)
    slots = entries.expand(n, form.heads, k)
    is_outside = (looked_at & (slots >= num_slots)).any(dim=-1)
    seen = looked_at & (slots >= 0) & (slots < num_slots)
    given = None
    if kind != "none":  # less than 0 is 0, more than k is k
        given = counts.clone()
        given[counts == 0] -= rng.randint(0, 3)
        given[counts == k] += rng.randint(0, 3)
        given = given.int() if kind == "head" else given[:, 0].int()
    value = jitattn.IndexLists((entries if has_own else entries[:, 0]).int(), given)
    return Lists(value, slots, seen, is_outside)


def _page_lists(form: Form, draw: Draw, num_pages: int, room: Room) -> Lists:
    rng, size, heads = draw.rng, form.page_size, form.heads
    most = [k for k in (1, 2, 5, 16, 64) if k * size <= max(room.widths)] or [1]
    k, n = rng.choice(most), rng.choice((1, 2, 3, 8))
    q_most = rng.choice((1, 1, 2, 16))
    while n * q_most > 1 and n * q_most * k * size * heads * form.head_dim > room.keys:
        n, q_most = max(1, n - 1), max(1, q_most // 2)
    each = min(2 * k, num_pages // n)
    own = torch.randperm(num_pages, generator=draw.generator, device=draw.device)
    own = own[: n * each].view(n, each)
    held = draw.below(each + 1, n)
    lens = torch.where(held > 0, (held - 1) * size + 1 + draw.below(size, n), 0)
    # Each head chooses among the pages of a request, k at most, in ascending order.
    chance = rng.choice((0.3, 0.8, 1.1))
    numbers = torch.arange(each, device=draw.device).expand(n, heads, each)
    is_chosen = (draw.uniform(n, heads, each) < chance) & (numbers < held[:, None, None])
    numbers = numbers.masked_fill(~is_chosen, each + 1).sort(dim=-1).values
    numbers = torch.nn.functional.pad(numbers, (0, k), value=each + 1)[..., :k]
    counts = (numbers <= each).sum(dim=-1)
    places = torch.arange(k, device=draw.device)
    is_listed = places < counts[..., None]
    padded = torch.nn.functional.pad(own, (0, 2))
    ids = padded[:, None].expand(n, heads, -1).gather(2, numbers.clamp(max=each + 1))
    ids = torch.where(draw.uniform(n, heads, k) < rng.choice((0.0, 0.2)), -3, ids)
    if rng.random() < 0.3:
        place = rng.randrange(n), rng.randrange(heads), rng.randrange(k)
        ids[place] = num_pages + rng.choice((0, 9))
    is_outside = (is_listed & (ids >= num_pages)).any(dim=-1) & (lens > 0)[:, None]
    garbage = draw.among(GARBAGE, n, heads, k)
    has_counts = rng.random() < 0.7
    stored = torch.where(is_listed, ids, garbage if has_counts else -1)
    value = jitattn.PageLists(
        stored.int(),
        torch.where(is_listed, numbers, garbage).int(),
        counts.int() if has_counts else None,
    )
    q_lens = 1 + draw.below(q_most, n)
    offsets = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).int()
    request = torch.repeat_interleave(torch.arange(n, device=draw.device), q_lens)
    row = torch.arange(len(request), device=draw.device) - offsets[request]
    position = (lens - q_lens)[request] + row
    within = torch.arange(size, device=draw.device)
    slots = (ids[..., None] * size + within).flatten(2)[request]
    key = (numbers[..., None] * size + within).flatten(2)[request]
    seen = (is_listed & (ids >= 0) & (ids < num_pages)).repeat_interleave(size, dim=-1)[request]
    seen = seen & (key < lens[request][:, None, None])
    if form.causal:
        seen = seen & (key <= position[:, None, None])
    if form.window_left >= 0:
        seen = seen & (key >= position[:, None, None] - form.window_left)
    return Lists(value, slots, seen, is_outside[request], lens.int(), offsets, q_most)


# --- caches ---------------------------------------------------------------------------------------


def _cache(form: Form, draw: Draw, is_read: Tensor) -> tuple[Any, dict[str, Any], Tensor, Tensor]:
    """A cache that is NaN where nobody reads, its scales, and the values it stands for."""
    scales: dict[str, Any] = {}
    is_int8 = form.stored == "int8"  # whose numbers are large
    if is_int8 or (form.stored not in ("bfloat16", "float16") and draw.rng.random() < 0.7):
        factors = draw.uniform(form.heads) + 0.5
        scales = {"k_scale": 0.03 if is_int8 else 0.7, "v_scale": factors}
    if form.stored in _BLOCK_DIMS:
        (k, k_blocks, keys), (v, v_blocks, values) = (_blocks(form, draw, is_read) for _ in "kv")
        kv: Any = jitattn.QuantizedKV(k, v, k_blocks, v_blocks)
    else:
        stored, values_of = [], []
        for _ in "kv":
            values_of.append(_stored(form, draw, *is_read.shape, form.head_dim))
            bits = values_of[-1].clone()
            _as_bits(bits)[~is_read] = {1: 0x7F}.get(bits.itemsize, math.nan)
            stored.append(bits)
        keys, values = (x.double() for x in values_of)
        kv = _laid(form, draw, stored)
    for name, factor in scales.items():
        by_head = factor.double()[:, None] if isinstance(factor, Tensor) else factor
        keys, values = (keys * by_head, values) if name == "k_scale" else (keys, values * by_head)
    return kv, scales, keys, values


def _stored(form: Form, draw: Draw, *shape: int) -> Tensor:
    if form.stored == "int8":
        return (draw.below(81, *shape) - 40).to(torch.int8)
    return draw.normal(*shape).to(getattr(torch, form.stored))


def _laid(form: Form, draw: Draw, stored: Sequence[Tensor]) -> Any:
    """K and V in pages, as one tensor, a pair, in a pool of layers, or at odd strides."""
    k, v = (x.unflatten(0, (-1, form.page_size)) for x in stored)
    if form.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    kind = draw.rng.choice(("joint", "pair", "layers", "padded"))
    if kind == "pair":
        return k.contiguous(), v.contiguous()
    room = {"joint": (1, 0), "layers": (3, 0), "padded": (1, 3)}[kind]
    shape = k.shape[0], room[0], 2, *k.shape[1:-1], k.shape[-1] + room[1]
    memory = torch.zeros(shape, dtype=torch.uint8, device=k.device).repeat_interleave(
        k.itemsize, dim=-1
    )
    pool = memory.view(k.dtype)[:, room[0] // 2, ..., : k.shape[-1]]
    _as_bits(pool)[:, 0], _as_bits(pool)[:, 1] = _as_bits(k), _as_bits(v)
    return pool if draw.rng.random() < 0.7 else (pool[:, 0], pool[:, 1])


def _blocks(form: Form, draw: Draw, is_read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four bits an element, the scales of blocks, both in pages, and what they stand for.

    16 bits have the values, whatever a kernel makes of them.
    """
    codes = draw.below(16, *is_read.shape, form.head_dim)
    dims = _BLOCK_DIMS[form.stored] or form.head_dim
    blocks, shape = codes.unflatten(-1, (-1, dims)), (*is_read.shape, form.head_dim // dims)
    if form.stored == "nvfp4":
        scales = (draw.uniform(*shape) + 0.1).to(torch.float8_e4m3fn)
        table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.float64)
        values = table.to(codes.device)[blocks] * scales.double()[..., None]
    else:
        sizes = torch.exp2(-2.0 - draw.below(3, *shape))
        scales = torch.stack((sizes, sizes * -draw.below(16, *shape)), dim=-1).half()
        values = blocks * scales[..., :1].double() + scales[..., 1:].double()
    _as_bits(scales)[~is_read] = {1: 0x7F}.get(scales.itemsize, math.nan)
    data = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    paged = [x.unflatten(0, (-1, form.page_size)) for x in (data, scales)]
    return paged[0], paged[1], values.flatten(-2)


def _latent_cache(
    form: Form, draw: Draw, is_read: Tensor
) -> tuple[Any, dict[str, Any], Tensor, Tensor]:
    num_slots, size = is_read.shape[0], form.page_size
    latent, rope = draw.normal(num_slots, 512), draw.normal(num_slots, 64)
    gone, scales = ~is_read[:, 0], {}
    if form.rows == "rows":
        blocks = latent.unflatten(1, (4, 128))
        factors = blocks.abs().amax(-1) / 448
        codes = (blocks / factors[..., None]).to(torch.float8_e4m3fn)
        turned = rope.to(torch.bfloat16)
        parts = codes.flatten(1), factors, turned
        rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        rows[gone] = 0xFF
        kv: Any = rows.unflatten(0, (-1, size))
        values, keys_pe = (codes.double() * factors.double()[..., None]).flatten(1), turned.double()
    else:
        stored = getattr(torch, form.stored)
        both = torch.cat((latent, rope), dim=1).to(stored)
        factor = 1.5 if form.rows == "fp8" and draw.rng.random() < 0.5 else 1.0
        scales = {} if factor == 1.0 else {"k_scale": factor}
        values, keys_pe = (x.double() * factor for x in both.split((512, 64), dim=1))
        _as_bits(both)[gone] = {1: 0x7F}.get(both.itemsize, math.nan)
        kv = both.unflatten(0, (-1, size))
        if form.rows == "pair":
            kv = tuple(part.contiguous() for part in kv.split((512, 64), dim=-1))
    keys = torch.cat((values, keys_pe), dim=1)[:, None]
    return kv, scales, keys, values[:, None]


def _as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def gpu_configs() -> list[PlannerConfig | MLAConfig]:
    """The planners, for a bundle."""
    return [
        MLAConfig.from_arguments(form.arguments()) if form.latent else config_of(form.arguments())
        for form in FORMS
    ]
