"""jitattn's preprocess_qkv and append_kv beside a copy of the same bytes and FlashInfer's kernels.

    python -m bench.bench_preprocess --json bench/results/preprocess.jsonl

Every contender is captured in a graph, many runs over tensors that together exceed the L2 cache,
and they take turns. jitattn's q, K and V are compared with its definition before; what is wrong or
absent is reported and not timed.

FlashInfer compiles two modules at its first calls, for minutes: without it (`--contenders
jitattn,copy`) all takes seconds, `bench.build_rivals --tokens` compiles ahead, and what compiles
nothing is measured and printed first, and again beside FlashInfer.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.table import Table
from torch import Tensor

import jitattn
from bench import ceilings, records, report
from bench.ceilings import Ceilings
from bench.contenders import SkipError
from bench.timing import L2Flush, L2Policy, Timer, Timing, l2_bytes, summarize
from bench.token_workloads import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_QO_HEADS,
    WORKLOADS,
    TokenBatch,
    make_token_batch,
    smaller,
)

BASE = 500000.0
Run = Callable[[int], object]
"""Runs on one of the copies of a batch."""


class TokenContender(Protocol):
    """Takes tokens in."""

    name: str
    modules: tuple[str, ...]
    """What it compiles at its first calls."""

    def prepare(self, batch: TokenBatch) -> Run:
        """Return what is timed, or raise SkipError."""


class JitAttnTokens:
    """One launch."""

    name, modules = "jitattn", ()

    def prepare(self, batch: TokenBatch) -> Run:
        pages = jitattn.BlockTable(batch.table)
        rope = jitattn.Rope(HEAD_DIM, base=BASE)
        places: dict[str, Any] = {
            "pages": pages,
            "seq_lens": batch.seq_lens,
            "qo_indptr": batch.qo_indptr,
            "k_scale": batch.k_scale,
            "v_scale": batch.v_scale,
        }

        def preprocess(copy: int) -> object:
            return jitattn.preprocess_qkv(
                batch.qkv[copy],
                batch.caches[copy % len(batch.caches)],
                num_qo_heads=NUM_QO_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                rope=rope,
                q_out=batch.q_out[copy],
                **places,
            )

        def append(copy: int) -> object:
            _, k, v = batch.heads(copy)
            return jitattn.append_kv(k, v, batch.caches[copy % len(batch.caches)], **places)

        return preprocess if batch.row.op == "preprocess" else append


class Copy:
    """A device-to-device copy that reads and writes as many bytes together."""

    name, modules = "copy", ()

    def prepare(self, batch: TokenBatch) -> Run:
        size = batch.row.num_bytes // 2
        device = batch.table.device
        pairs = [torch.zeros((2, size), dtype=torch.uint8, device=device) for _ in batch.qkv]
        return lambda copy: pairs[copy][1].copy_(pairs[copy][0])


class FlashInferTokens:
    """Rotary embedding in place, a quantisation where the cache has 8 bits, then the append."""

    name, modules = "flashinfer", ("page", "rope")

    def prepare(self, batch: TokenBatch) -> Run:
        calls = self.calls(batch)
        append, rotate = calls["page"], calls["rope"]

        def preprocess(copy: int) -> object:
            rotate(copy)
            return append(copy)

        return preprocess if batch.row.op == "preprocess" else append

    def calls(self, batch: TokenBatch) -> dict[str, Run]:
        """Return the calls, by the module that each compiles, or raise SkipError."""
        try:
            flashinfer = importlib.import_module("flashinfer")
        except Exception as error:
            raise SkipError(f"cannot be imported: {error}") from error
        row, device = batch.row, batch.table.device
        q_len = row.num_tokens // row.batch_size
        requests = (torch.arange(row.num_tokens, device=device) // q_len).int()
        width = batch.table.shape[1]
        indptr = torch.arange(row.batch_size + 1, device=device).int() * width
        indices = batch.table.flatten().contiguous()
        last = torch.full((row.batch_size,), 16, dtype=torch.int32, device=device)
        dtype = batch.caches[0][0].dtype

        def append(copy: int) -> object:
            _, k, v = batch.heads(copy)
            if batch.k_scale is not None and batch.v_scale is not None:
                k, v = (k / batch.k_scale).to(dtype), (v / batch.v_scale).to(dtype)
            cache = batch.caches[copy % len(batch.caches)]
            return flashinfer.append_paged_kv_cache(
                *(k, v, requests, batch.positions, cache, indices, indptr, last), kv_layout="NHD"
            )

        def rotate(copy: int) -> object:
            q, k, _ = batch.heads(copy)
            return flashinfer.apply_rope_pos_ids_inplace(
                q, k, batch.positions, interleave=False, rope_theta=BASE
            )

        return {"page": append, "rope": rotate}


def all_token_contenders() -> list[TokenContender]:
    """Return all that take tokens in; those that compile come last."""
    return [JitAttnTokens(), Copy(), FlashInferTokens()]


def build_module(module: str, device: torch.device) -> None:
    """Have FlashInfer compile a module, by a small call of it."""
    row = next(row for row in WORKLOADS if row.op == "preprocess")
    FlashInferTokens().calls(make_token_batch(smaller(row), 1, device))[module](0)


@dataclass
class Row:
    """What came of a contender on a row."""

    contender: str
    status: str
    reason: str = ""
    timing: Timing | None = None


def check_ours(row_batch: TokenBatch) -> None:
    """Raise ValueError unless jitattn does what its definition says, on a smaller batch."""
    device = row_batch.table.device
    batch = make_token_batch(smaller(row_batch.row), 1, device)
    want = make_token_batch(smaller(row_batch.row), 1, device)
    for name in ("table", "seq_lens", "qo_indptr", "positions"):
        setattr(want, name, getattr(batch, name).cpu())
    want.qkv = [batch.qkv[0].cpu()]
    want.q_out = [batch.q_out[0].cpu()]
    want.caches = [tuple(side.cpu() for side in batch.caches[0])]  # type: ignore[list-item]
    for one in (batch, want):
        JitAttnTokens().prepare(one)(0)
    compare(outputs(batch), outputs(want))


def outputs(batch: TokenBatch) -> list[Tensor]:
    """Return q, K and V as they came out, as floats on the CPU."""
    sides = [side.float().cpu() for side in batch.caches[0]]
    return [batch.q_out[0].float().cpu(), *sides] if batch.row.op == "preprocess" else sides


def compare(found: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Raise ValueError where some value is more than two steps of e4m3 from what is wanted."""
    for a, b in zip(found, want, strict=True):
        if bool(((a - b).abs() > 0.05 + 0.13 * b.abs()).any()):
            raise ValueError(f"values differ by {float((a - b).abs().max())}")


