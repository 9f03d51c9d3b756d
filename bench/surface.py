"""The surface: one second for each of several hundred configurations, rivals beside.

    python -m bench.surface --bundle DIR            # precompile what the points need; no GPU
    python -m bench.surface -o surface.jsonl        # measure, resuming what the file already has
    python -m bench.surface --table surface.jsonl   # the map's worst points, and its means
    python -m bench.surface --plot surface.jsonl -o docs/images/surface.svg   # needs matplotlib

A point is one configuration and one batch. Points are a grid around a few base batches, one
argument changed at a time, and a seeded random sample of everything at once. Each is timed in a
CUDA graph of (plan refresh + `RUNS` runs) / `RUNS` for jitattn and of `RUNS` runs for a rival, and
jitattn's output is compared with a float32 computation of sampled rows, so that a fast wrong answer
is not a point of the map.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jitattn
from jitattn.kernels.registry import config_of
from jitattn.spec.dtype import BLOCK_DTYPES

RUNS = 32
_FP8 = "float8_e4m3fn"
_FA3_HEAD_DIMS = range(8, 257, 8)


@dataclass(frozen=True)
class Point:
    """A configuration and a batch.

    Attributes:
        q_len: query tokens of each request.
        kv_lens: tokens of each request.
        page_size: None without pages (``page_table="ragged"``).
    """

    kind: str
    q_len: int
    kv_lens: tuple[int, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_vo: int | None = None
    page_size: int | None = 16
    page_table: str = "shared"
    kv_dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    fp8_products: str = "exact"
    window_left: int = -1
    logits_soft_cap: float = 0.0
    use_sinks: bool = False
    causal: bool = True
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        """What differs from the defaults, and the batch."""
        lens = set(self.kv_lens)
        batch = f"{len(self.kv_lens)}x{self.kv_lens[0] if len(lens) == 1 else 'ragged'}"
        parts = [self.kind, batch, f"q{self.q_len}", f"h{self.num_qo_heads}/{self.num_kv_heads}"]
        parts.append(f"d{self.head_dim}" + (f"x{self.head_dim_vo}" if self.head_dim_vo else ""))
        parts.append(f"p{self.page_size}" if self.page_size else "nopages")
        parts += [self.page_table] * (self.page_table not in ("shared", "ragged"))
        parts += [self.kv_dtype] * (self.kv_dtype != "bfloat16")
        parts += ["q8"] * self.has_fp8_queries + [self.fp8_products] * (
            self.fp8_products != "exact"
        )
        parts += [f"w{self.window_left}"] * (self.window_left >= 0)
        parts += [f"cap{self.logits_soft_cap:g}"] * (self.logits_soft_cap > 0)
        parts += ["sinks"] * self.use_sinks + ["full"] * (not self.causal)
        parts += ["invariant"] * self.batch_invariant
        return "-".join(parts)

    @property
    def arguments(self) -> dict[str, Any]:
        """The planner's arguments, but for the device."""
        names = (
            *("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo", "page_size"),
            *("page_table", "kv_dtype", "window_left", "logits_soft_cap", "use_sinks", "causal"),
            *("batch_invariant", "q_dtype", "fp8_products"),
        )
        return {name: getattr(self, name) for name in names}

    @property
    def has_fp8_queries(self) -> bool:
        """Whether queries have 8 bits."""
        return self.q_dtype == _FP8

    @property
    def flop(self) -> int:
        """Operations of both products over the keys that each query token sees."""
        seen = 0
        for kv_len in self.kv_lens:
            q_len = min(self.q_len, kv_len)
            for row in range(q_len):
                last = kv_len - q_len + row + 1 if self.causal else kv_len
                first = max(last - 1 - self.window_left, 0) if self.window_left >= 0 else 0
                seen += last - first
        return 2 * (self.head_dim + (self.head_dim_vo or self.head_dim)) * self.num_qo_heads * seen

    @property
    def has_rival(self) -> bool:
        """Whether FlashAttention-3 takes it over pages, in whatever pages it can."""
        return (
            self.kv_dtype == self.q_dtype
            and self.head_dim in _FA3_HEAD_DIMS
            and (self.head_dim_vo in (None, self.head_dim))
        )


PREFILL = Point("prefill", 2048, (2048,) * 4)
DECODE = Point("decode", 1, (4096,) * 16)


