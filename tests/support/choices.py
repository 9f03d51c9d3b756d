"""Examples of what is chosen of tokens and pages, and checks against loops over them.

Each check runs on any device: on the CPU by definition, or there with the kernels of
tests/emulator/select.py, and on a GPU. What nothing may read is NaN or an id of no page, and what
is written begins as NaN or as a canary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import jitattn
from jitattn.kernels.select.spec import SelectConfig
from jitattn.tensors.page_table_base import PageTable

CANARY = 1_234_567
STALE = (-7, 2**31 - 1, CANARY)
TABLES = ("shared", "separate", "csr", "token")
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Batch:
    """Requests whose last tokens are query tokens.

    Attributes:
        q_lens: query tokens of each request.
        kv_lens: all of its tokens; fewer than query tokens is possible.
        page_size: tokens of a page.
        table: layout of the page table.
        behind: rows of q behind the last request's.
        is_int64: whether lengths are.
        seed: of everything random.
    """

    q_lens: tuple[int, ...] = (1, 1, 1)
    kv_lens: tuple[int, ...] = (70, 0, 33)
    page_size: int = 16
    table: str = "shared"
    behind: int = 0
    is_int64: bool = False
    seed: int = 0

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @property
    def counts(self) -> list[int]:
        """Pages of each request."""
        return [-(-n // self.page_size) for n in self.kv_lens]

    @property
    def num_pages(self) -> int:
        return sum(self.counts) + 3

    @property
    def width(self) -> int:
        return max(self.counts, default=0) + 2

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens) + self.behind

    def ids(self) -> list[list[int]]:
        """The pages of each request, at random places of the pool."""
        return _ids(self)

    def pages(self, device: str) -> PageTable:
        """The table, with stale ids behind each request's pages."""
        rows = [ids + [STALE[i % 3] for i in range(self.width - len(ids))] for ids in self.ids()]
        table = torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), self.width)
        if self.table == "separate":
            return jitattn.BlockTable(torch.stack((table, torch.full_like(table, -9)), dim=1))
        if self.table == "csr":
            indptr = torch.tensor([0, *self.counts], device=device).cumsum(0).to(torch.int32)
            ids = torch.tensor(
                [*itertools.chain(*self.ids()), -1], dtype=torch.int32, device=device
            )
            return jitattn.CsrPages(indptr, ids)
        if self.table == "token":
            size = self.page_size
            slots = [
                [ids[i // size] * size + i % size for i in range(n)]
                + [STALE[i % 3] for i in range(self.width * size - n)]
                for ids, n in zip(self.ids(), self.kv_lens, strict=True)
            ]
            return jitattn.TokenTable(torch.tensor(slots, dtype=torch.int32, device=device))
        return jitattn.BlockTable(table)

    def lens(self, device: str) -> Tensor:
        dtype = torch.int64 if self.is_int64 else torch.int32
        return torch.tensor(self.kv_lens, dtype=dtype, device=device)

    def queries(self, device: str) -> dict[str, object]:
        """Offsets and the most query tokens, as the functions take them."""
        if self.behind == 0 and set(self.q_lens) == {1}:
            return {}
        indptr = torch.tensor([0, *self.q_lens], device=device).cumsum(0).to(torch.int32)
        return {"qo_indptr": indptr, "max_q_len": max(1, *self.q_lens)}

    def rows(self) -> list[tuple[int, int]]:
        """Of each row of q the request and the tokens it sees; -1 behind the last."""
        found = [
            (request, max(kv_len - q_len + i + 1, 0))
            for request, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True))
            for i in range(q_len)
        ]
        return [*found, *[(-1, 0)] * self.behind]

    def slot(self, request: int, position: int) -> int:
        page, place = divmod(position, self.page_size)
        return self.ids()[request][page] * self.page_size + place


