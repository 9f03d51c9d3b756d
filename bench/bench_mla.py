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
from bench.timing import L2Policy, Timer
from bench.turns import Method, Result, choose_method, compare


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
    asked = command.comparison(
        argv, contenders, MLA_GROUPS, program="bench_mla", description=__doc__, select=select_mla,
        runs=32,
    )  # fmt: skip
    options, device, env = asked.options, asked.device, asked.env
    limits = ceilings.measure_tensor(device)
    report.print_head(env, limits)
    mla_report.print_product(limits)
    rows: list[tuple[MLACase, list[Result]]] = []
    for case in select_mla(options.cases):
        method = choose_method(case.method_floor_s, options.method, options.runs, options.rounds)
        inputs = make_mla_inputs(case, device, copies=asked.num_copies(method, case.kv_bytes))
        results = bench_case(inputs, asked.of_group(case), method, asked.timer)
        del inputs
        lines = [to_record(result, case, method, options.l2, limits, env) for result in results]
        records.append_json(options.json, lines)
        mla_report.print_case(case, method.kind, results, limits)
        rows.append((case, results))
        torch.cuda.empty_cache()
    if options.table:
        mla_report.print_tables(rows, limits)
    return command.status_of(results for _, results in rows)


if __name__ == "__main__":
    raise SystemExit(main())
