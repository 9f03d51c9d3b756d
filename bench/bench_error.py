"""Errors of prefill against float64 over many seeds, jitattn's beside FlashAttention-3's.

    python -m bench.bench_error --json bench/results/error.jsonl

One request of 512 tokens, causal, in pages of 16, bfloat16; every seed has other queries, keys,
values and pages. The error of a seed is the root mean square of out - float64 over that of float64,
over sampled rows; largest errors are given besides. Nothing is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from bench import records, report
from bench.cases import BASELINE
from bench.contenders import SkipError
from bench.options import cuda_device, make_parser
from bench.prefill_cases import PrefillCase
from bench.prefill_contenders import (
    PrefillContender,
    PrefillOracle,
    all_prefill_contenders,
    make_inputs,
)
from bench.turns import version_of

CONTENDERS = ("fa3-paged", BASELINE)
CASE = PrefillCase("1x512", (512,), (512,))


def errors_of(
    contender: PrefillContender, case: PrefillCase, device: torch.device, seed: int
) -> tuple[float, float]:
    """Return the relative root mean square and the largest error of one seed's output."""
    inputs = make_inputs(case, device, seed=seed)
    prepared = contender.prepare(inputs)
    prepared.runs[0]()
    oracle = PrefillOracle(inputs)
    expected = oracle.expected(0)
    error = prepared.outs[0, oracle.rows].double() - expected
    size = expected.square().mean().sqrt()
    return float(error.square().mean().sqrt() / size), float(error.abs().max())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every contender over the seeds; the exit status is 1 when one is absent."""
    parser = make_parser("bench.bench_error", __doc__)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    device = cuda_device("bench_error")
    chosen = [c for c in all_prefill_contenders() if c.name in CONTENDERS]
    env = records.environment({c.name: version_of(c) for c in chosen})
    report.print_head(env)
    table = Table("contender", "mean error", "largest of the seeds", "largest difference")
    lines = []
    for contender in chosen:
        try:
            found = [errors_of(contender, CASE, device, seed) for seed in range(options.seeds)]
        except SkipError as reason:
            print(f"{contender.name} skipped: {reason}")
            continue
        means, tops = zip(*found, strict=True)
        figures = statistics.fmean(means), max(means), max(tops)
        table.add_row(contender.name, *(f"{figure:.4e}" for figure in figures))
        names = ("mean_error", "largest_error", "largest_difference")
        facts = dict(zip(names, figures, strict=True)) | {"num_seeds": options.seeds}
        lines.append(
            records.record("error", env, case=CASE.name, contender=contender.name, **facts)
        )
    report.console().print(table)
    records.append_json(options.json, lines)
    return int(len(lines) < len(CONTENDERS))


if __name__ == "__main__":
    sys.exit(main())
