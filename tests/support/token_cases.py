"""Cases of ``preprocess_qkv`` and ``append_kv``: inputs, and a comparison of all they may write.

Pools are bytes, of which every one that is not written must stay as it was. A case is made on the
CPU and moved, so that a device computes on the numbers that the reference sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import jitattn
from jitattn.spec.dtype import DType

POISON = 0xFF  # NaN in every type that has one
CACHE_DTYPES = (
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "nvfp4",
    "int4",
    "int4_g32",
)
MEMORY = ("NHD", "HND", "interleaved", "layers", "packed", "odd")
"""How pools lie: the order of tokens and heads, K and V as pages 2 p and 2 p + 1, all layers of a
page together, K and V of a head side by side, at odd addresses."""
TABLES = ("shared", "separate", "csr", "token", "slots")


@dataclass(frozen=True)
class TokenCase:
    """What differs between calls."""

    pairs: tuple[tuple[int, int], ...] = ((1, 1), (3, 17), (1, 0), (20, 40), (1, 33), (2, 2))
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    head_dim_vo: int | None = None
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    page_table: str = "shared"
    memory: str = "NHD"
    kv_layout: str = "NHD"
    rows: bool = False
    wide_integers: bool = False
    qkv: str = "packed"  # "strided", "tuple"
    q_out: str = "new"  # "given", "in place", an FP8 type
    rotary: str = "neox"  # "none", "interleaved"
    rotary_dim: int | None = None
    mrope: bool = False
    positions: str = "lengths"  # "given", "delta"
    use_bias: bool = False
    use_norm: bool = False
    qk_transform: str | None = None
    v_transform: str | None = None
    scales: str = "none"  # "number", "tensor", "heads"
    zero_tail: bool = False
    extra_rows: int = 3  # of q, k and v past the last request
    is_append: bool = False
    seed: int = 0

    @property
    def value_dim(self) -> int:
        return self.head_dim_vo or self.head_dim

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype not in ("bfloat16", "float16")

    @property
    def computes(self) -> bool:
        """Whether K or V is more than copied or converted."""
        steps = self.use_bias, self.use_norm, self.qk_transform, self.v_transform
        return not self.is_append and (self.rotary != "none" or any(steps))

    @property
    def num_tokens(self) -> int:
        return sum(q_len for q_len, _ in self.pairs) + self.extra_rows

    @property
    def rope(self) -> jitattn.Rope | None:
        if self.is_append or self.rotary == "none":
            return None
        half = (self.rotary_dim or self.head_dim) // 2
        section = (half - 2 * (half // 3), half // 3, half // 3)
        return jitattn.Rope(
            self.head_dim,
            rotary_dim=self.rotary_dim,
            interleaved=self.rotary == "interleaved",
            mrope_section=section if self.mrope else None,
            mrope_interleaved=self.mrope and self.seed % 2 == 1,
        )


@dataclass
class TokenInputs:
    """A case's tensors: the arguments, and the memory that outputs may lie in."""

    case: TokenCase
    arguments: dict[str, Any]
    pools: list[Tensor]  # uint8, of one dimension
    rebuild: Callable[[list[Tensor]], object]  # the cache in other pools

    def to(self, device: str, fill: int = POISON) -> TokenInputs:
        """Return copies on ``device``, with fresh pools and a fresh q_out."""
        # K and V may share one.
        copies = {id(pool): torch.full_like(pool, fill).to(device) for pool in self.pools}
        pools = [copies[id(pool)] for pool in self.pools]
        arguments = {name: moved(value, device) for name, value in self.arguments.items()}
        if isinstance(arguments.get("q_out"), Tensor):
            arguments["q_out"] = self._new_q_out(arguments, device)
        arguments["kv_cache"] = self.rebuild(pools)
        return TokenInputs(self.case, arguments, pools, self.rebuild)

    def _new_q_out(self, arguments: Mapping[str, Any], device: str) -> Tensor:
        case = self.case
        if case.q_out == "in place":
            width = case.num_qo_heads * case.head_dim
            shape = case.num_tokens, case.num_qo_heads, case.head_dim
            qkv = arguments["qkv"]
            return qkv[:, :width].view(shape) if isinstance(qkv, Tensor) else qkv[0]
        dtype = case.dtype if case.q_out == "given" else case.q_out
        return poisoned_q(case, getattr(torch, dtype), device)

    def run(self) -> Tensor | None:
        arguments = dict(self.arguments)
        if not self.case.is_append:
            return jitattn.preprocess_qkv(**arguments)
        jitattn.append_kv(**arguments)
        return None