_HEADS = {
    32: (64, 8),
    48: (64, 8),
    64: (64, 8),
    192: (16, 8),
    224: (16, 8),
    256: (16, 8),
    512: (8, 4),
}


def _with_head_dim(base: Point, head_dim: int, **changes: Any) -> Point:
    """Return a point of another head dim, with as many heads as models of it have."""
    num_qo_heads, num_kv_heads = _HEADS.get(head_dim, (32, 8))
    heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}
    return replace(base, head_dim=head_dim, **heads, **changes)


def _one_change(base: Point) -> Iterator[Point]:
    """Yield the points that change one argument of ``base``."""
    no_pages = {"page_table": "ragged", "page_size": None}
    yield base
    for dim in (32, 48, 64, 80, 96, 112, 160, 192, 224, 256, 512):
        yield _with_head_dim(base, dim)
    # Latent attention's prompts with K and V of each head.
    projected = replace(base, head_dim=192, head_dim_vo=128, num_qo_heads=16, num_kv_heads=16)
    yield from (projected, replace(projected, **no_pages))  # type: ignore[arg-type]
    for dim in (64, 96, 192, 256):
        yield _with_head_dim(base, dim, page_size=1)
        yield _with_head_dim(base, dim, **no_pages)
    for num_qo_heads, num_kv_heads in ((32, 32), (28, 4), (8, 1), (16, 1)):
        yield replace(base, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)
    changes: dict[str, tuple[object, ...]] = {
        "page_size": (1, 2, 3, 4, 8, 32, 48, 64, 128, 256),
        "page_table": ("separate", "csr", "token"),
        "kv_dtype": ("float8_e4m3fn", "float8_e5m2", "int8", "nvfp4", "int4", "int4_g32"),
        "window_left": (500,),
        "logits_soft_cap": (30.0,),
        "use_sinks": (True,),
        "causal": (False,),
    }
    for name, values in changes.items():
        yield from (replace(base, **{name: value}) for value in values)  # type: ignore[arg-type]
    yield replace(base, **no_pages)  # type: ignore[arg-type]


def _batches() -> Iterator[Point]:
    """Yield other batches."""
    rng = random.Random(0)
    ragged = tuple(int(2 ** rng.uniform(7, 14)) for _ in range(64))
    for lens in ((512,), (1024,), (4096,), (16384,), (256,) * 16, (100,) * 64, (2048,) * 8):
        yield replace(PREFILL, q_len=lens[0], kv_lens=lens)
    for q_len, lens in ((64, (4096,) * 16), (20, (4096,) * 16), (200, (30000,) * 4)):
        yield replace(PREFILL, q_len=q_len, kv_lens=lens)
    for lens in (
        *((131072,), (2048,) * 64, (4096,) * 64, (8192,) * 64, (128,) * 128, (300,) * 300),
        *((9000,) * 17, (3000,) * 24, ragged),
    ):
        yield replace(DECODE, kv_lens=lens)
    for q_len in (2, 3, 4, 8, 16):
        several = replace(DECODE, q_len=q_len)
        yield several
        yield replace(several, kv_dtype="float8_e4m3fn")
        yield replace(several, num_qo_heads=8, num_kv_heads=1)
        yield _with_head_dim(several, 64)
    for kv_dtype in ("float8_e4m3fn", *BLOCK_DTYPES):
        yield replace(DECODE, kv_lens=(8192,) * 64, kv_dtype=kv_dtype)
        yield replace(PREFILL, kv_lens=(2048,) * 8, kv_dtype=kv_dtype)
    yield replace(DECODE, q_len=4, kv_lens=(3000,) * 24)
    yield replace(DECODE, q_len=4, kv_lens=(4096,) * 8)


def _wide_heads() -> Iterator[Point]:
    """Yield prefill of head_dim 512: as Gemma's global layers, and as pages decide the loader."""
    for heads in ((16, 2), (8, 1), (32, 8)):
        for lens in ((2048,) * 4, (8192,)):
            own = replace(PREFILL, q_len=lens[0], kv_lens=lens, head_dim=512)
            yield replace(own, num_qo_heads=heads[0], num_kv_heads=heads[1])
    base = replace(PREFILL, head_dim=512, num_qo_heads=16, num_kv_heads=2)
    changes: tuple[dict[str, Any], ...] = (
        *({"page_size": n} for n in (1, 8, 64)),
        {"page_table": "ragged", "page_size": None},
        *({"logits_soft_cap": 30.0}, {"window_left": 500}, {"causal": False}),
        *({"head_dim_vo": 128}, {"head_dim": 256, "head_dim_vo": 512}),
        {"q_len": 256, "kv_lens": (8192,) * 4},
        *({"kv_dtype": name} for name in ("float8_e4m3fn", "nvfp4")),
    )
    yield from (replace(base, **change) for change in changes)