@functools.lru_cache(maxsize=4)
def _ids(batch: Batch) -> list[list[int]]:
    order = iter(torch.randperm(batch.num_pages, generator=batch.generator).tolist())
    return [list(itertools.islice(order, count)) for count in batch.counts]


@st.composite
def batches(
    draw: st.DrawFn, *, max_len: int = 150, max_q_len: int = 6, tables: Sequence[str] = TABLES
) -> Batch:
    count = draw(st.integers(1, 4))
    one_each = draw(st.booleans())
    q_lens = [1 if one_each else draw(st.integers(0, max_q_len)) for _ in range(count)]
    kv_lens = [draw(st.sampled_from((0, 1, max_len)) | st.integers(0, max_len)) for _ in q_lens]
    return Batch(
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        page_size=draw(st.sampled_from((1, 3, 16, 64))),
        table=draw(st.sampled_from(tables)),
        behind=0 if one_each else draw(st.integers(0, 3)),
        is_int64=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def one_each(draw: st.DrawFn, *, max_len: int) -> Batch:
    """Requests of one query token, over tables that list pages."""
    batch = draw(batches(max_len=max_len, tables=("shared", "csr")))
    return replace(batch, q_lens=(1,) * len(batch.kv_lens), behind=0)


# --- logits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """Queries and keys of an indexer.

    Attributes:
        shift: bytes that the cache begins behind an aligned address.
        has_out: whether out is given, at a stride of its own.
    """

    batch: Batch = Batch()
    num_heads: int = 8
    head_dim: int = 128
    scale_layout: str = "page"
    shift: int = 0
    has_out: bool = True


def index_cache(index: Index, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """The cache, and keys and scales of all slots in float64; what no request has is NaN."""
    batch, dim = index.batch, index.head_dim
    shape = batch.num_pages, batch.page_size
    keys = torch.randn(*shape, dim, generator=batch.generator).to(E4M3).view(torch.uint8)
    scales = torch.rand(shape, generator=batch.generator) + 0.25
    is_owned = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
    for request, kv_len in enumerate(batch.kv_lens):
        is_owned[[batch.slot(request, i) for i in range(kv_len)]] = True
    is_owned = is_owned.view(shape)
    keys[~is_owned], scales[~is_owned] = 0x7F, math.nan
    bytes_of = scales.view(torch.uint8).view(*shape, 4)
    if index.scale_layout == "page":
        rows = torch.cat((keys.flatten(1), bytes_of.flatten(1)), dim=1).view(*shape, dim + 4)
    else:
        rows = torch.cat((keys, bytes_of), dim=2)
    memory = torch.full((rows.numel() + 16,), 0x7F, dtype=torch.uint8, device=device)
    cache = memory[index.shift : index.shift + rows.numel()].view(rows.shape)
    cache.copy_(rows)
    return cache, keys.view(E4M3).double().flatten(0, 1), scales.double().flatten()


def check_index(index: Index, device: str) -> None:
    batch = index.batch
    cache, keys, scales = index_cache(index, device)
    shape = batch.num_tokens, index.num_heads
    q = torch.randn(*shape, index.head_dim, generator=batch.generator).to(E4M3)
    weights = torch.randn(shape, generator=batch.generator)
    out = None
    width = batch.width * batch.page_size
    if index.has_out or batch.table == "csr":
        out = torch.full((batch.num_tokens, width + 5), math.nan, device=device)[:, :width]
    found = jitattn.index_logits(
        q.to(device),
        weights.to(device),
        cache,
        batch.pages(device),
        batch.lens(device),
        **batch.queries(device),  # type: ignore[arg-type]
        scale_layout=index.scale_layout,
        out=out,
    )
    assert found.shape == (batch.num_tokens, width)
    assert out is None or found is out
    for row, (request, seen) in enumerate(batch.rows()):
        slots = [batch.slot(request, i) for i in range(seen)]
        dots = torch.einsum("hd,nd->hn", q[row].double(), keys[slots]).clamp(min=0)
        parts = weights[row].double()[:, None] * dots * scales[slots]
        error = (found[row, :seen].cpu().double() - parts.sum(0)).abs()
        # Tensor cores of compute capability 9.0 cut products of 8 bits 13 bits below the largest,
        # all to one side: a sum of 33 is off by some 2**-13 of each, times how uneven they are.
        sizes = weights[row].double().abs()[:, None] * torch.einsum(
            "hd,nd->hn", q[row].double().abs(), keys[slots].abs()
        )
        assert (error <= 2**-10 * (sizes * scales[slots]).sum(0) + 1e-30).all(), (row, error.max())
        assert (found[row, seen:] == -math.inf).all(), row
    assert out is None or bool(
        out.as_strided((batch.num_tokens, 5), (width + 5, 1), width).isnan().all()
    )


# --- tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Logits of which some are chosen.

    Attributes:
        values: "normal", "ties" (few values), "few" (mostly -inf), "special" (NaN, infinities, 0
            and -0), or "rising" and "falling" by position.
        shift: elements that logits begin behind an aligned address.
    """

    batch: Batch = Batch()
    k: int = 8
    values: str = "normal"
    shift: int = 0
    has_out: bool = True


VALUES = ("normal", "ties", "few", "special", "rising", "falling", "equal")


def scores_of(values: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator)
    if values == "ties":
        return (normal * 2).round() / 4 * 0 + (normal * 2).round()
    if values == "few":
        return normal.masked_fill(torch.rand(shape, generator=generator) < 0.9, -math.inf)
    if values == "special":
        special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45])
        return special[torch.randint(len(special), shape, generator=generator)]
    if values in ("rising", "falling"):
        ramp = torch.arange(shape[-1], dtype=torch.float32) - shape[-1] // 2
        return (ramp if values == "rising" else -ramp).expand(shape).clone()
    if values == "equal":
        return torch.full(shape, 0.5)
    return normal


