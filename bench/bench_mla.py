"""jitattn's latent attention beside FlashInfer's: microseconds, GB/s, TFLOP/s and the floor.

    python -m bench.bench_mla --table --json bench/results/mla.jsonl
    python -m bench.bench_mla --cases heads,ragged,pages,forms,queries,layouts --table

Latents of 512 and rope parts of 64, queries in bfloat16, causal. The floor of a case is what its
bytes take at the card's streaming read, or its products at that of two large matrices, whichever
is more. Outputs (of long chunks sampled rows) are compared with the float64 definition before and
after the clock runs; what is wrong or absent is reported and has no figures. Contenders take turns.
A case whose floor is under 100 us on any card of today is timed as a CUDA graph of one plan and 32
runs over copies that exceed the L2 cache (its record has `event_median_s`, a run alone, besides),
any other as one run between two events, its plan made before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from bench import ceilings, command, mla_report, records, report
from bench.ceilings import TensorCeilings
from bench.mla_cases import MLA_GROUPS, MLACase, select_mla
from bench.mla_contenders import (
    MLAContender,
    MLAInputs,
    MLAOracle,
    all_mla_contenders,
    make_mla_inputs,
)
from bench.options import cuda_device
from bench.timing import L2Flush, L2Policy, Timer, l2_bytes
from bench.turns import Method, Result, choose_method, compare, version_of
from bench.workloads import num_copies


def bench_case(
    inputs: MLAInputs, contenders: Sequence[MLAContender], method: Method, timer: Timer
) -> list[Result]:
    """Check every contender, time those that are right, in turns, and check them again."""
    return compare(inputs, contenders, method, timer, MLAOracle(inputs))


def to_record(
    result: Result,
    case: MLACase,
    method: Method,
    l2: L2Policy,
    limits: TensorCeilings,
    env: Mapping[str, object],
) -> dict[str, object]:
    """Return the JSON record of one result."""
    floor_s = case.floor_s(limits)

    def rates(median_s: float) -> dict[str, object]:
        return {
            "gb_per_s": case.num_bytes / median_s / 1e9,
            "kv_gb_per_s": case.kv_bytes / median_s / 1e9,
            "tflop_per_s": case.flop / median_s / 1e12,
            "floor_fraction": floor_s / median_s,
        }

    facts = {
        "num_bytes": case.num_bytes,
        "kv_bytes": case.kv_bytes,
        "flop": case.flop,
        "floor_s": floor_s,
        "ceilings": dataclasses.asdict(limits),
    }
    return command.result_record("mla", result, case, method, l2, env, facts, rates)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases; the exit status is 1 when an output was wrong."""
    contenders = all_mla_contenders()
    options = command.parse(
        argv,
        program="bench.bench_mla",
        description=__doc__,
        names=[contender.name for contender in contenders],
        select=select_mla,
        runs=32,
    )
    device = cuda_device("bench_mla")
    chosen = [c for c in contenders if c.name in options.contenders.split(",")]
    limits = ceilings.measure_tensor(device)
    env = records.environment({c.name: version_of(c) for c in chosen})
    report.print_head(env, limits)
    mla_report.print_product(limits)
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    rows: list[tuple[MLACase, list[Result]]] = []
    for case in select_mla(options.cases):
        method = choose_method(case.method_floor_s, options.method, options.runs, options.rounds)
        copies = 1
        if method.num_runs > 1:
            copies = num_copies(case.kv_bytes, l2_bytes(device), options.runs)
        inputs = make_mla_inputs(case, device, copies=copies)
        results = bench_case(inputs, _of_group(chosen, case), method, timer)
        del inputs
        lines = [to_record(result, case, method, options.l2, limits, env) for result in results]
        records.append_json(options.json, lines)
        mla_report.print_case(case, method.kind, results, limits)
        rows.append((case, results))
        torch.cuda.empty_cache()
    if options.table:
        mla_report.print_tables(rows, limits)
    return command.status_of(results for _, results in rows)


def _of_group(contenders: Sequence[MLAContender], case: MLACase) -> list[MLAContender]:
    """Return those that are measured on the cases of the group of ``case``."""
    return [c for c in contenders if c.name in MLA_GROUPS[case.group].contenders]


if __name__ == "__main__":
    raise SystemExit(main())
