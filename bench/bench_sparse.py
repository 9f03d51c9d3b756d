"""Attention over lists beside jitattn's own dense attention over as many contiguous tokens.

    python -m bench.bench_sparse --bundle DIR                       # only precompiles; no GPU
    JITATTN_PRECOMPILED=DIR JITATTN_JIT=0 python -m bench.bench_sparse --json out.jsonl

A batch has requests of many tokens, of which lists have some: random tokens in the order of their
positions, or the pages of each KV head. The dense contender reads requests of that many tokens, in
pages that follow each other. Runs in a graph behind one refresh, with lists of their own in turn;
a few rows of each contender are compared with float64 first.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import jitattn
from bench import records
from bench.options import make_parser
from bench.report import console, print_head
from bench.timing import L2Flush, L2Policy, Timer, Timing, summarize

LATENT, ROPE = 512, 64
Runs = list[Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """A batch, and how many of the tokens behind each query are listed.

    Attributes:
        kind: "latent", "grouped" or "pages".
        num_heads: query heads.
        batch_size: query tokens, a request each unless ``num_requests`` says how many there are.
        num_kv_tokens: of a request.
        k: listed tokens of a query token, or pages of a KV head.
        form: of the cache: "bf16", or "rows" of 656 bytes.
    """

    kind: str
    num_heads: int
    form: str = "bf16"
    batch_size: int = 64
    num_requests: int | None = None
    num_kv_tokens: int = 131072
    k: int = 2048
    page_size: int = 64
    num_kv_heads: int = 8

    @property
    def name(self) -> str:
        rows = "" if self.form == "bf16" else f"-{self.form}"
        return f"{self.kind}-B{self.batch_size}-h{self.num_heads}{rows}-k{self.k}"

    @property
    def requests(self) -> int:
        return self.num_requests or self.batch_size

    @property
    def num_pages(self) -> int:
        return self.requests * self.num_kv_tokens // self.page_size

    @property
    def listed_tokens(self) -> int:
        """Of a query token and KV head."""
        return self.k * (self.page_size if self.kind == "pages" else 1)

    @property
    def num_bytes(self) -> int:
        """Of K and V, once for each query token."""
        row = 656 if self.form == "rows" else 2 * (LATENT + ROPE)
        if self.kind != "latent":
            row = 2 * 2 * 128 * self.num_kv_heads
        return self.batch_size * self.listed_tokens * row

    @property
    def num_flops(self) -> int:
        width = 2 * LATENT + ROPE if self.kind == "latent" else 2 * 128
        return 2 * self.batch_size * self.num_heads * self.listed_tokens * width

    def arguments(self, *, dense: bool) -> dict[str, Any]:
        """What its planner is given."""
        table = "shared" if dense else "page_lists" if self.kind == "pages" else "indices"
        if self.kind == "latent":
            kv_dtype = "float8_e4m3fn" if self.form == "rows" else "bfloat16"
            return {
                **{"num_heads": self.num_heads, "page_size": self.page_size},
                **{"sm_scale": 192**-0.5, "kv_dtype": kv_dtype, "page_table": table},
            }
        return {
            **{"num_qo_heads": self.num_heads, "num_kv_heads": self.num_kv_heads},
            **{"head_dim": 128, "page_size": self.page_size, "page_table": table},
        }

    def planner(self, device: torch.device, *, dense: bool) -> Any:
        kind = jitattn.MLAPlanner if self.kind == "latent" else jitattn.AttentionPlanner
        return kind(**self.arguments(dense=dense), device=device)

    def tiny(self) -> Case:
        """Return the same for a CPU."""
        small = {"batch_size": 3, "num_kv_tokens": 8 * self.page_size, "num_heads": 8}
        k = 3 if self.kind == "pages" else 70
        return dataclasses.replace(self, k=k, num_requests=None, **small)


CASES = (
    *(Case("latent", heads) for heads in (8, 16, 64, 128)),
    *(Case("latent", heads, form="rows") for heads in (16, 128)),
    Case("latent", 128, batch_size=4096, num_requests=16),
    Case("grouped", 32),
    Case("pages", 32, k=16, page_size=128),
)


@dataclass
class Batch:
    """Tensors of a case: lists for each run, and block tables of as many contiguous tokens."""

    case: Case
    queries: tuple[Tensor, ...]
    kv: Tensor
    lists: list[Any]
    tables: list[jitattn.BlockTable]
    seq_lens: Tensor

    def runs(self, *, dense: bool) -> tuple[Callable[[], object], Runs, Tensor]:
        """Return what makes the schedule, the runs, and what they write."""
        case, device = self.case, self.kv.device
        planner = case.planner(device, dense=dense)
        kv = planner.bind(self.kv)
        tables: list[Any] = self.tables if dense else self.lists
        if dense:
            lens = torch.full_like(self.seq_lens, case.listed_tokens)
            plan = planner.plan(tables[0], lens)
        elif case.kind == "pages":
            plan = planner.plan(tables[0], self.seq_lens)
        else:
            plan = planner.plan(tables[0], case.batch_size)
        out = torch.empty_like(self.queries[0])

        def run(pages: Any) -> Callable[[], object]:
            return lambda: plan.run(*self.queries, kv, pages=pages, out=out)

        return plan.refresh, [run(pages) for pages in tables], out


def make_batch(case: Case, copies: int, device: torch.device) -> Batch:
    """Return random tensors with ``copies`` of lists and tables."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    n, heads = case.batch_size, case.num_heads
    if case.kind == "latent":
        queries: tuple[Tensor, ...] = normal(n, heads, LATENT), normal(n, heads, ROPE)
    else:
        queries = (normal(n, heads, 128),)
    order = torch.randperm(case.num_pages, generator=generator, device=device).int()
    pages = order.view(case.requests, -1)
    owners = torch.arange(n, device=device) * case.requests // n
    listed = [_lists(case, pages, owners, generator) for _ in range(copies)]
    width = case.listed_tokens // case.page_size if case.listed_tokens >= case.page_size else 1
    width += case.listed_tokens % case.page_size > 0
    most = max(case.num_pages // width - 1, 1)
    firsts = torch.randint(most, (copies, n), generator=generator, device=device) * width
    columns = torch.arange(width, device=device)
    tables = [jitattn.BlockTable((first[:, None] + columns).int()) for first in firsts]
    seq_lens = torch.full((n,), case.num_kv_tokens, dtype=torch.int32, device=device)
    return Batch(case, queries, _cache(case, device, generator), listed, tables, seq_lens)


def _cache(case: Case, device: torch.device, generator: torch.Generator) -> Tensor:
    if case.kind != "latent":
        shape = (case.num_pages, 2, case.page_size, case.num_kv_heads, 128)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return cache.normal_(generator=generator)
    if case.form == "bf16":
        shape = (case.num_pages, case.page_size, LATENT + ROPE)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return cache.normal_(generator=generator)
    shape = (case.num_pages, case.page_size, 656)
    # Any byte but those of infinities and NaN in e4m3; scales and rope parts are written over.
    rows = torch.randint(0, 120, shape, dtype=torch.uint8, device=device, generator=generator)
    rows[..., LATENT : LATENT + 16].view(torch.float32).fill_(2.0**-7)
    rows[..., LATENT + 16 :].view(torch.bfloat16).normal_(generator=generator)
    return rows


def _lists(case: Case, pages: Tensor, owners: Tensor, generator: torch.Generator) -> Any:
    """Lists of random tokens or pages of each request, in the order of their positions."""
    device, n = pages.device, case.batch_size
    if case.kind == "pages":
        shape = n, case.num_kv_heads, pages.shape[1]
        scores = torch.rand(shape, generator=generator, device=device)
        numbers = scores.topk(case.k, dim=-1).indices.sort(dim=-1).values
        ids = pages[owners][:, None].expand(shape).gather(-1, numbers)
        return jitattn.PageLists(ids.contiguous(), numbers.int())
    slots = torch.empty(n, case.k, dtype=torch.int32, device=device)
    for begin in range(0, n, 64):  # a block at a time, since scores of all would not fit
        block = owners[begin : begin + 64]
        scores = torch.rand(len(block), case.num_kv_tokens, generator=generator, device=device)
        tokens = scores.topk(case.k, dim=-1).indices.sort(dim=-1).values
        ids = pages[block].gather(1, tokens // case.page_size)
        slots[begin : begin + 64] = ids * case.page_size + tokens % case.page_size
    return jitattn.IndexLists(slots)


# --- what is right --------------------------------------------------------------------------------


def error_of(batch: Batch, out: Tensor, *, dense: bool, copy: int) -> float:
    """Return the largest error of a few rows, as a part of the largest number of each."""
    worst = 0.0
    for row in {0, batch.case.batch_size - 1}:
        want = _definition(batch, row, dense=dense, copy=copy)
        error = (out[row].double() - want).abs().amax() / want.abs().amax()
        worst = max(worst, float(error))
    return worst


def _definition(batch: Batch, row: int, *, dense: bool, copy: int) -> Tensor:
    case, size = batch.case, batch.case.page_size
    group = case.num_heads // (1 if case.kind == "latent" else case.num_kv_heads)
    parts = []
    for h in range(case.num_heads // group):
        if dense:
            pages = batch.tables[copy].table[row].long()
            slots = (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
            slots = slots[: case.listed_tokens]
        elif case.kind == "pages":
            pages = batch.lists[copy].pages[row, h].long()
            slots = (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
        else:
            slots = batch.lists[copy].slots[row].long()
        keys, values = _values(batch, slots, h)
        q = torch.cat([q[row, h * group : (h + 1) * group].double() for q in batch.queries], dim=-1)
        scale = 192**-0.5 if case.kind == "latent" else 128**-0.5
        parts.append(torch.softmax(q @ keys.T * scale, dim=-1) @ values)
    return torch.cat(parts)


def _values(batch: Batch, slots: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
    case, size = batch.case, batch.case.page_size
    if case.kind != "latent":
        both = batch.kv[slots // size, :, slots % size, kv_head].double()
        return both[:, 0], both[:, 1]
    rows = batch.kv[slots // size, slots % size]
    if case.form == "bf16":
        return rows.double(), rows[:, :LATENT].double()
    codes = rows[:, :LATENT].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, LATENT : LATENT + 16].contiguous().view(torch.float32).double()
    latent = codes * scales.repeat_interleave(128, dim=1)
    rope = rows[:, LATENT + 16 :].contiguous().view(torch.bfloat16).double()
    return torch.cat((latent, rope), dim=1), latent


# --- measurements ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What became of a contender."""

    contender: str
    error: float
    timing: Timing | None = None


MAX_ERROR = 0.03


def bench_contender(batch: Batch, name: str, timer: Timer, num_runs: int) -> Result:
    """Check and time lists or dense attention."""
    dense = name == "dense"
    plan, runs, out = batch.runs(dense=dense)
    for run in runs:
        run()
    error = error_of(batch, out, dense=dense, copy=len(runs) - 1)
    if not error <= MAX_ERROR:
        return Result(name, error)
    samples = timer.samples(timer.capture(plan, runs, num_runs))
    return Result(name, error, summarize([seconds / num_runs for seconds in samples]))


def to_record(
    case: Case, result: Result, dense_s: float | None, env: dict[str, object]
) -> dict[str, object]:
    """Return the JSON record of one result."""
    figures: dict[str, object] = {}
    if result.timing is not None:
        seconds = result.timing.median_s
        figures = dataclasses.asdict(result.timing) | {
            "gb_per_s": case.num_bytes / seconds / 1e9,
            "tflops": case.num_flops / seconds / 1e12,
        }
        if dense_s is not None:
            figures["of_dense"] = seconds / dense_s
    return records.record(
        "sparse",
        env,
        case=case.name,
        contender=result.contender,
        status="wrong" if result.timing is None else "timed",
        error=result.error,
        method="graph",
        attention=case.kind,
        num_heads=case.num_heads,
        batch_size=case.batch_size,
        num_kv_tokens=case.num_kv_tokens,
        k=case.k,
        page_size=case.page_size,
        num_bytes=case.num_bytes,
        **figures,
    )


def print_results(rows: Sequence[tuple[Case, Sequence[Result]]]) -> None:
    """Print the table: microseconds, rates, and times of dense attention."""
    table = Table(title="Attention over lists")
    for heading in ("case", "contender", "us", "GB/s", "TFLOP/s", "of dense", "error"):
        table.add_column(heading, justify="left" if heading in ("case", "contender") else "right")
    for case, results in rows:
        dense_s = _dense_s(results)
        for result in results:
            if result.timing is None:
                table.add_row(
                    case.name, result.contender, "wrong", "", "", "", f"{result.error:.2g}"
                )
                continue
            seconds = result.timing.median_s
            table.add_row(
                case.name,
                result.contender,
                f"{seconds * 1e6:.1f}",
                f"{case.num_bytes / seconds / 1e9:.0f}",
                f"{case.num_flops / seconds / 1e12:.0f}",
                "" if dense_s is None else f"{seconds / dense_s:.2f}",
                f"{result.error:.2g}",
            )
        table.add_section()
    console().print(table)


def _dense_s(results: Sequence[Result]) -> float | None:
    found = (r.timing.median_s for r in results if r.contender == "dense" and r.timing)
    return next(found, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Fill a bundle, or run all cases; the exit status is 1 when an output was wrong."""
    options = _parse(argv)
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, options.cases)]
    if options.bundle:
        return _fill(cases, options)
    if not torch.cuda.is_available():
        print("bench_sparse needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    env = records.environment()
    print_head(env)
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    rows: list[tuple[Case, list[Result]]] = []
    for case in cases:
        case = dataclasses.replace(case, num_kv_tokens=min(case.num_kv_tokens, options.tokens))
        batch = make_batch(case, 2 if case.batch_size > 1000 else 4, device)
        num_runs = 2 if case.batch_size > 1000 else options.runs
        results = [bench_contender(batch, name, timer, num_runs) for name in ("lists", "dense")]
        found = [to_record(case, result, _dense_s(results), env) for result in results]
        records.append_json(options.json, found)
        rows.append((case, results))
        del batch
        torch.cuda.empty_cache()
    print_results(rows)
    return int(any(result.timing is None for _, results in rows for result in results))


def _fill(cases: Sequence[Case], options: argparse.Namespace) -> int:
    configs = [
        ({"planner": "mla"} if case.kind == "latent" else {}) | case.arguments(dense=dense)
        for case in cases
        for dense in (False, True)
    ]
    unique = [config for i, config in enumerate(configs) if config not in configs[:i]]
    report = jitattn.precompile(unique, arch=options.arch, out=options.bundle, progress=False)
    print(f"{options.bundle}: {report.compiled} compiled, {report.reused} there already")
    return int(bool(report.failures))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.bench_sparse", __doc__)
    add = parser.add_argument
    add("--cases", default="*", help="a pattern of names")
    add("--tokens", type=int, default=131072, help="most tokens of a request")
    add("--runs", type=int, default=16, help="runs inside a graph")
    add("--repeats", type=int, default=20, help="timed replays")
    add("--l2", type=L2Policy, default=L2Policy.READ, help="write, read or keep")
    add("--json", type=Path, help="file to which records are appended")
    add("--bundle", type=Path, metavar="DIR", help="only precompile the cases' kernels into DIR")
    add("--arch", default="sm_90a", help="of the bundle")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