def largest(row: Sequence[float], k: int) -> list[int]:
    """Positions of the k largest of a row, ascending: NaN, then numbers, ties to the earlier."""
    seen = [i for i, x in enumerate(row) if x != -math.inf]
    order = sorted(
        seen, key=lambda i: (not math.isnan(row[i]), -row[i] if row[i] == row[i] else 0, i)
    )
    return sorted(order[:k])


def check_choice(choice: Choice, device: str) -> None:
    batch = choice.batch
    width = batch.width * batch.page_size
    stride = width + 8 + choice.shift
    memory = torch.full((batch.num_tokens, stride), math.nan, device=device)
    logits = memory[:, choice.shift : choice.shift + width]
    values = scores_of(choice.values, (batch.num_tokens, width), batch.generator)
    for row, (_, seen) in enumerate(batch.rows()):
        logits[row, :seen] = values[row, :seen].to(device)
    out = None
    if choice.has_out:
        slots = torch.full(
            (batch.num_tokens, choice.k + 3), CANARY, dtype=torch.int32, device=device
        )
        counts = torch.full((batch.num_tokens, 2), CANARY, dtype=torch.int32, device=device)
        out = jitattn.IndexLists(slots[:, 1 : choice.k + 1], counts[:, 0])
    found = jitattn.select_tokens(
        logits,
        batch.pages(device),
        batch.lens(device),
        choice.k,
        **batch.queries(device),  # type: ignore[arg-type]
        page_size=batch.page_size,
        out=out,
    )
    assert out is None or found is out
    assert found.counts is not None
    for row, (request, seen) in enumerate(batch.rows()):
        chosen = largest(values[row, :seen].tolist(), choice.k)
        want = [batch.slot(request, i) for i in chosen]
        assert int(found.counts[row]) == len(want), row
        assert found.slots[row].tolist() == want + [-1] * (choice.k - len(want)), row
    if out is not None:
        assert (slots[:, [0, -2, -1]] == CANARY).all() and (counts[:, 1] == CANARY).all()


