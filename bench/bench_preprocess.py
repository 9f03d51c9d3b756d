"""jitattn's preprocess_qkv and append_kv beside a copy of the same bytes and FlashInfer's kernels.

    python -m bench.bench_preprocess --json bench/results/preprocess.jsonl

Every contender is captured in a graph, many runs over tensors that together exceed the L2 cache,
and they take turns. What they write of sampled tokens is compared with jitattn's definition before,
and what a replay writes with eager calls, before and after; what is wrong or absent is reported and
not timed. A rival does all that first in a process of its own: what it breaks there breaks no
figure.

FlashInfer compiles two modules at its first calls, for minutes: without it (`--contenders
jitattn,copy`) all takes seconds, `bench.build_rivals --tokens` compiles ahead, and what compiles
nothing is measured and printed first, and again beside FlashInfer.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table

from bench import ceilings, command, records, report
from bench.ceilings import Ceilings
from bench.contenders import SkipError
from bench.options import cuda_device, make_parser
from bench.timing import Call, L2Flush, L2Policy, Timer, Timing, l2_bytes, summarize
from bench.token_contenders import Check, TokenContender, all_token_contenders, calls_of
from bench.token_workloads import WORKLOADS, TokenBatch, TokenWorkload, make_token_batch
from bench.turns import WrongError


@dataclass
class Row:
    """What came of a contender on a row."""

    contender: str
    status: str
    reason: str = ""
    timing: Timing | None = None


@dataclass
class Entry:
    """A contender on its way through a row."""

    row: Row
    call: Call | None = None
    runs: Sequence[Call] = ()
    check: Check | None = None
    samples: list[float] = field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        self.row, self.call = Row(self.row.contender, status, reason), None


def measure(batch: TokenBatch, contender: TokenContender, timer: Timer, num_runs: int) -> Entry:
    """Prepare, check and capture a contender; whatever it raises becomes its result."""
    entry = Entry(Row(contender.name, "timed"))
    try:
        run = contender.prepare(batch)
        check = Check(contender, batch)
        check.eager(run)
        runs = calls_of(batch, run)
        for call in runs:
            call()
        synchronize(batch.table.device)
        replay = timer.capture(None, runs, num_runs)
        check.graph(replay, runs, num_runs)
        entry.call, entry.runs, entry.check = replay, runs, check
    except SkipError as reason:
        entry.end("skipped", str(reason))
    except WrongError as reason:
        entry.end("wrong", str(reason))
    except Exception as reason:  # a rival may raise anything, and the others still have their turn
        entry.end("failed", f"{type(reason).__name__}: {reason}")
    return entry


def bench_row(
    batch: TokenBatch,
    contenders: Sequence[TokenContender],
    timer: Timer,
    num_runs: int,
    turns: int,
    tried: Mapping[str, Row] | None = None,
) -> list[Row]:
    """Time every contender on a batch, in turns.

    Args:
        batch: the tensors.
        contenders: who takes part.
        timer: the clock.
        num_runs: runs of a graph.
        turns: of every contender.
        tried: what came of those that were tried in a process of their own.
    """
    tried = tried or {}
    entries = [
        Entry(tried[one.name])
        if tried.get(one.name, Row("", "timed")).status != "timed"
        else measure(batch, one, timer, num_runs)
        for one in contenders
    ]
    for _ in range(turns):
        for entry in entries:
            take_turn(entry, timer, num_runs)
    return [finish(entry, num_runs) for entry in entries]


def take_turn(entry: Entry, timer: Timer, num_runs: int) -> None:
    """Time some replays. Who raises is out; those before keep the figures that they have."""
    if entry.call is None:
        return
    try:
        entry.samples += [seconds / num_runs for seconds in timer.samples(entry.call)]
    except Exception as reason:
        if entry.samples and is_lost():  # whoever broke the device, this one has run
            entry.call = None
            entry.row.reason = f"the device was lost after some turns: {reason}"
        else:
            entry.end("failed", f"{type(reason).__name__}: {reason}")


def finish(entry: Entry, num_runs: int) -> Row:
    """Check a contender once more, and sum up."""
    if entry.row.status != "timed":
        return entry.row
    if entry.call is not None and entry.check is not None:
        try:
            entry.check.graph(entry.call, entry.runs, num_runs)
        except WrongError as reason:
            return Row(entry.row.contender, "wrong", f"after it was timed: {reason}")
        except Exception as reason:
            if not is_lost():
                raise
            entry.row.reason = f"the device was lost after some turns: {reason}"
    return dataclasses.replace(entry.row, timing=summarize(entry.samples))


def is_lost() -> bool:
    """Return whether the device takes no more work, as after an illegal access of memory."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def print_table(rows: Sequence[tuple[TokenBatch, list[Row]]], limits: Ceilings) -> None:
    """Print microseconds, bandwidth, and the share of what the copy reaches."""
    table = Table(title="Tokens into the cache: us a run; GB/s read and written; share of the copy")
    for heading in ("row", "MB", "contender", "us", "p10", "p90", "GB/s", "of copy", "of ceiling"):
        table.add_column(heading, justify="right" if heading != "row" else "left")
    for batch, results in rows:
        copy = next((r.timing for r in results if r.contender == "copy"), None)
        for result in results:
            timing, num_bytes = result.timing, batch.row.num_bytes
            head = (batch.row.name, f"{num_bytes / 1e6:.1f}", result.contender)
            if timing is None:
                table.add_row(*head, result.status, *[""] * 5)
                continue
            micros = [f"{s * 1e6:.2f}" for s in (timing.median_s, timing.p10_s, timing.p90_s)]
            share = f"{copy.median_s / timing.median_s:.2f}" if copy else ""
            rate = num_bytes / timing.median_s
            table.add_row(*head, *micros, f"{rate / 1e9:.0f}", share, f"{rate / limits.copy:.2f}")
    report.console().print(table)
    for _, results in rows:
        for result in results:
            if result.reason:
                print(f"{result.contender}: {result.status}: {result.reason[:300]}")


