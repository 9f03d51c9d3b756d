"""jitattn's prefill beside FlashAttention-3 and FlashInfer: TFLOP/s of unmasked work.

    python -m bench.bench_prefill --table --json bench/results/prefill.jsonl
    python -m bench.bench_prefill --cases more,layouts,mixed --table

Causal, queries in bfloat16. Sampled rows of every output are compared with the float64 reference
before and after the clock runs; what is wrong or absent is reported and has no figures. Contenders
take turns. A case whose floor is under 100 us is timed as a CUDA graph of one plan and 16 runs over
copies that exceed the L2 cache (its record has `event_median_s`, a run alone, besides), any other
as one run between two events, its plan made before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bench import command, prefill_report, records, report
from bench.prefill_cases import PREFILL_GROUPS, PrefillCase, select_prefill
from bench.prefill_contenders import (
    Inputs,
    PrefillContender,
    PrefillOracle,
    all_prefill_contenders,
    make_inputs,
)
from bench.timing import L2Policy, Timer
from bench.turns import Method, Result, choose_method, compare

_NAMED_ONLY = ("fa2",)  # the slowest, and its modules take long to compile


def bench_case(
    inputs: Inputs, contenders: Sequence[PrefillContender], method: Method, timer: Timer
) -> list[Result]:
    """Check every contender, time those that are right, in turns, and check them again."""
    return compare(inputs, contenders, method, timer, PrefillOracle(inputs))


def to_record(
    result: Result, case: PrefillCase, method: Method, l2: L2Policy, env: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON record of one result."""

    def rates(median_s: float) -> dict[str, object]:
        return {"tflop_per_s": case.flop / median_s / 1e12}

    facts = {"flop": case.flop}
    return command.result_record("prefill", result, case, method, l2, env, facts, rates)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases; the exit status is 1 when an output was wrong."""
    asked = command.comparison(
        argv, all_prefill_contenders(), PREFILL_GROUPS, program="bench_prefill",
        description=__doc__, select=select_prefill, runs=16, named_only=_NAMED_ONLY,
    )  # fmt: skip
    options, device, env = asked.options, asked.device, asked.env
    report.print_head(env)
    rows: list[tuple[PrefillCase, list[Result]]] = []
    for case in select_prefill(options.cases):
        method = choose_method(case.floor_s, options.method, options.runs, options.rounds)
        copies = asked.num_copies(method, case.pages().kv_bytes)
        inputs = make_inputs(case, device, copies=copies)
        results = bench_case(inputs, asked.of_group(case), method, asked.timer)
        del inputs
        lines = [to_record(result, case, method, options.l2, env) for result in results]
        records.append_json(options.json, lines)
        prefill_report.print_case(case, method.kind, results)
        rows.append((case, results))
        torch.cuda.empty_cache()
    if options.table:
        prefill_report.print_tables(rows)
    return command.status_of(results for _, results in rows)


if __name__ == "__main__":
    raise SystemExit(main())
