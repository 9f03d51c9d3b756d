"""gather_kv beside a copy of as many bytes: K and V of a batch out of their pages, in a CUDA graph.

    python -m bench.bench_gather --json bench/results/gather.jsonl

The copy reads and writes as many bytes as the gather does, in one piece for K and one for V.
Others that gather are measured where they can be imported; a wrong output is not timed. Pages lie
in random order. The L2 cache is filled with something else before each replay, whose runs have
caches of their own, or as many as exceed it twice. Host times are of calls with ``out``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

import jitattn
from bench import command, records
from bench.contenders import SkipError
from bench.options import cuda_device, make_parser
from bench.report import console, print_head
from bench.timing import L2Flush, L2Policy, Timer, Timing, l2_bytes, no_gc, summarize
from bench.turns import WrongError

NUM_KV_HEADS, HEAD_DIM = 8, 128
_HOST_CALLS = 200


@dataclass(frozen=True)
class Case:
    """A batch whose K and V are gathered; its requests are equally long."""

    num_tokens: int
    batch_size: int
    kv_dtype: str
    page_size: int = 16

    @property
    def name(self) -> str:
        return f"{self.num_tokens}x{self.batch_size}-p{self.page_size}-{self.kv_dtype}"

    @property
    def stored(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.kv_dtype)
        return dtype

    @property
    def num_pages(self) -> int:
        return self.batch_size * -(-self.num_tokens // self.batch_size // self.page_size)

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: K and V as stored, and as bfloat16."""
        elements = 2 * self.num_tokens * NUM_KV_HEADS * HEAD_DIM
        return elements * (self.stored.itemsize + torch.bfloat16.itemsize)


CASES = tuple(
    Case(num_tokens, batch_size, kv_dtype, page_size)
    for kv_dtype in ("bfloat16", "float8_e4m3fn")
    for num_tokens, batch_size in ((64, 4), (8192, 1), (8192, 32))
    for page_size in ((16,) if batch_size < 32 else (16, 64))
)


@dataclass(frozen=True)
class Batch:
    """The tensors of a case, with several caches that lie alike."""

    case: Case
    caches: Tensor  # [num_copies, num_pages, 2, page_size, num_kv_heads, head_dim]
    table: Tensor  # [batch_size, pages of a request]
    seq_lens: Tensor
    slots: Tensor  # [num_tokens]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim], where K is gathered to
    v: Tensor
    kv_indptr: Tensor

    def wanted(self, copy: int) -> tuple[Tensor, Tensor]:
        """K and V as torch gathers them."""
        tokens = self.caches[copy].to(torch.bfloat16).movedim(1, 0).flatten(1, 2)
        return tokens[0][self.slots], tokens[1][self.slots]


def make_batch(case: Case, num_copies: int, device: torch.device) -> Batch:
    """Make a batch whose pages lie in random order."""
    rng = torch.Generator(device).manual_seed(0)
    shape = (num_copies, case.num_pages, 2, case.page_size, NUM_KV_HEADS, HEAD_DIM)
    caches = torch.empty(shape, dtype=case.stored, device=device)
    for cache in caches:
        cache.copy_(torch.randn(shape[1:], generator=rng, device=device).to(case.stored))
    ids = torch.randperm(case.num_pages, generator=rng, device=device).to(torch.int32)
    table = ids.view(case.batch_size, -1)
    length = case.num_tokens // case.batch_size
    places = torch.arange(case.page_size, device=device)
    slots = (table.long()[:, :, None] * case.page_size + places).flatten(1)[:, :length].flatten()
    rows = (case.num_tokens, NUM_KV_HEADS, HEAD_DIM)
    return Batch(
        case,
        caches,
        table,
        torch.full((case.batch_size,), length, dtype=torch.int32, device=device),
        slots,
        torch.empty(rows, dtype=torch.bfloat16, device=device),
        torch.empty(rows, dtype=torch.bfloat16, device=device),
        torch.empty(case.batch_size + 1, dtype=torch.int32, device=device),
    )


Runs = list[Callable[[], object]]
"""A call for each cache."""


