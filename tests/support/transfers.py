"""Examples of what moves tokens and pages and makes tables, and checks against loops over them.

Each check runs on any device: on the CPU by definition, or there with the kernels of
tests/emulator/pages.py, and on a GPU. Memory that nothing may touch carries a canary or NaN.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import jitattn
from jitattn.spec.dtype import QUANTISED_DTYPES
from tests.support.cases import CACHES_SEPARATE, CACHES_SHARED, SCALES, TABLES, Case
from tests.support.inputs import CANARY, Inputs, make_inputs

GARBAGE = (-1, 2**31 - 1, 12345678)
SATURATIONS = tuple(
    itertools.product(
        ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"),
        ("float16", "bfloat16", "float32"),
    )
)
"""Of caches, and what is gathered from them."""
SLOT_DTYPES = (torch.int32, torch.int64)


def strided(values: Tensor, step: int) -> Tensor:
    """The same vector or matrix at a stride, with garbage between its numbers."""
    if step == 1:
        return values
    wide = torch.full((*values.shape, step), 2**31 - 1, dtype=values.dtype, device=values.device)
    wide[..., 0] = values
    return wide[..., 0]


# --- gathers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """A case whose tokens are gathered.

    Attributes:
        case: pages, lengths, and how all lies in memory.
        out_dtype: as ``gather_kv`` takes it; "own" is the cache's.
        out: "none", "pair" or "triple": what is given to write to.
        spare: rows of out past the last token.
        offset: elements that out begins behind an aligned address.
    """

    case: Case
    out_dtype: str | None = None
    out: str = "none"
    spare: int = 0
    offset: int = 0


@st.composite
def gathers(draw: st.DrawFn) -> Gather:
    table = draw(st.sampled_from(TABLES))
    caches = CACHES_SEPARATE if table == "separate" else CACHES_SHARED
    num_kv_heads = draw(st.sampled_from([1, 1, 2, 3, 8]))
    kv_dtype = draw(st.sampled_from([None, "float8_e4m3fn", "float8_e5m2"]))
    out_dtype = draw(st.sampled_from([None, None, "bfloat16", "float16", "float32", "own"]))
    case = Case(
        head_dim=draw(st.sampled_from([16, 64, 128, 24, 7])),
        head_dim_vo=draw(st.sampled_from([None, None, 32, 9])),
        page_size=draw(st.sampled_from([1, 3, 16, 48, 64])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        kv_dtype=kv_dtype,
        page_table=table,
        num_kv_heads=num_kv_heads,
        group_size=1,
        lengths=tuple(draw(st.lists(st.integers(-2, 90), min_size=1, max_size=12))),
        cache=draw(st.sampled_from([c for c in caches if c != "size_1" or num_kv_heads == 1])),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        rows=draw(st.sampled_from([None, "int32", "int64"])) if table != "csr" else None,
        lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        scales=draw(st.sampled_from(SCALES)) if kv_dtype and out_dtype != "own" else None,
        seed=draw(st.integers(0, 2**16)),
    )
    return Gather(
        case,
        out_dtype,
        draw(st.sampled_from(["none", "pair", "triple"])),
        draw(st.integers(0, 9)),
        draw(st.sampled_from([0, 0, 1])),
    )


def gather_outs(
    example: Gather, inputs: Inputs, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...] | None, list[Tensor]]:
    """What is given as ``out``, and the memory it lies in."""
    if example.out == "none":
        return None, []
    case, total = example.case, inputs.k.shape[0]
    outs, memories = [], []
    for head_dim in (case.head_dim, case.value_dim):
        shape = (total + example.spare, case.num_kv_heads, head_dim)
        numel = math.prod(shape)
        memory = torch.full((numel + 64,), CANARY, device=inputs.device).to(dtype)
        outs.append(memory[example.offset : example.offset + numel].view(shape))
        memories.append(memory)
    if example.out == "triple":
        batch_size = len(case.lengths)
        outs.append(torch.full((batch_size + 1,), -7, dtype=torch.int32, device=inputs.device))
    return tuple(outs), memories


def own_dtype(case: Case) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, case.stored_dtype)
    return dtype


def check_gather(example: Gather, device: str) -> None:
    """The rows of all requests, bit for bit; whatever else is in memory stays as it is."""
    case = example.case
    inputs = make_inputs(case, device)
    dtype = own_dtype(case) if example.out_dtype == "own" else None
    if dtype is None and example.out_dtype is not None:
        dtype = getattr(torch, example.out_dtype)
    default = torch.bfloat16 if case.kv_dtype else own_dtype(case)
    outs, memories = gather_outs(example, inputs, dtype or default)
    k, v, kv_indptr = jitattn.gather_kv(
        inputs.cache,
        inputs.pages(),
        inputs.seq_lens,
        kv_layout=case.kv_layout,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
        out_dtype=dtype,
        out=outs,
    )
    assert k.dtype == v.dtype == (dtype or default)
    assert kv_indptr.dtype == torch.int32
    assert kv_indptr.tolist() == inputs.kv_indptr
    total = inputs.kv_indptr[-1]
    for got, dense in ((k, inputs.k), (v, inputs.v)):
        # Products of stored values and scales are exact in float64, and rounded to float32 first.
        assert_bits(got[:total], dense.float().to(got.dtype))
        if outs is None:
            assert got.shape[0] == total
    for memory, tensor in zip(memories, (k, v), strict=False):
        begin = example.offset + total * tensor[:1].numel()
        canary = torch.full_like(memory[:1].float(), CANARY).to(memory.dtype)
        assert_bits(memory[begin:], canary.expand_as(memory[begin:]))
        assert_bits(memory[: example.offset], canary.expand_as(memory[: example.offset]))
    if outs is not None:
        assert all(got is given for got, given in zip((k, v), outs, strict=False))


def assert_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.contiguous().view(kind), want.contiguous().view(kind))


def quantised_cache(name: str, device: str, seed: int = 0) -> tuple[object, Tensor, Tensor]:
    """A cache of int8, NVFP4 or int4 with strides of its own, and the values of its K and V.

    [11 pages, 4 tokens, 3 heads, 32 and 48 columns]; unscaled.
    """
    rng = torch.Generator(device).manual_seed(seed)
    k, v = (3 * torch.randn((11, 4, 3, dim), generator=rng, device=device) for dim in (32, 48))
    if name == "int8":
        stored = [jitattn.quant.quantize_kv(x, "int8", scale=0.05) for x in (k, v)]
        values = [jitattn.quant.dequantize_kv(x) for x in stored]
        # Rows that begin anywhere, and a layer axis.
        wide = [
            torch.zeros((11, 2, 4, 3, x.shape[-1] + 5), dtype=x.dtype, device=device)
            for x in stored
        ]
        for target, x in zip(wide, stored, strict=True):
            target[:, 1, ..., : x.shape[-1]] = x
        pair = tuple(w[:, 1, ..., : x.shape[-1]] for w, x in zip(wide, stored, strict=True))
        return pair, values[0], values[1]
    parts = [jitattn.quant.quantize_kv(x, name) for x in (k, v)]
    values = [jitattn.quant.dequantize_kv(x, dtype=name, block_scales=s) for x, s in parts]
    data = [torch.cat((x, x), dim=1)[:, 4:] for x, _ in parts]
    scales = [torch.cat((s.view(torch.uint8),) * 2, dim=1)[:, 4:] for _, s in parts]
    if name != "nvfp4":
        scales = [x.view(torch.float16) for x in scales]
    cache = jitattn.QuantizedKV(data[0], data[1], scales[0], scales[1])
    return cache, values[0], values[1]


def check_quantised_gather(name: str, out_dtype: str, scale: str | None, device: str) -> None:
    """int8, NVFP4 and int4: a stored value times its scale, in float32, rounded once."""
    cache, k_values, v_values = quantised_cache(name, device)
    table = torch.tensor([[7, 2, 9], [4, 10, 2**31 - 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([10, 7], dtype=torch.int32, device=device)
    scales: list[float | Tensor | None] = [None, None]
    factors = [torch.ones(1, device=device)] * 2
    if scale == "number":
        scales, factors = [0.3, 1.7], [torch.tensor([0.3]), torch.tensor([1.7])]
    elif scale == "heads":
        factors = [torch.tensor([0.1, 2.0, 3.3]), torch.tensor([7.0, 0.6, 1.0])]
        scales = [factor.to(device) for factor in factors]
    slots = [[7, 2, 9], [4, 10]]
    for kv_layout in ("NHD", "HND"):
        *gathered, kv_indptr = jitattn.gather_kv(
            _named(cache, kv_layout),
            jitattn.BlockTable(table),
            lens,
            kv_layout=kv_layout,
            k_scale=scales[0],
            v_scale=scales[1],
            out_dtype=out_dtype,
        )
        assert kv_indptr.tolist() == [0, 10, 17]
        for got, values, factor in zip(gathered, (k_values, v_values), factors, strict=True):
            dense = torch.cat(
                [values[ids].flatten(0, 1)[:n] for ids, n in zip(slots, (10, 7), strict=True)]
            )
            want = dense * factor.to(device).reshape(-1, 1)
            assert_bits(got, want.to(getattr(torch, out_dtype)))


def check_saturation(kv_dtype: str, out_dtype: str, device: str) -> None:
    """Values beyond the range of what they are gathered to; NaN stays NaN, in every place."""
    dtype = getattr(torch, kv_dtype)
    largest = torch.iinfo(dtype).max if kv_dtype == "int8" else torch.finfo(dtype).max
    numbers = torch.tensor([largest, -largest, 1.0, 0.0, math.inf, -math.inf, math.nan])
    numbers = numbers[:4] if kv_dtype == "int8" else numbers
    rows = torch.stack([numbers.roll(i).repeat(6)[:24] for i in range(len(numbers))])
    cache = rows.to(dtype).view(1, len(rows), 1, 24).to(device)
    for scale in (None, 3e38) if kv_dtype in QUANTISED_DTYPES else (None,):
        k, v, _ = jitattn.gather_kv(
            (cache, cache),
            jitattn.BlockTable(torch.zeros(1, 1, dtype=torch.int32, device=device)),
            torch.tensor([len(rows)], dtype=torch.int32, device=device),
            k_scale=scale,
            v_scale=scale,
            out_dtype=out_dtype,
        )
        want = cache[0].double() * torch.tensor(1.0 if scale is None else scale).double()
        limit = torch.finfo(k.dtype).max
        if kv_dtype != out_dtype:  # else bits are copied
            want = want.clamp(-limit, limit)
        for got in (k, v):
            torch.testing.assert_close(got, want.to(k.dtype), rtol=0, atol=0, equal_nan=True)


def _named(cache: object, kv_layout: str) -> object:
    """The same memory, its dimensions named in the other order."""
    if kv_layout == "NHD":
        return cache
    if isinstance(cache, tuple):
        return tuple(x.transpose(1, 2) for x in cache)
    return jitattn.QuantizedKV(*(x.transpose(1, 2) for x in cache.tensors))


# --- copies of pages ------------------------------------------------------------------------------


POOLS = ("plain", "transposed", "layer_inside", "padded", "odd", "pages_inside", "one_page_wide")


@dataclass(frozen=True)
class Copy:
    """Pools whose pages are copied, and the pairs.

    Attributes:
        page: the dimensions of a page.
        kinds: how the source and the destination of each pool lie in memory, of `POOLS`.
        num_pages: of the sources, and of the destinations.
    """

    page: tuple[int, ...]
    kinds: tuple[tuple[str, str], ...]
    num_pages: tuple[int, int]
    dtype: torch.dtype
    pairs: tuple[tuple[int, int], ...]
    pairs_dtype: torch.dtype = torch.int32
    pairs_step: int = 1
    seed: int = 0


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    num_pages = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    targets = draw(st.permutations(range(num_pages[1])))
    targets = targets[: draw(st.integers(0, num_pages[1]))]
    sources = [draw(st.integers(0, num_pages[0] - 1)) for _ in targets]
    pairs = list(zip(sources, targets, strict=True))
    pairs += draw(st.lists(st.sampled_from([(-1, 0), (0, -1), (-5, -1)]), max_size=2))
    kind = st.sampled_from(POOLS)
    dtypes = (torch.bfloat16, torch.uint8, torch.float32, torch.float8_e4m3fn, torch.int64)
    return Copy(
        page=draw(st.sampled_from([(2, 4, 3, 16), (16, 2, 64), (3, 5), (2, 3, 1, 8), (1, 1, 7)])),
        kinds=tuple(draw(st.lists(st.tuples(kind, kind), min_size=1, max_size=3))),
        num_pages=num_pages,
        dtype=draw(st.sampled_from(dtypes)),
        pairs=tuple(draw(st.permutations(pairs))),
        pairs_dtype=draw(st.sampled_from(SLOT_DTYPES)),
        pairs_step=draw(st.sampled_from([1, 3])),
        seed=draw(st.integers(0, 2**16)),
    )


def pool_view(
    kind: str, num_pages: int, page: tuple[int, ...], dtype: torch.dtype, seed: int
) -> Tensor:
    """A pool of random bytes on the CPU."""

    def random(*shape: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        item = torch.empty(0, dtype=dtype).element_size()
        size = (*shape[:-1], shape[-1] * item)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=rng).view(dtype)

    shape = (num_pages, *page)
    if kind == "transposed" and len(page) > 2:
        return random(num_pages, *page[:-3], page[-2], page[-3], page[-1]).transpose(-2, -3)
    if kind == "layer_inside":
        return random(num_pages, 3, *page)[:, 1]
    if kind == "padded":
        return random(num_pages, *page[:-1], page[-1] + 16)[..., : page[-1]]
    if kind == "odd":
        return random(num_pages, *page[:-1], page[-1] + 3)[..., 1 : page[-1] + 1]
    if kind == "pages_inside":
        return random(page[0], num_pages, *page[1:]).transpose(0, 1)
    if kind == "one_page_wide":
        return random(num_pages, *page, 2)[..., 0]  # no two elements follow each other
    return random(*shape)


def moved(pool: Tensor, device: str, *, pin: bool = False) -> Tensor:
    """The same view of the same memory elsewhere."""
    item = pool.element_size()
    memory = pool.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(memory)
    raw = raw.clone().pin_memory() if pin else raw.clone().to(device)
    assert raw.data_ptr() % item == 0
    return raw.view(pool.dtype).as_strided(pool.shape, pool.stride(), pool.storage_offset())


def memory_of(pool: Tensor) -> Tensor:
    """All bytes under a view."""
    return torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())


def check_copy(
    example: Copy,
    device: str,
    *,
    src_pinned: bool = False,
    dst_pinned: bool = False,
    pairs_on_cpu: bool = False,
) -> None:
    """Exactly the pages of the pairs change, to the byte, in every pool."""
    sources, targets, wanted = [], [], []
    for i, (src_kind, dst_kind) in enumerate(example.kinds):
        seed = example.seed + 2 * i
        source = pool_view(src_kind, example.num_pages[0], example.page, example.dtype, seed)
        target = pool_view(dst_kind, example.num_pages[1], example.page, example.dtype, seed + 1)
        want = moved(target, "cpu")
        for s, d in example.pairs:
            if s >= 0 and d >= 0:
                want[d] = source[s]
        sources.append(moved(source, device, pin=src_pinned))
        targets.append(moved(target, device, pin=dst_pinned))
        wanted.append(want)
    pairs = torch.tensor(example.pairs, dtype=example.pairs_dtype).reshape(-1, 2)
    pairs = strided(pairs if pairs_on_cpu else pairs.to(device), example.pairs_step)
    before = [memory_of(source).clone() for source in sources]
    single = len(sources) == 1
    jitattn.copy_pages(sources[0] if single else sources, targets[0] if single else targets, pairs)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    for target, want in zip(targets, wanted, strict=True):
        assert torch.equal(memory_of(target).cpu(), memory_of(want))
    for source, bytes_before in zip(sources, before, strict=True):
        assert torch.equal(memory_of(source), bytes_before)


# --- block tables ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Requests whose slots become a block table.

    Attributes:
        lengths: of each request, in tokens.
        starts: the first token that counts, or None.
        is_mapped: whether a map leads to slots of another pool.
        source: "tensor", "table" or "csr".
        broken: (request, token) whose slot is moved somewhere else.
        room: columns of the slots past the longest request.
    """

    page_size: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    is_mapped: bool = False
    source: str = "tensor"
    rows: torch.dtype | None = None
    broken: tuple[tuple[int, int], ...] = ()
    room: int = 0
    out: str = "none"
    slot_dtype: torch.dtype = torch.int32
    lengths_dtype: torch.dtype = torch.int64
    step: int = 1
    seed: int = 0