def to_record(
    batch: TokenBatch, result: Row, limits: Ceilings, num_runs: int, env: dict[str, object]
) -> dict[str, object]:
    """Return the JSON record of one result."""
    figures: dict[str, object] = {}
    if result.timing is not None:
        rate = batch.row.num_bytes / result.timing.median_s
        figures = dataclasses.asdict(result.timing) | {
            "gb_per_s": rate / 1e9,
            "copy_fraction": rate / limits.copy,
        }
    return records.of_result(
        "preprocess",
        env,
        batch.row.name,
        result,
        num_bytes=batch.row.num_bytes,
        num_runs=num_runs,
        copies=batch.copies,
        ceilings=dataclasses.asdict(limits),
        **figures,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; the exit status is 1 when jitattn's failed or anything was wrong."""
    options = _parse(argv)
    device = cuda_device("bench_preprocess")
    names = options.contenders.split(",")
    contenders = [one for one in all_token_contenders() if one.name in names]
    rows = [row for row in WORKLOADS if row.name.startswith(tuple(options.rows.split(",")))]
    timer = Timer(L2Flush(L2Policy.WRITE, device), repeats=options.repeats)
    if options.attempt:
        attempt(contenders, rows, timer, options)
        return 0
    env = records.environment(
        {"flashinfer": _flashinfer_version()} if "flashinfer" in names else {}
    )
    limits = ceilings.measure(device)
    report.print_head(env, limits)
    failed = False
    for some in passes(contenders):
        tried = try_apart(some, options)
        done: list[tuple[TokenBatch, list[Row]]] = []
        for row in rows:
            batch, num_runs = make_row(row, options.runs, device)
            of_row = {name: came[row.name] for name, came in tried.items()}
            results = bench_row(batch, some, timer, num_runs, options.turns, of_row)
            records.append_json(
                options.json, [to_record(batch, r, limits, num_runs, env) for r in results]
            )
            batch.qkv, batch.q_out, batch.caches = batch.qkv[:0], [], []
            done.append((batch, results))
            if is_lost():
                break
            torch.cuda.empty_cache()
        print_table(done, limits)
        failed |= any(is_bad(result) for _, results in done for result in results)
        if is_lost():
            print("the device was lost: the rows after this one were not measured")
            return 1
    return int(failed)


def is_bad(result: Row) -> bool:
    """Return whether a result makes the exit status 1."""
    return result.status == "wrong" or (result.contender == "jitattn" and result.status == "failed")


def make_row(row: TokenWorkload, runs: int, device: torch.device) -> tuple[TokenBatch, int]:
    """Return a row's batch, whose copies exceed the L2 cache, and how many runs a graph holds."""
    copies = max(2, min(64, 1 + 2 * l2_bytes(device) // row.num_bytes))
    num_runs = max(runs, copies) if row.num_tokens < 1000 else 8
    return make_token_batch(row, copies, device), num_runs


def passes(contenders: Sequence[TokenContender]) -> list[list[TokenContender]]:
    """Return who is timed together: first those that compile nothing, then all, in turns."""
    ready = [contender for contender in contenders if not contender.modules]
    return [ready, [*contenders]] if 0 < len(ready) < len(contenders) else [[*contenders]]


def attempt(
    contenders: Sequence[TokenContender],
    rows: Sequence[TokenWorkload],
    timer: Timer,
    options: argparse.Namespace,
) -> None:
    """Check contenders and time one replay; print what came of each row as a line of JSON."""
    device = torch.device("cuda", torch.cuda.current_device())
    for row in rows:
        batch, num_runs = make_row(row, options.runs, device)
        for result in bench_row(batch, contenders, timer, num_runs, turns=1):
            line = {"row": row.name, "status": result.status, "reason": result.reason}
            print(json.dumps(line), flush=True)
        del batch
        torch.cuda.empty_cache()


def try_apart(
    contenders: Sequence[TokenContender], options: argparse.Namespace
) -> dict[str, dict[str, Row]]:
    """Return what came of each rival on each row, in a process that it may break."""
    tried = {}
    for name in (contender.name for contender in contenders if contender.modules):
        command = [sys.executable, "-m", "bench.bench_preprocess", "--attempt"]
        command += ["--contenders", name, "--rows", options.rows, "--runs", str(options.runs)]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        last = done.stderr.strip().rpartition("\n")[2]
        absent = f"a process of its own ended with {done.returncode} before this row: {last}"
        rows = {row.name: Row(name, "failed", absent) for row in WORKLOADS}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                came = json.loads(line)
                rows[came["row"]] = Row(name, came["status"], came["reason"])
        tried[name] = rows
    return tried


def _flashinfer_version() -> str:
    try:
        return str(importlib.import_module("flashinfer").__version__)
    except Exception as error:
        return f"absent: {error}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.bench_preprocess", __doc__)
    add = parser.add_argument
    add("--rows", default="preprocess,append", help="beginnings of names, comma-separated")
    everyone = [contender.name for contender in all_token_contenders()]
    add("--contenders", default=",".join(everyone), help="names, comma-separated; default: all")
    add("--runs", type=int, default=32, help="runs of few tokens inside a graph, at least")
    add("--turns", type=int, default=3, help="turns of every contender")
    add("--repeats", type=int, default=20, help="timed calls a turn")
    add("--json", type=Path, help="file to which records are appended")
    add("--attempt", action="store_true", help="only check, and print a line of JSON a row")
    options = parser.parse_args(argv)
    command.check_names(parser, "contender", options.contenders, everyone)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