def jitattn_runs(batch: Batch) -> Runs:
    pages, out = jitattn.BlockTable(batch.table), (batch.k, batch.v, batch.kv_indptr)

    def run(cache: Tensor) -> None:
        jitattn.gather_kv(cache, pages, batch.seq_lens, out_dtype="bfloat16", out=out)

    return [lambda cache=cache: run(cache) for cache in batch.caches.unbind()]


def torch_runs(batch: Batch) -> Runs:
    """index_select, and for FP8 a conversion of what it selected."""
    # Of bytes, which index_select knows, unlike FP8.
    kind = torch.bfloat16 if batch.case.stored is torch.bfloat16 else torch.uint8

    def run(cache: Tensor) -> None:
        for source, target in zip(cache.unbind(1), (batch.k, batch.v), strict=True):
            rows = source.view(-1, NUM_KV_HEADS * HEAD_DIM).view(kind)
            picked = torch.index_select(rows, 0, batch.slots).view(batch.case.stored)
            target.copy_(picked.view(target.shape))

    # K and V apart, since index_select takes contiguous rows of one dimension.
    apart = [cache.movedim(1, 0).contiguous().movedim(0, 1) for cache in batch.caches.unbind()]
    return [lambda cache=cache: run(cache) for cache in apart]


def vllm_runs(batch: Batch) -> Runs:
    """cp_gather_cache, which copies what is stored, once for K and once for V."""
    if batch.case.stored != torch.bfloat16:
        raise SkipError("cp_gather_cache doesn't convert")
    try:
        from vllm import _custom_ops as ops
    except Exception as error:
        raise SkipError(f"vllm._custom_ops can't be imported: {error}") from error
    lens = batch.seq_lens
    offsets = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    offsets[1:] = lens.cumsum(0)

    def run(cache: Tensor) -> None:
        for source, target in zip(cache.unbind(1), (batch.k, batch.v), strict=True):
            ops.cp_gather_cache(
                source.flatten(2), target.flatten(1), batch.table, offsets, lens.shape[0]
            )

    apart = [cache.movedim(1, 0).contiguous().movedim(0, 1) for cache in batch.caches.unbind()]
    return [lambda cache=cache: run(cache) for cache in apart]


def copy_runs(batch: Batch) -> Runs:
    """Copies of half of the bytes that a gather reads and writes together."""
    half = batch.case.num_bytes // 4  # of K; the same of V
    copies, device = batch.caches.shape[0], batch.caches.device
    sources = torch.zeros((copies, 2, half), dtype=torch.uint8, device=device)
    targets = torch.empty((2, half), dtype=torch.uint8, device=device)

    def run(source: Tensor) -> None:
        targets[0].copy_(source[0])
        targets[1].copy_(source[1])

    return [lambda source=source: run(source) for source in sources.unbind()]


CONTENDERS: dict[str, Callable[[Batch], Runs]] = {
    "copy": copy_runs,
    "jitattn": jitattn_runs,
    "torch": torch_runs,
    "vllm": vllm_runs,
}


@dataclass(frozen=True)
class Result:
    """What came of one contender on one case; host seconds are of a call."""

    contender: str
    status: str
    reason: str = ""
    timing: Timing | None = None
    host: Timing | None = None


def check(batch: Batch, runs: Runs) -> None:
    """Raise WrongError unless every run gathers its cache."""
    for copy in {0, len(runs) - 1}:
        batch.k.fill_(math.nan)
        batch.v.fill_(math.nan)
        runs[copy]()
        for name, got, want in zip("KV", (batch.k, batch.v), batch.wanted(copy), strict=True):
            if not torch.equal(got, want):
                raise WrongError(f"{name} of cache {copy} is not what its pages hold")


def bench_contender(name: str, batch: Batch, timer: Timer, num_runs: int) -> Result:
    """Check and time one contender."""
    try:
        runs = CONTENDERS[name](batch)
        for run in runs:
            run()
        if name != "copy":
            check(batch, runs)
    except SkipError as error:
        return Result(name, "skipped", str(error))
    except WrongError as error:
        return Result(name, "wrong", str(error))
    except Exception as error:
        return Result(name, "failed", f"{type(error).__name__}: {error}")
    samples = timer.samples(timer.capture(None, runs, num_runs))
    timing = summarize([seconds / num_runs for seconds in samples])
    return Result(name, "timed", timing=timing, host=host_time(runs))