@st.composite
def slot_tables(draw: st.DrawFn, *, may_break: bool) -> Slots:
    lengths = tuple(draw(st.lists(st.integers(-2, 130), min_size=1, max_size=7)))
    source = draw(st.sampled_from(["tensor", "table", "csr"]))
    broken = []
    if may_break:
        for b, length in enumerate(lengths):
            if length > 0 and draw(st.booleans()):
                broken.append((b, draw(st.integers(0, length - 1))))
    return Slots(
        page_size=draw(st.sampled_from([1, 2, 3, 5, 16, 33, 64, 100])),
        lengths=lengths,
        starts=tuple(draw(st.integers(-1, max(n, 0) + 5)) for n in lengths)
        if draw(st.booleans())
        else None,
        is_mapped=draw(st.booleans()),
        source=source,
        rows=draw(st.sampled_from([None, *SLOT_DTYPES])) if source != "csr" else None,
        broken=tuple(broken),
        room=draw(st.integers(0, 70)),
        out=draw(st.sampled_from(["none", "tensor", "table"])),
        slot_dtype=draw(st.sampled_from(SLOT_DTYPES)) if source == "tensor" else torch.int32,
        lengths_dtype=draw(st.sampled_from(SLOT_DTYPES)),
        step=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 2**16)),
    )