# --- pages ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pages:
    """Keys of pages, and queries.

    Attributes:
        dtype: of the keys.
        steps: tokens that are added to each request, one step after the other.
    """

    batch: Batch = Batch()
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_layout: str = "NHD"
    is_pair: bool = False
    steps: tuple[int, ...] = (1, 5)
    k: int = 4


def _random_keys(pages: Pages, shape: tuple[int, ...]) -> Tensor:
    generator = pages.batch.generator
    if pages.dtype is torch.int8:
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return (4 * torch.randn(shape, generator=generator)).to(pages.dtype)


def key_cache(pages: Pages, device: str) -> tuple[object, Tensor]:
    """The cache as it is given, and a view of its K by page, token and head, all of it poison."""
    batch = pages.batch
    row = (batch.page_size, pages.num_kv_heads, pages.head_dim)
    if pages.kv_layout == "HND":
        row = (row[1], row[0], row[2])
    poison = -128 if pages.dtype is torch.int8 else math.nan
    shape = (batch.num_pages, *row) if pages.is_pair else (batch.num_pages, 2, *row)
    cache = torch.full(shape, poison, device=device).to(pages.dtype)
    k = cache if pages.is_pair else cache[:, 0]
    given = (cache, cache.clone()) if pages.is_pair else cache
    return given, k if pages.kv_layout == "NHD" else k.transpose(1, 2)


