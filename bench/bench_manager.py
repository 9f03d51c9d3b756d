"""Milliseconds of a decode step of the page manager: `advance` and the tables of all layers.

    python -m bench.bench_manager --json bench/results/manager.jsonl

Needs no card. 32 layers in two groups, one windowed; page 32; sequences of 1,500 to 2,000 tokens,
each somewhere in its page, so that a step commits, grows and evicts for some of them. A sample is
one step of all sequences: `advance`, then `block_tables` of both groups, written in place into
tensors of the CPU. `--cores` takes part of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from bench import records
from bench.options import make_parser
from bench.report import console
from bench.timing import Timing, no_gc, summarize
from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig

PAGE_SIZE, NUM_LAYERS, WINDOW_LEFT = 32, 32, 127
SHORTEST, LONGEST = 1500, 2000
WIDTH = 72  # of the tables, in pages
TARGET_S = 2e-3  # for 256 sequences


@dataclass(frozen=True)
class Steps:
    """Timings of the parts of a step."""

    advance: Timing
    tables: Timing
    whole: Timing


def make_manager(batch_size: int) -> KVCacheManager:
    layers = [
        LayerConfig(
            layer_id=i, num_kv_heads=1, head_dim=16, window_left=WINDOW_LEFT if i % 2 else -1
        )
        for i in range(NUM_LAYERS)
    ]
    slot_bytes = sum(sum(layer.part_bytes(PAGE_SIZE)) for layer in layers) // 2
    return KVCacheManager(
        KVCacheConfig(
            page_size=PAGE_SIZE, gpu_bytes=2 * WIDTH * batch_size * slot_bytes, layers=layers
        )
    )


def begin(manager: KVCacheManager, batch_size: int, rng: np.random.Generator) -> list[KVSequence]:
    """Return sequences that have computed a prompt each and have room for a token."""
    seqs = []
    for length in rng.integers(SHORTEST, LONGEST, batch_size).tolist():
        seq = manager.create_sequence()
        if not (seq.resume() and seq.resize(length)):
            raise RuntimeError("the pool is too small")
        seq.commit(rng.integers(0, 32_000, length))
        seqs.append(seq)
    manager.advance(seqs, [[]] * batch_size)
    return seqs


def measure(batch_size: int, steps: int) -> Steps:
    """Time ``steps`` steps of ``batch_size`` sequences, after some that aren't counted."""
    rng = np.random.default_rng(0)
    manager = make_manager(batch_size)
    seqs = begin(manager, batch_size, rng)
    outs = [
        torch.empty(len(group.layer_ids), batch_size, WIDTH, dtype=torch.int32)
        for group in manager.layer_groups
    ]
    advances, tables = [], []
    with no_gc():
        for step in range(-5, steps):
            tokens = rng.integers(0, 32_000, batch_size).tolist()
            begun = time.perf_counter()
            grown = manager.advance(seqs, tokens)
            advanced = time.perf_counter()
            for group, out in zip(manager.layer_groups, outs, strict=True):
                manager.block_tables(seqs, group, out=out)
            ended = time.perf_counter()
            if not all(grown):
                raise RuntimeError("the pool is too small")
            if step >= 0:
                advances.append(advanced - begun)
                tables.append(ended - advanced)
    whole = [a + b for a, b in zip(advances, tables, strict=True)]
    return Steps(summarize(advances), summarize(tables), summarize(whole))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and append the records."""
    parser = make_parser("bench.bench_manager", __doc__)
    parser.add_argument("--sequences", default="256,512,1024,2048,4096")
    parser.add_argument("--steps", type=int, default=96, help="at least two")
    parser.add_argument("--cores", type=int, help="cores to run on; all without")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
        torch.set_num_threads(options.cores)
    env = records.environment()
    sizes = [int(size) for size in options.sequences.split(",")]
    rows = [(size, measure(size, options.steps)) for size in sizes]
    records.append_json(options.json, [_record(size, steps, env) for size, steps in rows])
    _print(rows, env)
    return 0


def _record(batch_size: int, steps: Steps, env: dict[str, object]) -> dict[str, object]:
    return records.record(
        "manager",
        env,
        batch_size=batch_size,
        num_layers=NUM_LAYERS,
        advance_s=steps.advance.median_s,
        tables_s=steps.tables.median_s,
        step_s=steps.whole.median_s,
        step_p10_s=steps.whole.p10_s,
        step_p90_s=steps.whole.p90_s,
        num_samples=steps.whole.num_samples,
    )


def _print(rows: Sequence[tuple[int, Steps]], env: dict[str, object]) -> None:
    out = console()
    out.print(f"{env['cores']} cores, python {env['python']}, commit {env['commit']}", markup=False)
    title = f"ms a step, {NUM_LAYERS} layers in 2 groups; at most {TARGET_S * 1e3:.0f} for 256"
    table = Table(title=title)
    for name in ("sequences", "advance", "tables", "both", "p10", "p90", "us a sequence"):
        table.add_column(name, justify="right")
    for size, steps in rows:
        whole = steps.whole
        times = (
            steps.advance.median_s, steps.tables.median_s, whole.median_s, whole.p10_s, whole.p90_s,
        )  # fmt: skip
        table.add_row(
            str(size), *(f"{t * 1e3:.2f}" for t in times), f"{whole.median_s / size * 1e6:.2f}"
        )
    out.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