def check_block_table(example: Slots, device: str) -> None:
    """Every column: the page where its tokens follow each other, else -1."""
    slots, slot_map, listed = _listed_slots(example)
    want = _pages_by_hand(example, slots, slot_map)
    given, rows = _given_slots(example, listed, device)
    width = want.shape[1]
    out = None
    if example.out != "none":
        out = torch.full((len(example.lengths), width + 3), 77, dtype=torch.int32, device=device)
        out = out[:, 1 : width + 1]
    numbers = {"dtype": example.lengths_dtype, "device": device}
    lens = strided(torch.tensor(example.lengths, **numbers), example.step)
    starts = None
    if example.starts is not None:
        starts = strided(torch.tensor(example.starts, **numbers), example.step)
    mapping = None if slot_map is None else torch.tensor(slot_map, device=device)
    if mapping is not None:
        mapping = strided(mapping.to(example.lengths_dtype), example.step)
    table = jitattn.build_block_table(
        given,
        lens,
        example.page_size,
        rows=rows,
        kv_start=starts,
        slot_map=mapping,
        out=jitattn.BlockTable(out) if example.out == "table" else out,
    )
    assert table.layout == "shared"
    assert table.rows is None
    assert torch.equal(table.table.cpu(), want[:, : table.table.shape[1]])
    assert bool((want[:, table.table.shape[1] :] == -1).all())
    if out is not None:
        assert table.table.data_ptr() == out.data_ptr()
        assert bool((out._base[:, :1] == 77).all())
        assert bool((out._base[:, width + 1 :] == 77).all())