def _fp8_queries() -> Iterator[Point]:
    """Yield prefill and decode of FP8 queries, with products of 8 bits and of 16."""
    queries = {"q_dtype": _FP8, "kv_dtype": _FP8}
    fast = replace(PREFILL, fp8_products="fast", **queries)  # type: ignore[arg-type]
    for lens in ((16384,), (2048,) * 4, (2048,) * 8):
        yield replace(fast, q_len=lens[0], kv_lens=lens)
        for dim in (64, 256):
            yield replace(_with_head_dim(fast, dim), q_len=lens[0], kv_lens=lens)
        yield replace(fast, q_len=lens[0], kv_lens=lens, fp8_products="exact")
        yield replace(PREFILL, q_len=lens[0], kv_lens=lens)
    for page_size in (4, 64):
        yield replace(fast, page_size=page_size)
    yield replace(fast, causal=False)
    yield replace(fast, q_len=512, kv_lens=(16384,) * 4)
    for products in ("fast", "exact"):
        yield replace(DECODE, fp8_products=products, **queries)  # type: ignore[arg-type]


def _invariant() -> Iterator[Point]:
    """Yield batch-invariant twins of points, to be held against these."""
    yield from (PREFILL, DECODE, *_batches())
    for base in (PREFILL, DECODE):
        for dim in (64, 256):
            yield _with_head_dim(base, dim)
        for kv_dtype in ("float8_e4m3fn", "nvfp4"):
            yield replace(base, kv_dtype=kv_dtype)


def grid() -> Iterator[Point]:
    """Yield the points that change one argument or the batch of two base batches."""
    yield from _one_change(PREFILL)
    yield from _one_change(DECODE)
    yield from _batches()
    yield from _wide_heads()
    yield from _fp8_queries()
    yield from (replace(point, batch_invariant=True) for point in _invariant())


def sample(count: int, seed: int) -> Iterator[Point]:
    """Yield points that nobody had in mind."""
    rng = random.Random(seed)
    for _ in range(count):
        is_prefill = rng.random() < 0.5
        group, num_kv_heads = rng.choice((1, 2, 4, 5, 7, 8, 12, 16)), rng.choice((1, 2, 4, 8))
        batch = rng.choice((1, 2, 4, 8)) if is_prefill else rng.choice((1, 5, 16, 33, 64, 100))
        top = 2048 if is_prefill else 8192
        lens = [int(2 ** rng.uniform(6, math.log2(top))) for _ in range(batch)]
        if rng.random() < 0.5:
            lens = [lens[0]] * batch
        q_len = max(lens) if is_prefill else rng.choice((1, 1, 1, 2, 4, 6, 8, 16))
        yield Point(
            "prefill" if is_prefill else "decode",
            q_len,
            tuple(lens),
            num_qo_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=rng.choice((32, 64, 64, 80, 96, 112, 128, 128, 128, 160, 192, 256)),
            page_size=rng.choice((1, 2, 4, 8, 16, 16, 32, 48, 64, 128)),
            page_table=rng.choice(("shared", "shared", "separate", "csr", "token")),
            window_left=rng.choice((-1, -1, -1, 127, 1000)),
            use_sinks=rng.random() < 0.2,
            causal=rng.random() < 0.85,
        )


def points(count: int, seed: int) -> list[Point]:
    """Return the grid and a sample, each point once."""
    return list(dict.fromkeys((*grid(), *sample(count, seed))))


