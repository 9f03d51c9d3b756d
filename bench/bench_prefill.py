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
from bench.options import cuda_device
from bench.prefill_cases import PREFILL_GROUPS, PrefillCase, select_prefill
from bench.prefill_contenders import (
    Inputs,
    PrefillContender,
    PrefillOracle,
    all_prefill_contenders,
    make_inputs,
)
from bench.timing import L2Flush, L2Policy, Timer, l2_bytes
from bench.turns import Method, Result, choose_method, compare, version_of
from bench.workloads import num_copies

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
    contenders = all_prefill_contenders()
    options = command.parse(
        argv,
        program="bench.bench_prefill",
        description=__doc__,
        names=[contender.name for contender in contenders],
        select=select_prefill,
        runs=16,
        named_only=_NAMED_ONLY,
    )
    device = cuda_device("bench_prefill")
    chosen = [c for c in contenders if c.name in options.contenders.split(",")]
    env = records.environment({c.name: version_of(c) for c in chosen})
    report.print_head(env)
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    rows: list[tuple[PrefillCase, list[Result]]] = []
    for case in select_prefill(options.cases):
        method = choose_method(case.floor_s, options.method, options.runs, options.rounds)
        copies = 1
        if method.num_runs > 1:
            copies = num_copies(case.pages().kv_bytes, l2_bytes(device), options.runs)
        inputs = make_inputs(case, device, copies=copies)
        results = bench_case(inputs, _of_group(chosen, case), method, timer)
        del inputs
        lines = [to_record(result, case, method, options.l2, env) for result in results]
        records.append_json(options.json, lines)
        prefill_report.print_case(case, method.kind, results)
        rows.append((case, results))
        torch.cuda.empty_cache()
    if options.table:
        prefill_report.print_tables(rows)
    return command.status_of(results for _, results in rows)


def _of_group(contenders: Sequence[PrefillContender], case: PrefillCase) -> list[PrefillContender]:
    """Return those that are measured on the cases of the group of ``case``."""
    return [c for c in contenders if c.name in PREFILL_GROUPS[case.group].contenders]


if __name__ == "__main__":
    raise SystemExit(main())