def expected_bounds(keys: Tensor, batch: Batch, lens: Sequence[int], before: Tensor) -> Tensor:
    """The bounds of all pages of requests of these lengths, others as before."""
    bounds = before.clone()
    for request, kv_len in enumerate(lens):
        for number in range(-(-kv_len // batch.page_size)):
            page = batch.ids()[request][number]
            rows = keys[page, : min(kv_len - number * batch.page_size, batch.page_size)].float()
            bounds[page, 0], bounds[page, 1] = rows.amin(0), rows.amax(0)
    return bounds


def check_bounds(pages: Pages, device: str) -> None:
    """Bounds of requests that grow, by steps, up to the lengths of the batch."""
    batch = pages.batch
    given, keys = key_cache(pages, device)
    values = _random_keys(pages, tuple(keys.shape)).to(device)
    table, lens = batch.pages(device), [max(n - sum(pages.steps), 0) for n in batch.kv_lens]
    bounds = None
    for step, added in enumerate((0, *pages.steps)):
        before = lens
        lens = [min(n + added, total) for n, total in zip(lens, batch.kv_lens, strict=True)]
        grown = [n - m for n, m in zip(lens, before, strict=True)]
        for request, kv_len in enumerate(lens):
            for i in range(before[request] if step else 0, kv_len):
                page, place = divmod(batch.slot(request, i), batch.page_size)
                keys[page, place] = values[page, place]
        lengths = torch.tensor(lens, device=device)
        arguments: dict[str, object] = {"kv_layout": pages.kv_layout}
        if bounds is None:
            found = jitattn.page_bounds(given, table, lengths, **arguments)  # type: ignore[arg-type]
            empty = torch.empty_like(found)
            empty[:, 0], empty[:, 1] = math.inf, -math.inf
            want = expected_bounds(keys, batch, lens, empty)
        else:
            # Pages that have not changed are neither read nor written.
            for request, kv_len in enumerate(before):
                if grown[request] and kv_len >= batch.page_size:
                    bounds[batch.ids()[request][0]] = 77.0
                    break
            was = bounds.clone()
            indptr = torch.tensor([0, *grown], device=device).cumsum(0).to(torch.int32)
            arguments |= {"qo_indptr": indptr, "max_q_len": max(1, *grown), "out": bounds}
            found = jitattn.page_bounds(given, table, lengths, **arguments)  # type: ignore[arg-type]
            assert found is bounds
            want = expected_bounds(keys, batch, lens, was)
            for request, kv_len in enumerate(before):
                kept = batch.ids()[request][: kv_len // batch.page_size if grown[request] else None]
                want[kept] = was[kept]
        assert torch.equal(found, want), (step, lens)
        bounds = found
    assert bounds is not None
    wanted = pages.dtype if pages.dtype.itemsize == 2 else torch.bfloat16
    assert bounds.dtype == wanted


def check_pages(pages: Pages, device: str, *, has_out: bool = True) -> None:
    batch, k = pages.batch, pages.k
    dtype = pages.dtype if pages.dtype.itemsize == 2 else torch.bfloat16
    shape = batch.num_pages, pages.num_kv_heads, pages.head_dim
    ends = torch.randn(2, *shape, generator=batch.generator).to(dtype)
    bounds = torch.stack((ends.amin(0), ends.amax(0)), dim=1)
    owned = {*itertools.chain(*batch.ids())}
    others = [page for page in range(batch.num_pages) if page not in owned]
    bounds[others] = math.nan
    num_heads = pages.num_kv_heads * pages.group_size
    q = torch.randn(len(batch.kv_lens), num_heads, pages.head_dim, generator=batch.generator)
    q = q.to(dtype)
    out = None
    if has_out:
        lists = [
            torch.full((len(batch.kv_lens), pages.num_kv_heads, k + 2), i, dtype=torch.int32)
            for i in (CANARY, 0)
        ]
        lists[1] += torch.arange(k + 2)
        counts = torch.zeros(lists[0].shape[:2], dtype=torch.int32, device=device)
        out = jitattn.PageLists(*(x.to(device)[..., 1:-1] for x in lists), counts)
    found = jitattn.select_pages(
        q.to(device),
        bounds.to(device),
        batch.pages(device),
        batch.lens(device),
        k,
        page_size=batch.page_size,
        out=out,
    )
    assert out is None or found is out
    assert found.counts is not None
    for request, count in enumerate(batch.counts):
        ids = torch.tensor(batch.ids()[request], dtype=torch.long)
        for head in range(pages.num_kv_heads):
            heads = slice(head * pages.group_size, (head + 1) * pages.group_size)
            group = q[request, heads].double()[:, None]
            least, most = (bounds[ids, i, head].double() for i in (0, 1))
            products = torch.maximum(group * least, group * most)
            scores = products.sum((0, 2))
            num = int(found.counts[request, head])
            assert num == min(k, count)
            numbers = found.numbers[request, head].tolist()
            assert numbers[num:] == [-1] * (k - num)
            assert found.pages[request, head].tolist() == (
                [int(ids[i]) for i in numbers[:num]] + [-1] * (k - num)
            )
            assert numbers[:num] == sorted(set(numbers[:num]))
            if num == 0:
                continue
            assert {0, count - 1} <= set(numbers[:num])
            inside = {*range(1, count - 1)}
            taken, left = inside & set(numbers[:num]), inside - set(numbers[:num])
            if taken and left:
                slack = 1e-5 * float(products.abs().sum((0, 2)).max())
                assert min(scores[[*taken]]) >= max(scores[[*left]]) - slack


def gpu_configs() -> list[SelectConfig]:
    """What tests/gpu/test_select.py launches."""
    dtypes = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    return [
        *(
            SelectConfig(kernel="index_logits", head_dim=head_dim, num_heads=num_heads)
            for head_dim, num_heads in ((128, 64), (128, 32), (128, 8), (128, 128), (64, 16))
        ),
        SelectConfig(kernel="select_tokens"),
        *(SelectConfig(kernel="page_bounds", kv_dtype=dtype) for dtype in dtypes),
        *(
            SelectConfig(kernel="select_pages", kv_dtype=dtype, head_dim=head_dim)
            for dtype in dtypes[:2]
            for head_dim in (64, 128, 256)
        ),
    ]