def _listed_slots(example: Slots) -> tuple[list[list[int]], list[int] | None, list[list[int]]]:
    """Slots of all live tokens, the map, and the slots with garbage where none may be read."""
    rng = torch.Generator().manual_seed(example.seed)
    size = example.page_size
    counts = [-(-max(n, 0) // size) for n in example.lengths]
    ids = torch.randperm(sum(counts) + 2, generator=rng).tolist()
    slots: list[list[int]] = []
    for n, count in zip(example.lengths, counts, strict=True):
        pages = [ids.pop() for _ in range(count)]
        slots.append([pages[t // size] * size + t % size for t in range(max(n, 0))])
    slot_map = None
    if example.is_mapped:
        other = torch.randperm(sum(counts) + 2, generator=rng).tolist()
        slot_map = [other[s // size] * size + s % size for s in range(len(other) * size)]
    for b, t in example.broken:
        slots[b][t] = (slots[b][t] + 1 + size) % ((sum(counts) + 2) * size)
    listed = [list(row) for row in slots]
    for b, row in enumerate(listed):
        start = 0 if example.starts is None else example.starts[b]
        for t in range(min(max(start, 0), len(row))):
            row[t] = GARBAGE[t % 3]
    return slots, slot_map, listed


def _pages_by_hand(example: Slots, slots: list[list[int]], slot_map: list[int] | None) -> Tensor:
    size = example.page_size
    longest = max(max(example.lengths), 0)
    width = -(-(longest + example.room) // size)
    table = torch.full((len(slots), width), -1, dtype=torch.int32)
    for b, row in enumerate(slots):
        start = 0 if example.starts is None else max(example.starts[b], 0)
        mapped = row if slot_map is None else [slot_map[slot] for slot in row]
        for column in range(-(-len(row) // size)):
            tokens = range(max(column * size, start), min((column + 1) * size, len(row)))
            pages = {mapped[t] // size for t in tokens}
            if len(pages) == 1 and all(mapped[t] % size == t % size for t in tokens):
                table[b, column] = pages.pop()
    return table


def _given_slots(
    example: Slots, listed: list[list[int]], device: str
) -> tuple[Tensor | jitattn.TokenTable | jitattn.CsrPages, Tensor | None]:
    if example.source == "csr":
        starts = [0]
        for row in listed:
            starts.append(starts[-1] + len(row))
        flat = [slot for row in listed for slot in row] + [GARBAGE[1]] * 3
        indptr = torch.tensor(starts, dtype=torch.int32, device=device)
        indices = torch.tensor(flat, dtype=torch.int32, device=device)
        return jitattn.CsrPages(strided(indptr, example.step), strided(indices, example.step)), None
    width = max(len(row) for row in listed) + example.room
    garbage = GARBAGE[example.seed % 3]
    table = torch.tensor(
        [row + [garbage] * (width - len(row)) for row in listed], dtype=example.slot_dtype
    ).reshape(len(listed), width)
    rows = None
    if example.rows is not None:
        order = torch.randperm(
            len(listed) + 2, generator=torch.Generator().manual_seed(example.seed)
        )
        wide = torch.full((len(listed) + 2, width), garbage, dtype=example.slot_dtype)
        rows = order[: len(listed)].to(example.rows)
        wide[rows.long()] = table
        table, rows = wide, strided(rows.to(device), example.step)
    table = strided(table.to(device), example.step)
    if example.source == "table":
        return jitattn.TokenTable(table, rows=rows), None
    return table, rows


# --- what a batch's tokens are --------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Lengths of requests, and a table whose slots are asked for or None."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    table: str | None = None
    page_size: int = 16
    spare: int = 0
    lengths_dtype: torch.dtype = torch.int32
    step: int = 1
    gives_out: bool = False
    seed: int = 0


@st.composite
def token_batches(draw: st.DrawFn) -> Tokens:
    kv_lens = tuple(draw(st.lists(st.integers(-2, 90), min_size=1, max_size=12)))
    return Tokens(
        kv_lens=kv_lens,
        q_lens=tuple(draw(st.integers(-1, max(n, 0) + 1)) for n in kv_lens),
        table=draw(st.sampled_from([None, "shared", "csr", "token"])),
        page_size=draw(st.sampled_from([1, 3, 16])),
        spare=draw(st.integers(0, 20)),
        lengths_dtype=draw(st.sampled_from(SLOT_DTYPES)),
        step=draw(st.sampled_from([1, 2])),
        gives_out=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def check_batch_info(example: Tokens, device: str) -> None:
    """Request, position and slot of every token, and the offsets of all requests."""
    numbers = {"dtype": example.lengths_dtype, "device": device}
    lens = strided(torch.tensor(example.kv_lens, **numbers), example.step)
    q_lens = strided(torch.tensor(example.q_lens, **numbers), example.step)
    pages, slots_of = None, None
    if example.table is not None:
        case = Case(
            head_dim=16,
            page_size=example.page_size,
            page_table=example.table,
            num_kv_heads=1,
            group_size=1,
            lengths=example.kv_lens,
            rows="int64" if example.table != "csr" and example.seed % 2 else None,
            seed=example.seed,
        )
        inputs = make_inputs(case, device)
        pages = inputs.pages()
        # Where each dense token went, found by its bits: K of the token is its slot.
        slots_of = _dense_slots(inputs)
    requests, positions, slots = _tokens_by_hand(example, slots_of)
    num_tokens = len(requests) + example.spare
    arguments = {
        "num_tokens": num_tokens,
        "pages": pages,
        "page_size": None if example.table in (None, "token") else example.page_size,
    }
    out = None
    if example.gives_out:
        out = jitattn.batch_info(lens, q_lens, **arguments)
        for tensor in out.tensors:
            tensor.fill_(-99)
    info = jitattn.batch_info(lens, q_lens, out=out, **arguments)
    assert out is None or info is out
    padding = [-1] * example.spare
    assert info.requests.tolist() == requests + padding
    assert info.positions.tolist() == positions + padding
    if pages is None:
        assert info.slots is None
    else:
        assert info.slots.dtype == torch.int64
        assert info.slots.tolist() == slots + padding
    for indptr, given in ((info.qo_indptr, example.q_lens), (info.kv_indptr, example.kv_lens)):
        assert indptr.dtype == torch.int32
        assert indptr.tolist() == torch.tensor([0, *(max(n, 0) for n in given)]).cumsum(0).tolist()


def _tokens_by_hand(
    example: Tokens, slots_of: list[list[int]] | None
) -> tuple[list[int], list[int], list[int]]:
    requests, positions, slots = [], [], []
    for b, (kv_len, q_len) in enumerate(zip(example.kv_lens, example.q_lens, strict=True)):
        for i in range(max(q_len, 0)):
            position = max(max(kv_len, 0) - q_len + i, -1)
            requests.append(b)
            positions.append(position)
            if slots_of is not None:
                slots.append(slots_of[b][position] if position >= 0 else -1)
    return requests, positions, slots


def _dense_slots(inputs: Inputs) -> list[list[int]]:
    """The slot of every token of every request, found in the cache by its value."""
    cache = inputs.cache[0].cpu().flatten(0, 1).flatten(1)
    places = {tuple(row): slot for slot, row in enumerate(cache.tolist()) if row[0] == row[0]}
    dense = inputs.k.cpu().flatten(1).tolist()
    starts = inputs.kv_indptr
    return [
        [places[tuple(row)] for row in dense[begin:end]]
        for begin, end in itertools.pairwise(starts)
    ]


# --- from one layout to another -------------------------------------------------------------------


def check_conversions(case: Case, device: str) -> None:
    """Through every layout and back: what each request reads is the same."""
    inputs = make_inputs(case, device)
    size, lens = case.page_size, inputs.seq_lens
    want = jitattn.gather_kv(inputs.cache, inputs.pages(), lens, kv_layout=case.kv_layout)
    longest = max(max(case.lengths), 0)
    for via in TABLES:
        if case.page_table == "separate" != via:
            with pytest.raises(ValueError, match="ids of its own for V"):
                jitattn.pages.convert_pages(inputs.pages(), via, page_size=size, seq_lens=lens)
            continue
        there = jitattn.pages.convert_pages(
            inputs.pages(), via, page_size=size, seq_lens=lens, max_kv_len=longest
        )
        assert there.layout == via
        back = there
        if via != "separate" and case.page_table != "separate":
            back = jitattn.pages.convert_pages(
                there, case.page_table, page_size=size, seq_lens=lens
            )
            assert back.layout == case.page_table
        for pages in (there, back):
            assert pages.batch_size == len(case.lengths)
            got = jitattn.gather_kv(inputs.cache, pages, lens, kv_layout=case.kv_layout)
            for a, b in zip(got, want, strict=True):
                assert_bits(a, b)


@st.composite
def paged_cases(draw: st.DrawFn) -> Case:
    """Cases for conversions; token tables whose tokens follow each other come from those."""
    table = draw(st.sampled_from(["shared", "csr", "separate"]))
    return Case(
        head_dim=16,
        page_size=draw(st.sampled_from([1, 3, 16])),
        page_table=table,
        num_kv_heads=1,
        group_size=1,
        lengths=tuple(draw(st.lists(st.integers(-2, 60), min_size=1, max_size=6))),
        rows=draw(st.sampled_from([None, "int32", "int64"])) if table != "csr" else None,
        seed=draw(st.integers(0, 2**16)),
    )


def of_case(case: Case, **changes: object) -> Gather:
    """A gather of a case with changes."""
    return Gather(replace(case, **changes))
