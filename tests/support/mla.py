"""Cases of multi-head latent attention, their tensors in poisoned memory, and what is right.

As in tests/support/inputs.py, slots that no request owns are NaN, entries that must not be read are
garbage, pages are dealt at random, and out and lse start as NaN. `expected` computes in numpy
from the dense tokens: it reads neither tables nor strides nor scales, and shares no code with
jitattn/kernels/mla/reference.py.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import jitattn
from jitattn.kernels.mla.tile import NARROW_ROWS
from jitattn.spec.config import MLAConfig
from jitattn.tensors.page_table_base import PageTable
from tests.support.harness import Expected, check_rounded, same_bits
from tests.support.inputs import given_table
from tests.support.variant_values import Params, changed, params_of
from tests.support.variants import VARIANTS

FORMS = ("one", "pair", "fp8_one", "fp8_pair", "fp8_mixed", "fp8_rows")
"""What holds latents and rope parts; a mixed pair has 16-bit rope parts, rows hold scales."""
TABLES = ("shared", "separate", "csr", "token", "ragged")
SCALE_BLOCK = 128
DEAD_PAGES = 3
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(frozen=True, kw_only=True)
class MLACase:
    """One call: what the planner is given and how the memory looks.

    Attributes:
        form: one of `FORMS`.
        layout: how the cache's tensors lie, a key of `LAYOUTS`.
        spare_rows: rows of q past the last request, which only offsets of queries allow.
        scale: the form of k_scale of an FP8 cache: None, "number", "0d" or "1d".
        q_view: how the queries lie: "contiguous", "joint" or "heads_outside".
        variant: the name of a variant of tests/support/variants.py, or None.
        rises: of each request: what scores of 64 tokens exceed those of the 64 before by, in
            log2 units.
        level: what all scores are larger by, in log2 units. Queries and tokens are whole numbers
            then, so that scores are exact, and their differences too.
    """

    num_heads: int = 16
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    form: str = "one"
    layout: str = "contiguous"
    page_table: str = "shared"
    lengths: tuple[int, ...] = (70, 0, 5)
    q_lens: tuple[int, ...] | None = None
    spare_rows: int = 0
    causal: bool = True
    sm_scale: float = 192**-0.5
    scale: str | None = None
    rows: str | None = None
    lengths_dtype: str = "int32"
    q_view: str = "contiguous"
    variant: str | None = None
    rises: tuple[float, ...] = ()
    level: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.q_lens is None and self.spare_rows:
            raise ValueError(
                f"spare_rows is {self.spare_rows} without q_lens: q has a row for each request then"
            )

    @property
    def is_fp8(self) -> bool:
        return self.form.startswith("fp8")

    @property
    def is_pair(self) -> bool:
        return self.form in ("pair", "fp8_pair", "fp8_mixed")

    @property
    def queries(self) -> tuple[int, ...]:
        return (1,) * len(self.lengths) if self.q_lens is None else self.q_lens

    def planner_arguments(self) -> dict[str, object]:
        return {
            "num_heads": self.num_heads,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "page_size": None if self.page_table == "ragged" else self.page_size,
            "sm_scale": self.sm_scale,
            "q_dtype": self.dtype,
            "kv_dtype": "float8_e4m3fn" if self.is_fp8 else self.dtype,
            "out_dtype": self.out_dtype,
            "page_table": self.page_table,
            "causal": self.causal,
            "variant": None if self.variant is None else VARIANTS[self.variant],
        }

    def planner(self, device: str) -> jitattn.MLAPlanner:
        return jitattn.MLAPlanner(**self.planner_arguments(), device=device)


# --- memory ---------------------------------------------------------------------------------------

Alloc = Callable[[int, int, int, Callable[..., Tensor]], Tensor]
LAYOUTS: dict[str, Alloc] = {
    "contiguous": lambda n, p, w, full: full(n, p, w),
    "layers": lambda n, p, w, full: full(n, 3, p, w)[:, 1],
    "layer_inside": lambda n, p, w, full: full(n, p, 3, w)[:, :, 2],
    "padded": lambda n, p, w, full: full(n, p, w + 16)[..., 8 : 8 + w],
    "tokens_outside": lambda n, p, w, full: full(p, n, w).transpose(0, 1),
    "odd": lambda n, p, w, full: full(n, p, w + 3)[..., 1 : 1 + w],
    "unequal": lambda n, p, w, full: full(n, p + w % 5, w + 8 * (w % 3))[:, :p, :w],
}
"""[num_pages, page_size, width] of NaN in memory of that shape or more."""


def poisoned(case: MLACase, num_pages: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """A NaN tensor [num_pages, page_size, width]; bytes are NaN in every type."""

    def full(*shape: int) -> Tensor:
        if dtype in (torch.uint8, torch.float8_e4m3fn):
            return torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    page_size = 1 if case.page_table == "ragged" else case.page_size
    return LAYOUTS[case.layout](num_pages, page_size, width, full).view(dtype)


def write(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [n, width] at slots of a pool."""
    if pool.element_size() == 1:
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool[slots // pool.shape[1], slots % pool.shape[1]] = rows


@dataclass
class MLAInputs:
    """Everything a call takes, and the dense values for `expected`."""

    case: MLACase
    q_nope: Tensor
    q_pe: Tensor
    latent: Tensor  # float64 values [total, kv_lora_rank]
    rope: Tensor
    kv: Tensor | tuple[Tensor, Tensor]
    k_scale: float | Tensor | None
    table: Tensor
    indptr: Tensor | None
    rows: Tensor | None
    seq_lens: Tensor
    qo_indptr: Tensor | None

    @functools.cached_property
    def variant_params(self) -> Params | None:
        """What the case's variant is given."""
        case, device = self.case, self.q_nope.device
        return params_of(case.variant, case.num_heads, 1, case.seed, device)

    def pages(self) -> PageTable:
        return given_table(self.case.page_table, self.table, self.indptr, self.rows)

    def plan(self, planner: jitattn.MLAPlanner) -> jitattn.types.MLAPlan:
        queries = {} if self.qo_indptr is None else {"max_q_len": max(self.case.queries)}
        return planner.plan(self.pages(), self.seq_lens, self.qo_indptr, **queries)

    def run(self, planner: jitattn.MLAPlanner | None = None) -> tuple[Tensor, Tensor]:
        """Out and lse, of buffers that were NaN."""
        case = self.case
        planner = planner or case.planner(str(self.q_nope.device))
        dtype = getattr(torch, case.out_dtype or case.dtype)
        out = torch.full_like(self.q_nope, math.nan, dtype=dtype)
        lse = self.q_nope.new_full(self.q_nope.shape[:2], math.nan, dtype=torch.float32)
        kv = planner.bind(self.kv, k_scale=self.k_scale)
        given = {"out": out, "lse": lse, "variant_params": self.variant_params}
        found = self.plan(planner).run(self.q_nope, self.q_pe, kv, **given)
        assert found is out
        return out, lse


def make_inputs(case: MLACase, device: str = "cpu") -> MLAInputs:
    """Random tokens in a poisoned cache."""
    rng, generator = random.Random(case.seed), torch.Generator(device).manual_seed(case.seed)
    lengths = [max(0, length) for length in case.lengths]
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    num_tokens = sum(case.queries) + case.spare_rows
    q_std = 2.0 / (case.sm_scale * math.sqrt(case.kv_lora_rank + case.qk_rope_head_dim))
    q_nope, q_pe = queries_of(case, num_tokens, device)
    for q in (q_nope, q_pe):
        q.copy_(min(q_std, 8.0) * normal(*q.shape))
        q[sum(case.queries) :] = math.nan
    firsts, num_pages = first_pages(case, lengths, rng)
    latent_slots, latent_ids = deal(case, lengths, firsts, num_pages, rng)
    rope_slots, rope_ids = latent_slots, [[rng.choice(GARBAGE)] * len(x) for x in latent_ids]
    if case.is_pair and case.page_table == "separate":
        rope_slots, rope_ids = deal(case, lengths, firsts, num_pages, rng)
    store = Store(case, num_pages, latent_slots.to(device), rope_slots.to(device))
    tokens = normal(total, case.kv_lora_rank), normal(total, case.qk_rope_head_dim)
    if case.rises or case.level:
        lift(case, (q_nope, q_pe), tokens)
    kv, k_scale, latent, rope = store.fill(*tokens, generator)
    table, rows = list_pages(case, latent_ids, rope_ids, firsts, rng)
    has_indptr = case.page_table in ("csr", "ragged")
    starts = np.cumsum((0, *case.queries))
    return MLAInputs(
        case=case,
        q_nope=q_nope,
        q_pe=q_pe,
        latent=latent,
        rope=rope,
        kv=kv,
        k_scale=k_scale,
        table=table.to(device),
        indptr=torch.tensor(firsts, dtype=torch.int32, device=device) if has_indptr else None,
        rows=None if rows is None else rows.to(device),
        seq_lens=torch.tensor(case.lengths, device=device).to(getattr(torch, case.lengths_dtype)),
        qo_indptr=None
        if case.q_lens is None
        else torch.tensor(starts, dtype=torch.int32, device=device),
    )


_RISING, _LEVEL = 8.0, 512.0
"""The first two numbers of every query's rope part, where scores rise or have a level."""


def lift(case: MLACase, queries: tuple[Tensor, Tensor], tokens: tuple[Tensor, Tensor]) -> None:
    """Write rises and the level of scores into the first two numbers of rope parts."""
    (q_nope, q_pe), (latent, rope) = queries, tokens
    num_rows, unit = sum(case.queries), case.sm_scale / math.log(2.0)
    if case.level:
        for part in (q_nope[:num_rows], q_pe[:num_rows], latent, rope):
            part.round_()
    q_pe[:num_rows, :, 0], q_pe[:num_rows, :, 1] = _RISING, _LEVEL if case.level else 0.0
    first = 0
    for length, rise in zip(case.lengths, case.rises or (0.0,) * len(case.lengths), strict=True):
        steps = torch.arange(max(length, 0), device=rope.device) // 64
        rope[first : first + steps.numel(), 0] = (steps * rise / (unit * _RISING)).round()
        first += steps.numel()
    rope[:, 1] = round(case.level / (unit * _LEVEL))


def queries_of(case: MLACase, num_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Uninitialised q_nope and q_pe in the case's view."""
    dtype = getattr(torch, case.dtype)
    rank, rope, heads = case.kv_lora_rank, case.qk_rope_head_dim, case.num_heads

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if case.q_view == "joint":  # what the projections write into
        joint = empty(num_tokens, heads, rank + rope)
        return joint[..., :rank], joint[..., rank:]
    if case.q_view == "heads_outside":
        nope, pe = empty(heads, num_tokens, rank), empty(heads, num_tokens, rope)
        return nope.transpose(0, 1), pe.transpose(0, 1)
    return empty(num_tokens, heads, rank), empty(num_tokens, heads, rope)


def first_pages(case: MLACase, lengths: list[int], rng: random.Random) -> tuple[list[int], int]:
    """Where the pages of each request begin, with room between some, and how many there are."""
    size = 1 if case.page_table == "ragged" else case.page_size
    firsts = [0]
    for length in lengths:
        firsts.append(firsts[-1] + -(-length // size) + rng.choice((0, 0, 1)))
    return firsts, firsts[-1] + DEAD_PAGES


def deal(
    case: MLACase, lengths: list[int], firsts: list[int], num_pages: int, rng: random.Random
) -> tuple[Tensor, list[list[int]]]:
    """The slot of every token, and the entries that say so for each request."""
    size = 1 if case.page_table == "ragged" else case.page_size
    slots: list[int] = []
    entries: list[list[int]] = []
    pages = list(range(num_pages))
    rng.shuffle(pages)
    places = list(range(num_pages * size))
    rng.shuffle(places)
    for length, first in zip(lengths, firsts, strict=False):
        if case.page_table == "token":
            own = [places.pop() for _ in range(length)]
            entries.append(own)
        elif case.page_table == "ragged":
            own = list(range(first, first + length))
            entries.append([])
        else:
            ids = [pages.pop() for _ in range(-(-length // size))]
            own = [ids[t // size] * size + t % size for t in range(length)]
            entries.append(ids)
        slots += own
    return torch.tensor(slots, dtype=torch.int64), entries


def list_pages(
    case: MLACase,
    latent_ids: list[list[int]],
    rope_ids: list[list[int]],
    firsts: list[int],
    rng: random.Random,
) -> tuple[Tensor, Tensor | None]:
    """The table, with garbage wherever nobody may look, and the rows of requests."""
    if case.page_table in ("csr", "ragged"):
        flat = [rng.choice(GARBAGE) for _ in range(firsts[-1] + 2)]
        for ids, first in zip(latent_ids, firsts, strict=False):
            flat[first : first + len(ids)] = ids
        return torch.tensor(flat, dtype=torch.int32), None
    width = max(map(len, latent_ids)) + rng.randint(0, 2)
    num_rows = len(latent_ids) + (2 if case.rows else 0)
    order = rng.sample(range(num_rows), len(latent_ids)) if case.rows else range(len(latent_ids))
    table = [
        [[rng.choice(GARBAGE) for _ in range(width)] for _ in range(2)] for _ in range(num_rows)
    ]
    for b, row in enumerate(order):
        for which, ids in enumerate((latent_ids[b], rope_ids[b])):
            table[row][which][: len(ids)] = ids
    found = torch.tensor(table, dtype=torch.int32).view(num_rows, 2, width)
    rows = torch.tensor(list(order), dtype=getattr(torch, case.rows)) if case.rows else None
    return (found if case.page_table == "separate" else found[:, 0]), rows


@dataclass
class Store:
    """Fills a cache of a form."""

    case: MLACase
    num_pages: int
    latent_slots: Tensor
    rope_slots: Tensor

    def fill(
        self, latent: Tensor, rope: Tensor, generator: torch.Generator
    ) -> tuple[Tensor | tuple[Tensor, Tensor], float | Tensor | None, Tensor, Tensor]:
        """The cache, k_scale, and what the stored tokens stand for."""
        case, device = self.case, str(latent.device)
        dtype = getattr(torch, case.dtype)
        if case.form == "fp8_rows":
            return self._rows(latent, rope, generator)
        stored = torch.float8_e4m3fn if case.is_fp8 else dtype
        latent, rope = latent.to(stored), rope.to(dtype if case.form == "fp8_mixed" else stored)
        if case.is_pair:
            parts = (latent, rope)
            slots = (self.latent_slots, self.rope_slots)
            kv = tuple(poisoned(case, self.num_pages, x.shape[1], x.dtype, device) for x in parts)
            for pool, at, part in zip(kv, slots, parts, strict=True):
                write(pool, at, part)
        else:
            width = case.kv_lora_rank + case.qk_rope_head_dim
            kv = poisoned(case, self.num_pages, width, stored, device)
            joint = torch.cat((latent.view(as_bits(stored)), rope.view(as_bits(stored))), dim=1)
            write(kv, self.latent_slots, joint.view(stored))
        scale = {None: None, "number": 0.37, "0d": torch.tensor(1.7), "1d": torch.tensor([0.6])}[
            case.scale
        ]
        factor = 1.0 if scale is None else float(scale)
        if isinstance(scale, Tensor):
            scale, factor = scale.to(device), float(scale)
        rope_factor = 1.0 if case.form == "fp8_mixed" else factor
        kv = without_pages(case, kv)
        return kv, scale, latent.double() * factor, rope.double() * rope_factor

    def _rows(
        self, latent: Tensor, rope: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, None, Tensor, Tensor]:
        case, total = self.case, latent.shape[0]
        num_scales = case.kv_lora_rank // SCALE_BLOCK
        scales = 0.01 + torch.rand(total, num_scales, generator=generator, device=latent.device)
        stored, rope = (latent / 0.5).to(torch.float8_e4m3fn), rope.bfloat16()
        parts = stored, scales, rope
        rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        kv = poisoned(case, self.num_pages, rows.shape[1], torch.uint8, str(latent.device))
        write(kv, self.latent_slots, rows)
        blocks = stored.double().view(total, num_scales, SCALE_BLOCK) * scales.double()[..., None]
        return without_pages(case, kv), None, blocks.flatten(1), rope.double()


def as_bits(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype.itemsize == 1 else torch.int16


def without_pages(
    case: MLACase, kv: Tensor | tuple[Tensor, Tensor]
) -> Tensor | tuple[Tensor, Tensor]:
    """The cache as the planner is given it: a ragged one has no dimension of pages."""
    if case.page_table != "ragged":
        return kv
    return kv[:, 0] if isinstance(kv, Tensor) else (kv[0][:, 0], kv[1][:, 0])


# --- what is right --------------------------------------------------------------------------------


def expected(inputs: MLAInputs) -> tuple[Tensor, Tensor]:
    """Out and lse in float64, on the CPU."""
    want = expected_with_magnitude(inputs)
    return want.out, want.lse


def has_warpgroups(device: torch.device) -> bool:
    """Whether products of warpgroups compute there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def expected_with_magnitude(inputs: MLAInputs, *, rounds_rows: bool = False) -> Expected:
    """The same and the scales of errors, with all products of a request at once and a mask.

    ``rounds_rows``: latents are multiplied with the scales of their rows, and rounded, before they
    are used.
    """
    case = inputs.case
    q = np.concatenate([x.double().cpu().numpy() for x in (inputs.q_nope, inputs.q_pe)], axis=2)
    latent = inputs.latent
    if rounds_rows:
        latent = latent.to(getattr(torch, case.dtype))
    tokens = [x.double().cpu().numpy() for x in (latent, inputs.rope)]
    keys, values = np.concatenate(tokens, axis=1), tokens[0]
    out = np.zeros((q.shape[0], case.num_heads, case.kv_lora_rank))
    magnitude, ceiling = np.zeros_like(out), np.zeros_like(out)
    lse = np.full((q.shape[0], case.num_heads), -np.inf)
    row = key = 0
    for b, (q_len, length) in enumerate(zip(case.queries, case.lengths, strict=True)):
        kv_len = max(length, 0)
        positions = kv_len - q_len + np.arange(q_len)
        seen = np.arange(kv_len)[None] <= (positions[:, None] if case.causal else kv_len)
        scores = case.sm_scale * np.einsum(
            "rhd,kd->hrk", q[row : row + q_len], keys[key : key + kv_len], optimize=True
        )
        if case.variant is not None:
            scores = _varied(inputs, b, scores, positions)
        scores = np.where(seen[None], scores, -np.inf)
        tops = scores.max(axis=2, initial=-1e300, keepdims=True)  # some see none
        weights = np.exp(scores - tops)
        total = weights.sum(axis=2)
        with np.errstate(divide="ignore"):
            lse[row : row + q_len] = (np.log(total) + tops[..., 0]).T
        share = weights / np.where(total == 0.0, 1.0, total)[..., None]
        seen_values = values[key : key + kv_len]
        out[row : row + q_len] = np.einsum("hrk,kd->rhd", share, seen_values, optimize=True)
        magnitude[row : row + q_len] = np.einsum(
            "hrk,kd->rhd", share, np.abs(seen_values), optimize=True
        )
        largest = share.max(axis=2, initial=0.0).T[..., None]
        ceiling[row : row + q_len] = largest * (seen @ np.abs(seen_values))[:, None]
        row, key = row + q_len, key + kv_len
    return Expected(*map(torch.from_numpy, (out, lse, magnitude, ceiling)))


def _varied(
    inputs: MLAInputs, request: int, scores: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Scores [num_heads, num_rows, num_keys] after the case's variant."""
    case, params = inputs.case, inputs.variant_params
    assert params is not None
    new = changed(
        case.variant,
        {k: v.cpu() if isinstance(v, Tensor) else v for k, v in params.items()},
        torch.from_numpy(scores).transpose(0, 1),
        torch.from_numpy(positions).view(-1, 1, 1),
        torch.arange(scores.shape[2]),
        qo_len=case.queries[request],
        kv_len=scores.shape[2],
        request=request,
        group_size=case.num_heads,
    )
    return new.transpose(0, 1).numpy()


EPSILON = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-20}


def check(inputs: MLAInputs, out: Tensor, lse: Tensor) -> None:
    """Compare what a call gave with `expected`."""
    want_out, want_lse = expected(inputs)
    epsilon = EPSILON[inputs.case.out_dtype or inputs.case.dtype]
    torch.testing.assert_close(out.double().cpu(), want_out, rtol=epsilon, atol=1e-6)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-6, atol=1e-5)


def check_kernel(
    inputs: MLAInputs,
    out: Tensor,
    lse: Tensor,
    *,
    warpgroups: bool | None = None,
    batch_invariant: bool = False,
) -> None:
    """The same of what rounds probabilities to q_dtype.

    ``warpgroups``: whether the card has these; None is as where the inputs are.
    """
    case = inputs.case
    if warpgroups is None:
        warpgroups = has_warpgroups(inputs.q_nope.device)
    # Their kernel multiplies scaled keys, which are rounded; that of few rows scales what it got.
    is_narrow = max(case.queries) * case.num_heads <= NARROW_ROWS[-1] and not batch_invariant
    rounds_rows = warpgroups and case.form == "fp8_rows" and not is_narrow
    want = expected_with_magnitude(inputs, rounds_rows=rounds_rows)
    if case.level:  # a float32 of that size is coarse
        torch.testing.assert_close(lse.double().cpu(), want.lse, rtol=1e-6, atol=0)
        lse = want.lse.float()
        want = replace(want, lse=lse.double())
    check_rounded(case.dtype, case.out_dtype, out.cpu(), lse.cpu(), want)


def check_case(case: MLACase, device: str = "cpu") -> None:
    inputs = make_inputs(case, device)
    check(inputs, *inputs.run())


# --- random cases ---------------------------------------------------------------------------------

_LENGTHS = st.one_of(
    st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 129]),
    st.integers(0, 200),
    st.sampled_from([0, -1, -(2**31)]),
)
_Q_LENS = st.one_of(st.integers(1, 4), st.integers(0, 40))


@st.composite
def cases(draw: st.DrawFn) -> MLACase:
    """Any of them, small enough for the reference."""
    form, page_table = draw(st.sampled_from(FORMS)), draw(st.sampled_from(TABLES))
    batch = draw(st.lists(st.tuples(_Q_LENS, _LENGTHS), min_size=1, max_size=4))
    q_lens, lengths = zip(*batch, strict=True)
    q_lens = draw(st.sampled_from([None, q_lens]))
    layouts = [name for name in LAYOUTS if name != "odd" or form != "fp8_rows"]
    has_scale = form.startswith("fp8") and form != "fp8_rows"
    has_rows = page_table in ("shared", "separate", "token")
    return MLACase(
        num_heads=draw(st.sampled_from([1, 3, 16, 16, 128])),
        kv_lora_rank=draw(st.sampled_from([256, 512])),
        qk_rope_head_dim=draw(st.sampled_from([32, 64])),
        page_size=draw(st.sampled_from([1, 2, 7, 16, 32, 64, 100, 128])),
        dtype=draw(st.sampled_from(["bfloat16", "bfloat16" if form == "fp8_rows" else "float16"])),
        out_dtype=draw(st.sampled_from([None, "float32", "bfloat16", "float16"])),
        form=form,
        layout=draw(st.sampled_from(layouts)),
        page_table=page_table,
        lengths=lengths,
        q_lens=q_lens,
        spare_rows=0 if q_lens is None else draw(st.sampled_from([0, 2])),
        causal=draw(st.booleans()),
        sm_scale=draw(st.sampled_from([192**-0.5, 0.02, 0.3])),
        scale=draw(st.sampled_from([None, "number", "0d", "1d"])) if has_scale else None,
        rows=draw(st.sampled_from([None, "int32", "int64"])) if has_rows else None,
        lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        q_view=draw(st.sampled_from(["contiguous", "joint", "heads_outside"])),
        seed=draw(st.integers(0, 1000)),
    )


# --- the cases of a card --------------------------------------------------------------------------

# Splits, whole units, empty and short requests; a prefill beside decodes.
LONG = (4097, 64, 0, 1, 700, 63, -1)
MIXED_LONG = (1, 2, 1, 0, 150, 63, 2)
ON_A_CARD = MLACase(page_size=16, lengths=LONG, q_lens=MIXED_LONG, spare_rows=3)
DECODE_ON_A_CARD = replace(ON_A_CARD, q_lens=None, spare_rows=0)


# Later tiles exceed the maximum of earlier ones by more than probabilities may, by as much in two
# tiles, by little, and never.
RISING_ON_A_CARD = replace(
    DECODE_ON_A_CARD, lengths=(700, 4097, 1900, 700, 64), rises=(20.0, 5.0, 1.0, -6.0, 0.0)
)
HEADS_OF_ROWS = {16: 12, 32: 24, 64: 40}
"""Heads whose tokens have the kernel of so many query rows."""


def few_rows_on_a_card() -> list[MLACase]:
    """Of 16 rows, and of 32: a token's of 24 heads, and those of two tokens of 16."""
    one, more = DECODE_ON_A_CARD, replace(ON_A_CARD, q_lens=(2, 1, 2, 0, 2, 1, 2))
    found = [replace(one, form=form, num_heads=n) for form in FORMS for n in (16, 24)]
    found += [replace(more, form=form) for form in FORMS]
    found += [replace(one, num_heads=24, page_table=table) for table in TABLES]
    found += [replace(one, num_heads=n, page_size=size) for n in (16, 32) for size in (1, 64)]
    found += [
        replace(more, dtype="float16", out_dtype="float32"),
        replace(more, form="fp8_mixed", page_size=64, scale="1d"),
        replace(more, form="fp8_rows", page_size=64),
        replace(one, form="fp8_rows", num_heads=32, kv_lora_rank=256),
        replace(one, num_heads=20, kv_lora_rank=256, qk_rope_head_dim=32),
        replace(one, num_heads=24, layout="odd", q_view="heads_outside", sm_scale=-0.05),
        replace(one, num_heads=24, lengths=(17000,)),
    ]
    return found


def rising_on_a_card() -> list[MLACase]:
    """Near 0, where rows of one tensor have 16 bits, and so far that digits are missing."""
    found = []
    for num_heads in HEADS_OF_ROWS.values():
        case = replace(RISING_ON_A_CARD, num_heads=num_heads)
        found += [replace(case, form=form) for form in ("fp8_one", "fp8_mixed", "fp8_rows")]
        found.append(replace(case, dtype="float16"))
        found += [
            replace(case, form=form, level=level)
            for form in ("one", "fp8_one")
            for level in (15_000.0, -15_000.0)
        ]
    return found


def gpu_cases() -> list[MLACase]:
    """What tests/gpu/test_mla.py compares with `expected`."""
    base, decode = ON_A_CARD, DECODE_ON_A_CARD
    found = [replace(base, form=form, page_table=table) for form in FORMS for table in TABLES]
    found += [
        replace(base, form=form, layout=layout, page_table="separate", scale=scale)
        for form in FORMS
        for layout in LAYOUTS
        if layout != "odd" or form != "fp8_rows"
        for scale in (("1d",) if form in ("fp8_one", "fp8_pair", "fp8_mixed") else (None,))
    ]
    for page_size in (1, 2, 7, 8, 32, 64, 100, 128):
        found += [replace(base, page_size=page_size, num_heads=n) for n in (16, 128)]
    found += [replace(decode, num_heads=n) for n in (1, 5, 32, 64, 65, 128)]
    found += [replace(base, num_heads=n, q_lens=(4, 4, 1, 3, 4, 2, 4)) for n in (16, 128)]
    for rank, rope in ((256, 32), (256, 64), (512, 32)):
        found.append(replace(base, kv_lora_rank=rank, qk_rope_head_dim=rope))
    found += [
        replace(base, dtype="float16", out_dtype="float32", num_heads=40),
        replace(base, form="fp8_rows", num_heads=128),
        replace(base, form="fp8_mixed", num_heads=33, scale="0d"),
        replace(base, causal=False, q_view="joint"),
        replace(base, sm_scale=-0.05, q_view="heads_outside", rows="int64"),
        replace(decode, lengths=(17000,), num_heads=16),
        replace(decode, lengths=(9000,), num_heads=128),
        replace(base, lengths=(800,), q_lens=(600,), num_heads=128, spare_rows=0),
        replace(decode, lengths=tuple(range(1, 1025, 8)), lengths_dtype="int64"),
        *few_rows_on_a_card(),
        *rising_on_a_card(),
    ]
    return list(dict.fromkeys(found))


def gpu_configs() -> list[MLAConfig]:
    """The arguments of the planners of `gpu_cases`, for a bundle."""
    return list(
        dict.fromkeys(MLAConfig.from_arguments(case.planner_arguments()) for case in gpu_cases())
    )


def check_too_long(
    inputs: MLAInputs, planner: jitattn.MLAPlanner, tolerance: float | None = None
) -> None:
    """The request of rows 1 to 20 gets NaN when it outgrows its table, others what they got."""
    right, right_lse = inputs.run(planner)
    inputs.seq_lens[1] = 10_000
    out, lse = inputs.run(planner)
    assert bool(out[1:21].isnan().all())
    assert bool(lse[1:21].isnan().all())
    for rows in (slice(0, 1), slice(21, 23)):
        for now, before in ((out, right), (lse, right_lse)):
            torch.testing.assert_close(now[rows], before[rows], rtol=tolerance, atol=tolerance)


def check_invariant_rises(case: MLACase, device: str, planner: jitattn.MLAPlanner) -> None:
    """Tokens have the bits of a decode batch beside four others, whose maxima rise elsewhere.

    The planner is `batch_invariant`. The case is a decode batch with rises.
    """
    inputs = make_inputs(case, device)
    out, lse = inputs.run(planner)
    check_kernel(inputs, out, lse, batch_invariant=True)
    num_requests = len(case.lengths)
    longer = make_inputs(replace(case, q_lens=(5,) * num_requests), device)
    longer = replace(
        longer, kv=inputs.kv, table=inputs.table, latent=inputs.latent, rope=inputs.rope
    )
    longer.q_pe[..., 0] *= -1.0
    last = torch.arange(4, 5 * num_requests, 5, device=device)
    longer.q_nope[last], longer.q_pe[last] = inputs.q_nope, inputs.q_pe
    found_out, found_lse = longer.run(planner)
    check_kernel(longer, found_out, found_lse, batch_invariant=True)
    assert same_bits(found_out[last], out)
    assert same_bits(found_lse[last], lse)


def check_queries_that_are_not_finite(
    case: MLACase, device: str, planner: jitattn.MLAPlanner
) -> None:
    """Their rows are NaN, and other heads of their tokens have what they had, or nearly."""
    inputs = make_inputs(case, device)
    out, lse = inputs.run(planner)
    inputs.q_nope[0, 1, 3] = math.nan
    inputs.q_pe[1, 0, 5] = math.inf
    found_out, found_lse = inputs.run(planner)
    for row in ((0, 1), (1, 0)):
        assert bool(found_out[row].isnan().all())
        assert bool(found_lse[row].isnan())
        found_out[row], found_lse[row] = out[row], lse[row]
    torch.testing.assert_close(found_out, out, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(found_lse, lse, rtol=1e-6, atol=1e-5)