def measure(
    batch: TokenBatch, contender: TokenContender, timer: Timer, num_runs: int
) -> tuple[Row, Callable[[], object] | None]:
    """Prepare a contender and capture it; whatever it raises becomes its result."""
    try:
        if isinstance(contender, JitAttnTokens):
            check_ours(batch)
        run = contender.prepare(batch)
        for copy in range(batch.copies):
            run(copy)
        torch.cuda.synchronize()
        calls = [lambda copy=copy: run(copy) for copy in range(batch.copies)]
        return Row(contender.name, "timed"), timer.capture(None, calls, num_runs)
    except SkipError as reason:
        return Row(contender.name, "skipped", str(reason)), None
    except Exception as reason:  # a rival may raise anything, and the others still have their turn
        return Row(contender.name, "failed", f"{type(reason).__name__}: {reason}"), None


def bench_row(
    batch: TokenBatch, contenders: Sequence[TokenContender], timer: Timer, num_runs: int, turns: int
) -> list[Row]:
    """Time every contender on a batch, in turns."""
    entries = [measure(batch, contender, timer, num_runs) for contender in contenders]
    samples: dict[str, list[float]] = {row.contender: [] for row, _ in entries}
    for _ in range(turns):
        for row, call in entries:
            if call is not None:
                samples[row.contender] += [s / num_runs for s in timer.samples(call)]
    return [
        dataclasses.replace(row, timing=summarize(samples[row.contender])) if call else row
        for row, call in entries
    ]


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
    return records.record(
        "preprocess",
        env,
        case=batch.row.name,
        contender=result.contender,
        status=result.status,
        reason=result.reason,
        num_bytes=batch.row.num_bytes,
        num_runs=num_runs,
        copies=batch.copies,
        ceilings=dataclasses.asdict(limits),
        **figures,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; the exit status is 1 when jitattn's failed."""
    options = _parse(argv)
    if not torch.cuda.is_available():
        print("bench_preprocess needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    names = options.contenders.split(",")
    contenders = [one for one in all_token_contenders() if one.name in names]
    env = records.environment(
        {"flashinfer": _flashinfer_version()} if "flashinfer" in names else {}
    )
    limits = ceilings.measure(device)
    report.print_head(env, limits)
    timer = Timer(L2Flush(L2Policy.WRITE, device), repeats=options.repeats)
    failed = False
    for some in passes(contenders):
        done: list[tuple[TokenBatch, list[Row]]] = []
        for row in WORKLOADS:
            if not row.name.startswith(tuple(options.rows.split(","))):
                continue
            copies = max(2, min(64, 1 + 2 * l2_bytes(device) // row.num_bytes))
            num_runs = max(options.runs, copies) if row.num_tokens < 1000 else 8
            batch = make_token_batch(row, copies, device)
            results = bench_row(batch, some, timer, num_runs, options.turns)
            records.append_json(
                options.json, [to_record(batch, r, limits, num_runs, env) for r in results]
            )
            batch.qkv, batch.q_out, batch.caches = batch.qkv[:0], [], []
            done.append((batch, results))
            torch.cuda.empty_cache()
        print_table(done, limits)
        failed |= any(
            r.status == "failed" for _, rs in done for r in rs if r.contender == "jitattn"
        )
    return int(failed)


def passes(contenders: Sequence[TokenContender]) -> list[list[TokenContender]]:
    """Return who is timed together: first those that compile nothing, then all, in turns."""
    ready = [contender for contender in contenders if not contender.modules]
    return [ready, [*contenders]] if 0 < len(ready) < len(contenders) else [[*contenders]]


def _flashinfer_version() -> str:
    try:
        return str(importlib.import_module("flashinfer").__version__)
    except Exception as error:
        return f"absent: {error}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bench_preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", default="preprocess,append", help="beginnings of names, comma-separated")
    everyone = [contender.name for contender in all_token_contenders()]
    add("--contenders", default=",".join(everyone), help="names, comma-separated; default: all")
    add("--runs", type=int, default=32, help="runs of few tokens inside a graph, at least")
    add("--turns", type=int, default=3, help="turns of every contender")
    add("--repeats", type=int, default=20, help="timed calls a turn")
    add("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    if unknown := set(options.contenders.split(",")) - set(everyone):
        parser.error(f"--contenders: {', '.join(sorted(unknown))}: expected {', '.join(everyone)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