def poisoned_q(case: TokenCase, dtype: torch.dtype, device: str) -> Tensor:
    """A q_out with room between tokens, all of it poison."""
    size = case.num_qo_heads * case.head_dim + 32
    memory = torch.full((case.num_tokens * size * dtype.itemsize,), POISON, dtype=torch.uint8)
    rows = memory.to(device).view(dtype).view(case.num_tokens, size)
    return rows[:, 16:-16].view(case.num_tokens, case.num_qo_heads, case.head_dim)


def moved(value: Any, device: str) -> Any:
    """A copy of tensors wherever they are, with their strides."""
    if isinstance(value, Tensor):
        return strided_copy(value, device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if isinstance(value, jitattn.BlockTable):
        return jitattn.BlockTable(moved(value.table, device), rows=moved(value.rows, device))
    if isinstance(value, jitattn.TokenTable):
        return jitattn.TokenTable(moved(value.slots, device), rows=moved(value.rows, device))
    if isinstance(value, jitattn.CsrPages):
        return jitattn.CsrPages(moved(value.kv_indptr, device), moved(value.kv_indices, device))
    return value


def strided_copy(tensor: Tensor, device: str) -> Tensor:
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.zeros(max(span, 1), dtype=tensor.dtype)
    copy = memory.as_strided(tensor.shape, tensor.stride())
    copy.copy_(tensor)
    return memory.to(device).as_strided(tensor.shape, tensor.stride())


def make_token_inputs(case: TokenCase) -> TokenInputs:
    """Return a case's tensors on the CPU."""
    rng = torch.Generator().manual_seed(case.seed + 1)
    pools, rebuild, num_pages = make_cache(case)
    arguments: dict[str, Any] = {"kv_layout": case.kv_layout, "zero_tail": case.zero_tail}
    arguments |= _tokens(case, rng) | _places(case, num_pages, rng)
    if not case.is_append:
        arguments |= _transformations(case, rng)
    for name in ("k_scale", "v_scale"):
        if case.is_quantised and case.scales != "none":
            arguments[name] = _scale(case, rng)
    inputs = TokenInputs(case, arguments, pools, rebuild)
    if case.q_out != "new" and not case.is_append:
        arguments["q_out"] = inputs._new_q_out(arguments, "cpu")
        if case.q_out.startswith("float8"):
            arguments["q_scale"] = 0.25 if case.scales == "number" else torch.tensor(0.5)
    return inputs


def _integers(case: TokenCase) -> torch.dtype:
    return torch.int64 if case.wide_integers else torch.int32


def _tokens(case: TokenCase, rng: torch.Generator) -> dict[str, Any]:
    """Q, K and V of normal numbers; rows past the last request are NaN."""
    dims = (case.head_dim, case.head_dim, case.value_dim)
    heads = (case.num_qo_heads, case.num_kv_heads, case.num_kv_heads)
    dtype = getattr(torch, case.dtype)

    def random(width: int) -> Tensor:
        values = torch.randn((case.num_tokens, width), generator=rng).to(dtype)
        values[case.num_tokens - case.extra_rows :] = math.nan
        return values

    if case.is_append:
        k, v = (random(heads[i] * dims[i]).view(-1, heads[i], dims[i]) for i in (1, 2))
        if case.qkv == "strided":  # a slice of something wider
            memory = torch.zeros((case.num_tokens, k[0].numel() + v[0].numel() + 8), dtype=dtype)
            views = (
                memory[:, : k[0].numel()].view(k.shape),
                memory[:, -v[0].numel() :].view(v.shape),
            )
            k, v = views[0].copy_(k), views[1].copy_(v)
        return {"k": k, "v": v}
    counts = dict(zip(("num_qo_heads", "num_kv_heads"), heads, strict=False))
    counts["head_dim"] = case.head_dim
    if case.qkv == "tuple":
        parts = [random(n * d).view(-1, n, d) for n, d in zip(heads, dims, strict=True)]
        parts[1] = parts[1].transpose(0, 1).contiguous().transpose(0, 1)
        return {"qkv": tuple(parts), **counts}
    qkv = random(sum(heads) * case.head_dim)
    if case.qkv == "strided":
        wide = torch.zeros((case.num_tokens, qkv.shape[1] + 24), dtype=dtype)
        qkv = wide[:, 8:-16].copy_(qkv)
    return {"qkv": qkv, **counts}


def _places(case: TokenCase, num_pages: int, rng: torch.Generator) -> dict[str, Any]:
    integers = _integers(case)
    q_lens = [q_len for q_len, _ in case.pairs]
    lengths = [kv_len for _, kv_len in case.pairs]
    ends = torch.tensor([0, *q_lens]).cumsum(0).int()
    found: dict[str, Any] = {"seq_lens": torch.tensor(lengths, dtype=integers)}
    if case.extra_rows or any(n != 1 for n in q_lens):
        found["qo_indptr"] = ends
    batch_size, page_size = len(q_lens), case.page_size
    width = max(1, 1, *(-(-n // page_size) for n in lengths))
    counts = torch.tensor([-(-max(n, 0) // page_size) for n in lengths])
    live = torch.arange(width) < counts[:, None]
    ids = torch.randperm(num_pages, generator=rng).int()
    table = torch.full((batch_size, 2, width), -1, dtype=torch.int32)
    for side in range(2 if case.page_table == "separate" else 1):
        table[:, side][live] = ids[side * int(counts.sum()) :][: int(counts.sum())]
    if case.page_table == "slots":
        slots = torch.full((case.num_tokens,), -1, dtype=integers)
        for b, (q_len, kv_len) in enumerate(case.pairs):
            for i in range(q_len if kv_len > 0 else 0):
                position = kv_len - q_len + i
                page = int(table[b, 0, position // page_size])
                slots[int(ends[b]) + i] = page * page_size + position % page_size
        slots[1 : len(slots) : 5] = -1
        return found | {"slots": slots}
    return found | {"pages": _pages(case, table, rng)}


def _pages(case: TokenCase, table: Tensor, rng: torch.Generator) -> object:
    batch_size, page_size = len(case.pairs), case.page_size
    if case.page_table == "csr":
        counts = [(max(kv_len, 0) + page_size - 1) // page_size for _, kv_len in case.pairs]
        indptr = torch.tensor([0, *counts]).cumsum(0).int()
        used = [table[b, 0, :n] for b, n in enumerate(counts)]
        return jitattn.CsrPages(indptr, torch.cat([*used, torch.tensor([-7]).int()]))
    entries = table if case.page_table == "separate" else table[:, 0]
    if case.page_table == "token":
        entries = (entries[..., None] * page_size + torch.arange(page_size).int()).flatten(1)
        entries = entries.masked_fill(entries < 0, -1)
    rows = None
    if case.rows:
        rows = torch.randperm(batch_size + 2, generator=rng)[:batch_size].to(_integers(case))
        pool = torch.full((batch_size + 2, *entries.shape[1:]), -9, dtype=torch.int32)
        pool[rows.long()] = entries
        entries = pool
    kind = jitattn.TokenTable if case.page_table == "token" else jitattn.BlockTable
    return kind(entries, rows=rows)


def _transformations(case: TokenCase, rng: torch.Generator) -> dict[str, Any]:
    found: dict[str, Any] = {"rope": case.rope, "norm_eps": 1e-5}
    dtype = getattr(torch, case.dtype)
    width = (case.num_qo_heads + 2 * case.num_kv_heads) * case.head_dim
    if case.use_bias:
        found["bias"] = torch.randn(width, generator=rng).to(dtype)
    if case.use_norm:
        found["q_norm"] = 1 + torch.randn(case.head_dim, generator=rng) / 4
        found["k_norm"] = (torch.randn(case.head_dim, generator=rng)).to(dtype)
    for name in ("qk_transform", "v_transform"):
        if getattr(case, name) is not None:
            found[name] = getattr(case, name)
    if case.rope is None:
        return found
    if case.positions == "given":
        shape = (3, case.num_tokens) if case.mrope else (case.num_tokens,)
        positions = torch.randint(0, 1_000_001, shape, generator=rng)
        found["positions"] = positions.to(_integers(case))
    if case.positions == "delta":
        deltas = torch.randint(-5, 1_000_000, (len(case.pairs),), generator=rng)
        found["position_delta"] = deltas.to(_integers(case))
    return found


def _scale(case: TokenCase, rng: torch.Generator) -> float | Tensor:
    if case.scales == "number":
        return 0.125
    if case.scales == "tensor":
        return torch.tensor([0.3])
    return (torch.rand((case.num_kv_heads, 3), generator=rng) + 0.1)[:, 1]  # a strided view


# --- pools ----------------------------------------------------------------------------------------


def make_cache(case: TokenCase) -> tuple[list[Tensor], Callable[[list[Tensor]], object], int]:
    """Return pools of bytes, what sees a cache in them, and how many pages that has."""
    num_pages = sum(-(-max(kv_len, 0) // case.page_size) for _, kv_len in case.pairs)
    num_pages = 3 + (2 if case.page_table == "separate" else 1) * num_pages
    kind = DType(case.kv_dtype).blocks
    if kind is not None:
        both = case.head_dim, case.value_dim
        dims = [(d // 2, torch.uint8) for d in both]
        blocks = [(kind.count(d), torch.float8_e4m3fn) for d in both]
        if kind.has_zeros:
            blocks = [(2 * kind.count(d), torch.float16) for d in both]
        memory = "NHD" if case.memory == "interleaved" else case.memory
        halves = [_pair(replace(case, memory=memory), num_pages, *part) for part in (dims, blocks)]
        pools = [pool for part, _ in halves for pool in part]

        def rebuild(memory: list[Tensor]) -> object:
            (k, v), (ks, vs) = halves[0][1](memory[:2]), halves[1][1](memory[2:])
            if kind.has_zeros:
                ks, vs = ks.unflatten(-1, (-1, 2)), vs.unflatten(-1, (-1, 2))
            return jitattn.QuantizedKV(k, v, ks, vs)

        return pools, rebuild, num_pages
    dtype = getattr(torch, case.kv_dtype)
    pools, views = _pair(case, num_pages, (case.head_dim, dtype), (case.value_dim, dtype))
    if case.memory == "interleaved" and case.page_table == "separate":
        num_pages *= 2  # one tensor, passed twice
    return pools, views, num_pages


Views = Callable[[list[Tensor]], tuple[Tensor, Tensor]]


def _pair(
    case: TokenCase, num_pages: int, k: tuple[int, torch.dtype], v: tuple[int, torch.dtype]
) -> tuple[list[Tensor], Views]:
    """Two pools of bytes, and K and V in them in the order of the case's ``kv_layout``."""
    heads, size = case.num_kv_heads, case.page_size
    memory = case.memory if k == v or case.memory not in ("interleaved", "packed") else "NHD"
    shapes = {
        "NHD": (num_pages, size, heads),
        "HND": (num_pages, heads, size),
        "interleaved": (2 * num_pages, size, heads),
        "layers": (num_pages, 3, size, heads),
        "packed": (num_pages, size, heads, 2),
        "odd": (num_pages, size, heads),
    }
    gap = 3 if memory == "odd" else 0  # elements after each row

    def pool(side: tuple[int, torch.dtype]) -> Tensor:
        rows = math.prod(shapes[memory])
        return torch.zeros(rows * (side[0] + gap) * side[1].itemsize, dtype=torch.uint8)

    def view(memory_of: Tensor, side: tuple[int, torch.dtype], which: int) -> Tensor:
        rows = memory_of.view(side[1]).view(*shapes[memory], side[0] + gap)[..., : side[0]]
        if memory == "layers":
            rows = rows[:, 1]
        if memory == "packed":
            rows = rows[:, :, :, which]
        if memory == "interleaved" and case.page_table != "separate":
            rows = rows[which::2]
        tokens = rows.transpose(1, 2) if memory == "HND" else rows
        return tokens if case.kv_layout == "NHD" else tokens.transpose(1, 2)

    shares = memory in ("interleaved", "packed")
    pools = [pool(k)] if shares else [pool(k), pool(v)]

    def views(pools: list[Tensor]) -> tuple[Tensor, Tensor]:
        return view(pools[0], k, 0), view(pools[-1], v, 1)

    return [*pools, pools[0]] if shares else pools, views


# --- comparison -----------------------------------------------------------------------------------


def check_tokens(case: TokenCase, device: str = "cuda") -> None:
    """Run a case on ``device`` and by definition, and compare all memory."""
    inputs = make_token_inputs(case)
    compare(inputs, inputs.to(device))


def compare(inputs: TokenInputs, other: TokenInputs) -> None:
    """Run ``inputs`` by definition, and ``other``, fresh copies of them; compare all memory."""
    case = inputs.case
    want = inputs.to("cpu")
    q_want, q = want.run(), other.run()
    # Where the pools are: on a card, comparing them takes no time.
    device = other.pools[0].device
    if not case.computes:
        for found, right in zip(other.pools, want.pools, strict=True):
            assert torch.equal(found, right.to(device)), "bytes differ"
    else:
        assert_only_written_bytes_differ(inputs, want, other)
        for found, right in zip(values_of(other), values_of(want, device), strict=True):
            assert_near(found, right, case)
    if q is not None and q_want is not None:
        rows = live_rows(case)
        assert_near(
            q[rows].cpu().float(), q_want[rows].float(), replace(case, kv_dtype=str(q.dtype)[6:])
        )
        given = other.arguments.get("q_out")
        if isinstance(given, Tensor):
            assert q.data_ptr() == given.data_ptr()
            dead = sorted(set(range(case.num_tokens)) - set(rows))
            assert torch.equal(bits(q[dead].cpu()), bits(q_want[dead]))


def assert_only_written_bytes_differ(
    inputs: TokenInputs, want: TokenInputs, other: TokenInputs
) -> None:
    """Compare pools but for bytes that the definition writes: those it leaves keep any mark."""
    marked = inputs.to("cpu", fill=0x5A)
    marked.run()
    for found, right, mark in zip(other.pools, want.pools, marked.pools, strict=True):
        is_left = right != mark
        differs = found != right.to(found.device)
        assert not (differs & is_left.to(found.device)).any(), "bytes of others changed"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def live_rows(case: TokenCase) -> list[int]:
    rows, begin = [], 0
    for q_len, kv_len in case.pairs:
        rows += range(begin, begin + q_len) if kv_len > 0 else ()
        begin += q_len
    return rows


def values_of(inputs: TokenInputs, device: torch.device | None = None) -> list[Tensor]:
    """What K and V stand for, all of it, without the scales of the call; on ``device`` if given."""
    cache = inputs.arguments["kv_cache"]
    if isinstance(cache, jitattn.QuantizedKV):
        sides = (cache.k, cache.k_block_scales), (cache.v, cache.v_block_scales)
        return [
            jitattn.quant.dequantize_kv(
                data.to(device), dtype=cache.kv_dtype, block_scales=scales.to(device)
            )
            for data, scales in sides
        ]
    return [side.to(device) for side in cache]


# A step between neighbouring numbers, relative to the number, and absolutely.
_STEPS = {
    "bfloat16": (2.0**-7, 2.0**-12),
    "float16": (2.0**-9, 2.0**-14),
    "float8_e4m3fn": (2.0**-3, 2.0**-8),
    "float8_e5m2": (2.0**-2, 2.0**-15),
    "int8": (0.0, 1.0),
    "nvfp4": (0.6, 0.6),
    "int4": (0.15, 1.0),
    "int4_g64": (0.15, 1.0),
    "int4_g32": (0.15, 1.0),
}


def assert_near(found: Tensor, want: Tensor, case: TokenCase) -> None:
    """Within a step of what is stored: sums of floats round otherwise than those of doubles."""
    # Rows are rounded to the type of qkv before they are stored.
    steps = _STEPS[case.dtype], _STEPS[case.kv_dtype]
    relative, absolute = (max(step) for step in zip(*steps, strict=True))
    assert found.dtype == want.dtype
    # What is the same to the bit needs no arithmetic: most of a pool.
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    where = found.contiguous().view(integer) != want.contiguous().view(integer)
    torch.testing.assert_close(
        *(found[where].float(), want[where].float()),
        **{"rtol": relative, "atol": absolute, "equal_nan": True},
    )