class Batch:
    """The tensors of a point, pages in random order."""

    def __init__(self, point: Point) -> None:
        """Fill the cache with normal random numbers."""
        import torch

        self.point = point
        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Any:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made.normal_(generator=generator)

        lens, heads, dim = point.kv_lens, point.num_kv_heads, point.head_dim
        dim_vo = point.head_dim_vo or dim
        self.q_lens = [min(point.q_len, n) for n in lens]
        self.q = normal(sum(self.q_lens), point.num_qo_heads, dim)
        if point.has_fp8_queries:
            self.q = self.q.to(torch.float8_e4m3fn)
        self.sinks = normal(point.num_qo_heads).float() if point.use_sinks else None
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        starts = [0, *itertools.accumulate(self.q_lens)]
        self.qo_indptr = torch.tensor(starts, dtype=torch.int32, device=device)
        kv_starts = [0, *itertools.accumulate(lens)]
        self.kv_indptr = torch.tensor(kv_starts, dtype=torch.int32, device=device)
        if point.page_size is None:
            self.k, self.v = normal(sum(lens), heads, dim), normal(sum(lens), heads, dim_vo)
            return
        size = point.page_size
        counts = [-(-n // size) for n in lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
        self.block_table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for row, pages in zip(self.block_table, order.split(counts), strict=True):
            row[: len(pages)] = pages
        self.block_table = self.block_table.to(device)
        self.page_starts = [0, *itertools.accumulate(counts)]
        self.order = order.to(device)
        # K and V interleaved, as engines have them, unless they differ in width.
        if dim == dim_vo:
            kv = normal(sum(counts), 2, size, heads, dim)
            self.k, self.v = kv[:, 0], kv[:, 1]
        else:
            self.k = normal(sum(counts), size, heads, dim)
            self.v = normal(sum(counts), size, heads, dim_vo)

    def pages(self) -> Any:
        """Return the point's page table."""
        import torch

        point = self.point
        if point.page_table == "ragged":
            return jitattn.RaggedKV(self.kv_indptr)
        if point.page_table == "separate":
            return jitattn.BlockTable(torch.stack((self.block_table, self.block_table), dim=1))
        if point.page_table == "csr":
            starts = torch.tensor(self.page_starts, dtype=torch.int32, device=self.q.device)
            return jitattn.CsrPages(starts, self.order)
        if point.page_table == "token":
            tokens = torch.arange(max(point.kv_lens), device=self.q.device)
            pages = self.block_table[:, tokens // point.page_size]
            return jitattn.TokenTable((pages * point.page_size + tokens % point.page_size).int())
        return jitattn.BlockTable(self.block_table)

    def tokens(self, cache: Any, b: int) -> Any:
        """Return the tokens of a request, [kv_len, num_kv_heads, dim]."""
        size, kv_len = self.point.page_size, self.point.kv_lens[b]
        if size is None:
            start = int(self.kv_indptr[b])
            return cache[start : start + kv_len]
        pages = self.block_table[b, : -(-kv_len // size)].long()
        return cache[pages].flatten(0, 1)[:kv_len]

    def error(self, out: Any, caches: tuple[Any, Any]) -> float:
        """Return the largest deviation of some rows, over the largest value."""
        import torch

        point, worst = self.point, 0.0
        for b in {0, len(point.kv_lens) // 2, len(point.kv_lens) - 1}:
            k, v = (self.tokens(cache, b).float() for cache in caches)
            begin, q_len = int(self.qo_indptr[b]), self.q_lens[b]
            rows = torch.tensor(sorted({0, q_len // 2, q_len - 1}), device=self.q.device)
            q = self.q[begin + rows].float()
            group = point.num_qo_heads // point.num_kv_heads
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * point.head_dim**-0.5
            if point.logits_soft_cap:
                scores = torch.tanh(scores / point.logits_soft_cap) * point.logits_soft_cap
            behind = (point.kv_lens[b] - q_len + rows)[:, None] - torch.arange(
                k.shape[0], device=k.device
            )
            if point.causal:
                scores.masked_fill_(behind < 0, -math.inf)
            if point.window_left >= 0:
                scores.masked_fill_(behind > point.window_left, -math.inf)
            if self.sinks is not None:
                sinks = self.sinks[:, None, None].expand(-1, len(rows), 1)
                scores = torch.cat((scores, sinks), dim=2)
                v = torch.cat((v, torch.zeros_like(v[:1])))
            wanted = torch.einsum("hqk,khd->qhd", scores.softmax(2), v)
            got = out[begin + rows].float()
            worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
        return worst


def seconds(plan: Callable[[], object] | None, run: Callable[[], object], runs: int) -> float:
    """Return the time of a run in a graph of ``runs``, the plan counted once: median of five."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if plan:
            plan()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        if plan:
            plan()
        for _ in range(runs):
            run()
    times = []
    graph.replay()
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / runs)
    return sorted(times)[2]


def measure_jitattn(
    batch: Batch, runs: int, *, counts_quantisation: bool = False
) -> dict[str, object]:
    """Return the time and the error of jitattn, with or without that of a quantised cache."""
    import torch

    point = batch.point
    planner = jitattn.AttentionPlanner(**point.arguments, device=batch.q.device)
    cache: Any = (batch.k, batch.v)
    caches = cache
    if point.kv_dtype in BLOCK_DTYPES:
        parts = [jitattn.quantize_kv(x, point.kv_dtype) for x in cache]
        (k, k_scales), (v, v_scales) = parts
        cache = jitattn.QuantizedKV(k, v, k_scales, v_scales)
        caches = tuple(
            jitattn.dequantize_kv(x, dtype=point.kv_dtype, block_scales=scales)
            for x, scales in parts
        )
    elif point.kv_dtype != "bfloat16":
        cache = tuple(jitattn.quantize_kv(x, point.kv_dtype) for x in cache)
        caches = tuple(x.float() for x in cache)
    kv = planner.bind(cache)
    pages, starts, most = batch.pages(), batch.qo_indptr, max(batch.q_lens)
    plan = planner.plan(pages, batch.seq_lens, starts, max_q_len=most)
    out = torch.empty(
        *batch.q.shape[:2], point.head_dim_vo or point.head_dim, dtype=torch.bfloat16, device="cuda"
    )
    out.fill_(math.nan)
    run = lambda: plan.run(batch.q, kv, out=out, sinks=batch.sinks)  # noqa: E731
    run()
    error = batch.error(out, (batch.k, batch.v) if counts_quantisation else caches)
    return {"us": seconds(plan.refresh, run, runs) * 1e6, "error": error}


def measure_fa3(batch: Batch, runs: int, *, paged: bool) -> float:
    """Return the microseconds of FlashAttention-3 as vLLM builds it."""
    import torch

    point = batch.point
    op = torch.ops._vllm_fa3_C.fwd
    k, v, table, cu, used = batch.k, batch.v, None, batch.kv_indptr, None
    if paged:
        table, cu, used = batch.block_table, None, batch.seq_lens
    elif point.page_size is not None:
        many = range(len(point.kv_lens))
        k, v = (torch.cat([batch.tokens(cache, b) for b in many]) for cache in (k, v))
    sinks = None if batch.sinks is None else batch.sinks.bfloat16()
    scales = [None] * 3
    if point.has_fp8_queries:
        k, v = k.to(batch.q.dtype), v.to(batch.q.dtype)
        ones = torch.ones(len(point.kv_lens), point.num_kv_heads, device="cuda")
        scales = [ones] * 3
    most, longest = max(batch.q_lens), max(point.kv_lens)
    left = point.window_left
    right = (0 if point.causal else -1) if left >= 0 else -1

    def run() -> object:
        return op(
            *(batch.q, k, v, None, None, None, None, batch.qo_indptr, cu, None, None, used),
            *(most, longest, table, None, None, None, None, None, *scales),
            *(point.head_dim**-0.5, point.causal, left, right, point.logits_soft_cap, True),
            *(None, 0, None, 0, sinks, 1, 0, None),
        )

    return seconds(None, run, runs) * 1e6


def measure(point: Point, rivals: bool) -> dict[str, object]:
    """Return a point's record; an exception of either side is its reason."""
    record: dict[str, object] = {"name": point.name, **asdict(point)}
    batch = Batch(point)
    runs = max(2, min(RUNS, int(2e13 / max(point.flop, 1))))
    try:
        record |= measure_jitattn(batch, runs)
    except Exception as error:
        record["failed"] = f"{type(error).__name__}: {error}"[:300]
    if rivals and point.has_rival:
        for name, paged in (("fa3", True), ("fa3_contiguous", False)):
            if paged and point.page_size is None:
                continue
            try:
                record[name] = measure_fa3(batch, runs, paged=paged)
            except Exception as error:
                record[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
    return record


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.surface", description=__doc__)
    parser.add_argument("--bundle", type=Path, help="precompile the points' kernels into DIR")
    parser.add_argument("--only", default="", help="measure points whose names contain one of a,b")
    parser.add_argument("--sample", type=int, default=60, help="random points besides the grid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3's library, as vLLM builds it")
    parser.add_argument("--table", type=Path, help="print what a file of records says")
    parser.add_argument("--plot", type=Path, help="draw the ratios of a file of records")
    parser.add_argument("-o", "--out", type=Path, help="file of records, or of the plot")
    options = parser.parse_args(arguments)
    if options.table:
        return print_table(read(options.table))
    if options.plot:
        return plot(read(options.plot), options.out)
    chosen = points(options.sample, options.seed)
    if options.only:
        marks = options.only.split(",")
        chosen = [p for p in chosen if any(mark in f"{p.name} " for mark in marks)]
    if options.bundle:
        configs = dict.fromkeys(config_of(point.arguments) for point in chosen)
        report = jitattn.precompile(
            list(configs), arch="sm_90a", out=options.bundle, progress=False
        )
        return 1 if report.failures else 0
    return run(chosen, options)


def run(chosen: Iterable[Point], options: argparse.Namespace) -> int:
    """Measure what the file lacks, a line a point."""
    import torch

    if options.fa3:
        torch.ops.load_library(str(options.fa3))
    known = {record["name"] for record in read(options.out)} if options.out.exists() else set()
    with options.out.open("a") as file:
        for point in chosen:
            if point.name in known:
                continue
            record = measure(point, bool(options.fa3))
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(line(record), flush=True)
            torch.cuda.empty_cache()
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file."""
    return [json.loads(text) for text in path.read_text().splitlines()]


def ratio(record: dict[str, Any]) -> float | None:
    """Return the paged rival's time, or without pages the contiguous one's, over jitattn's."""
    rival = record.get("fa3" if record["page_size"] is not None else "fa3_contiguous")
    return rival / record["us"] if rival and "us" in record else None


def line(record: dict[str, Any]) -> str:
    """Return a record in one line."""
    if "us" not in record:
        return f"{record['name']:60s} {record.get('failed')}"
    of = ratio(record)
    fa3, flat = (record.get(name, math.nan) for name in ("fa3", "fa3_contiguous"))
    shown = "-" if of is None else f"{of:.3f}"
    return (
        f"{record['name']:60s} {record['us']:9.1f} us  fa3 {fa3:9.1f}  contiguous {flat:9.1f}  "
        f"ratio {shown}  error {record['error']:.1e}"
    )


def print_table(records: list[dict[str, Any]]) -> int:
    """Print the worst twenty and the geometric means by kind."""
    rated = [(of, record) for record in records if (of := ratio(record)) is not None]
    for kind in ("prefill", "decode"):
        own = [of for of, record in rated if record["kind"] == kind]
        if own:
            mean = math.exp(sum(map(math.log, own)) / len(own))
            print(f"{kind}: {len(own)} points with a rival, geometric mean {mean:.3f}")
    for _, record in sorted(rated, key=lambda pair: pair[0])[:20]:
        print(line(record))
    for record in records:
        if "failed" in record or record.get("error", 0) > 0.05:
            print(line(record))
    return 0


def plot(records: list[dict[str, Any]], out: Path) -> int:
    """Draw the ratio of each point with a rival, a row a point and a column a kind."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(13, 14), layout="constrained")
    for axis, kind in zip(axes, ("prefill", "decode"), strict=True):
        rated = {r["name"]: of for r in records if r["kind"] == kind and (of := ratio(r))}
        rated = dict(sorted(rated.items(), key=lambda item: item[1]))
        image = axis.imshow(
            [[of] for of in rated.values()], aspect="auto", cmap="RdYlGn", vmin=0.7, vmax=1.3
        )
        axis.set_yticks(range(len(rated)), [name.removeprefix(f"{kind}-") for name in rated])
        axis.tick_params(axis="y", labelsize=6)
        axis.set_xticks([])
        axis.set_title(f"{kind}: FA3 / jitattn")
        for row, of in enumerate(rated.values()):
            axis.text(0, row, f"{of:.2f}", ha="center", va="center", fontsize=6)
    fig.colorbar(image, ax=axes, shrink=0.4)
    fig.savefig(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
