"""Attention over lists beside jitattn's own dense attention over as many contiguous tokens.

    python -m bench.bench_sparse --bundle DIR                       # only precompiles; no GPU
    JITATTN_PRECOMPILED=DIR JITATTN_JIT=0 python -m bench.bench_sparse --json out.jsonl

A batch has requests of many tokens, of which lists have some: random tokens in the order of their
positions, or the pages of each KV head. The dense contender reads requests of that many tokens, in
pages that follow each other. Rivals read the same lists, each where it takes the case: FlashMLA by
its kernels for lists, FlashInfer and FlashAttention-3 as tables of pages of one token. All take
turns, as runs in a graph behind one refresh, with lists of their own in turn; a few rows of each
contender are compared with float64 before and after.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import jitattn
from bench import records
from bench.command import check_names, status_of
from bench.contenders import Prepared
from bench.options import cuda_device, make_parser
from bench.report import console, print_head, print_reason
from bench.sparse_cases import CASES, Batch, Case, SparseOracle, make_batch
from bench.sparse_rivals import all_sparse_rivals
from bench.timing import L2Flush, L2Policy, Timer
from bench.turns import Competitor, Method, Result, compare, version_of


class JitAttnLists:
    """jitattn over lists, or its own dense attention over as many contiguous tokens."""

    def __init__(self, *, dense: bool) -> None:
        """Choose."""
        self.dense = dense
        self.name = "dense" if dense else "lists"

    def version(self) -> str:
        """Return the package's version."""
        return jitattn.__version__

    def prepare(self, batch: Batch, /) -> Prepared:
        """Plan, and return a run for each copy of the lists or tables."""
        case = batch.case
        planner = case.planner(batch.kv.device, dense=self.dense)
        kv = planner.bind(batch.kv)
        tables: list[Any] = batch.tables if self.dense else batch.lists
        if self.dense:
            plan = planner.plan(tables[0], torch.full_like(batch.seq_lens, case.listed_tokens))
        elif case.kind == "pages":
            plan = planner.plan(tables[0], batch.seq_lens)
        else:
            plan = planner.plan(tables[0], case.batch_size)
        outs = batch.new_outs()
        runs = tuple(
            functools.partial(plan.run, *batch.queries, kv, pages=pages, out=out)
            for pages, out in zip(tables, outs, strict=True)
        )
        return Prepared(runs=runs, outs=outs, plan=plan.refresh)


def all_contenders() -> tuple[Competitor[Batch], ...]:
    """Return jitattn's two, and every rival, here or not."""
    return JitAttnLists(dense=False), JitAttnLists(dense=True), *all_sparse_rivals()


def bench_case(
    batch: Batch, contenders: Sequence[Competitor[Batch]], method: Method, timer: Timer
) -> list[Result]:
    """Check every contender, time those that are right, in turns, and check them again."""
    dense = {"dense": SparseOracle(batch, dense=True)}
    return compare(batch, contenders, method, timer, SparseOracle(batch), dense)


def to_record(
    case: Case,
    result: Result,
    dense_s: float | None,
    method: Method,
    l2: L2Policy,
    env: Mapping[str, object],
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
    return records.of_result(
        "sparse",
        env,
        case.name,
        result,
        error=result.error,
        method=method.kind,
        num_runs=method.num_runs,
        l2_policy=l2.value,
        attention=case.kind,
        num_heads=case.num_heads,
        batch_size=case.batch_size,
        num_kv_tokens=case.num_kv_tokens,
        k=case.k,
        page_size=case.page_size,
        num_bytes=case.num_bytes,
        **figures,
        **result.facts,
    )


def print_case(case: Case, results: Sequence[Result]) -> None:
    """Print one case as soon as it is done: a long run that is cut off has shown its figures."""
    cells = [
        f"{r.contender} {r.timing.median_s * 1e6:.1f} us"
        if r.timing
        else f"{r.contender} {r.status}"
        for r in results
    ]
    console().print(f"{case.name}: " + "; ".join(cells), markup=False)
    for result in results:
        print_reason(result)


def print_results(rows: Sequence[tuple[Case, Sequence[Result]]]) -> None:
    """Print the table: microseconds, rates, and times of dense attention."""
    table = Table(title="Attention over lists")
    for heading in ("case", "contender", "us", "GB/s", "TFLOP/s", "of dense", "error"):
        table.add_column(heading, justify="left" if heading in ("case", "contender") else "right")
    for case, results in rows:
        dense_s = _dense_s(results)
        for result in results:
            error = "" if result.error is None else f"{result.error:.2g}"
            if result.timing is None:
                table.add_row(case.name, _title(case, result), result.status, "", "", "", error)
                continue
            seconds = result.timing.median_s
            table.add_row(
                case.name,
                _title(case, result),
                f"{seconds * 1e6:.1f}",
                f"{case.num_bytes / seconds / 1e9:.0f}",
                f"{case.num_flops / seconds / 1e12:.0f}",
                "" if dense_s is None else f"{seconds / dense_s:.2f}",
                error,
            )
        table.add_section()
    console().print(table)


def _title(case: Case, result: Result) -> str:
    """Return the contender, with the heads it computes where they are more than the case's."""
    heads = result.facts.get("padded_heads", case.num_heads)
    return result.contender if heads == case.num_heads else f"{result.contender}, {heads} heads"


def _dense_s(results: Sequence[Result]) -> float | None:
    found = (r.timing.median_s for r in results if r.contender == "dense" and r.timing)
    return next(found, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Fill a bundle, or run all cases; the exit status is 1 when an output was wrong."""
    options = _parse(argv)
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, options.cases)]
    if options.bundle:
        return _fill(cases, options)
    device = cuda_device("bench_sparse")
    contenders = [c for c in all_contenders() if c.name in options.contenders.split(",")]
    env = records.environment({c.name: version_of(c) for c in contenders})
    print_head(env)
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    rows: list[tuple[Case, list[Result]]] = []
    for case in cases:
        case = dataclasses.replace(case, num_kv_tokens=min(case.num_kv_tokens, options.tokens))
        num_runs = 2 if case.batch_size > 1000 else options.runs
        method = Method("graph", num_runs, options.rounds)
        try:
            torch.cuda.empty_cache()
            batch = make_batch(case, min(4, num_runs), device)
        except RuntimeError as error:  # after a fault on the device nothing more can be measured
            print(f"{case.name}: no tensors: {error}", file=sys.stderr)
            break
        results = bench_case(batch, contenders, method, timer)
        del batch
        dense_s = _dense_s(results)
        found = [to_record(case, r, dense_s, method, options.l2, env) for r in results]
        records.append_json(options.json, found)
        print_case(case, results)
        rows.append((case, results))
    print_results(rows)
    return max(status_of(results for _, results in rows), len(rows) < len(cases))


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
    names = [contender.name for contender in all_contenders()]
    add("--contenders", default=",".join(names), help="comma-separated; default: all")
    add("--tokens", type=int, default=131072, help="most tokens of a request")
    add("--runs", type=int, default=16, help="runs inside a graph")
    add("--rounds", type=int, default=3, help="turns of every contender")
    add("--repeats", type=int, default=20, help="timed replays")
    add("--l2", type=L2Policy, default=L2Policy.READ, help="write, read or keep")
    add("--json", type=Path, help="file to which records are appended")
    add("--bundle", type=Path, metavar="DIR", help="only precompile the cases' kernels into DIR")
    add("--arch", default="sm_90a", help="of the bundle")
    options = parser.parse_args(argv)
    check_names(parser, "contender", options.contenders, names)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