def host_time(runs: Runs) -> Timing:
    """Return the host's seconds a call."""
    samples = []
    with no_gc():
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(_HOST_CALLS // 10):
                runs[i % len(runs)]()
            samples.append((time.perf_counter() - start) / (_HOST_CALLS // 10))
    torch.cuda.synchronize()
    return summarize(samples)


def to_record(
    result: Result, case: Case, copy_s: float | None, num_runs: int, env: dict[str, object]
) -> dict[str, object]:
    """Return the JSON record of one result."""
    figures: dict[str, object] = {}
    if result.timing is not None:
        figures = dataclasses.asdict(result.timing) | {
            "gb_per_s": result.timing.gb_per_s(case.num_bytes)
        }
        if copy_s is not None:
            figures["copy_fraction"] = copy_s / result.timing.median_s
    if result.host is not None:
        figures["host_us"] = result.host.median_s * 1e6
    return records.of_result(
        "gather",
        env,
        case.name,
        result,
        method="graph",
        num_runs=num_runs,
        num_bytes=case.num_bytes,
        **figures,
    )


def print_results(rows: Sequence[tuple[Case, Sequence[Result]]]) -> None:
    """Print the table: microseconds of a call, bandwidth, and the part of the copy's."""
    table = Table(title="K and V out of their pages (tokens x requests, page size, cache)")
    for heading in ("case", "contender", "us", "GB/s", "of the copy", "host us"):
        table.add_column(heading, justify="left" if heading in ("case", "contender") else "right")
    for case, results in rows:
        copy_s = median_of(results, "copy")
        for result in results:
            if result.timing is None or result.host is None:
                table.add_row(case.name, result.contender, result.status)
                continue
            seconds = result.timing.median_s
            table.add_row(
                case.name,
                result.contender,
                f"{seconds * 1e6:.2f}",
                f"{result.timing.gb_per_s(case.num_bytes):.0f}",
                "" if copy_s is None else f"{copy_s / seconds:.0%}",
                f"{result.host.median_s * 1e6:.1f}",
            )
        table.add_section()
    console().print(table)
    for case, results in rows:
        for result in results:
            if result.reason:
                console().print(f"{case.name} {result.contender}: {result.reason}", markup=False)


def median_of(results: Sequence[Result], name: str) -> float | None:
    """Return a contender's seconds."""
    found = (r.timing.median_s for r in results if r.contender == name and r.timing)
    return next(found, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; the exit status is 1 when an output was wrong."""
    options = _parse(argv)
    device = cuda_device("bench_gather")
    env = records.environment()
    print_head(env)
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    rows: list[tuple[Case, list[Result]]] = []
    for case in CASES:
        enough = math.ceil(2 * l2_bytes(device) / case.num_bytes)
        batch = make_batch(case, min(max(2, enough), options.runs), device)
        results = [
            bench_contender(name, batch, timer, options.runs)
            for name in options.contenders.split(",")
        ]
        copy_s = median_of(results, "copy")
        found = [to_record(result, case, copy_s, options.runs, env) for result in results]
        records.append_json(options.json, found)
        rows.append((case, results))
        del batch
        torch.cuda.empty_cache()
    print_results(rows)
    return int(any(result.status == "wrong" for _, results in rows for result in results))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.bench_gather", __doc__)
    add = parser.add_argument
    names = ",".join(CONTENDERS)
    add("--contenders", default=names, help="comma-separated; default: %(default)s")
    add("--runs", type=int, default=64, help="runs inside a graph")
    add("--repeats", type=int, default=20, help="timed replays")
    add("--l2", type=L2Policy, default=L2Policy.READ, help="write, read or keep")
    add("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    command.check_names(parser, "contender", options.contenders, list(CONTENDERS))
    return options


if __name__ == "__main__":
    raise SystemExit(main())
