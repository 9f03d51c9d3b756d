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

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench import command, prefill_report, records, report
from bench.cases import BASELINE
from bench.prefill_cases import PREFILL_GROUPS, PrefillCase, select_prefill
from bench.prefill_contenders import (
    Inputs,
    PrefillContender,
    PrefillOracle,
    all_prefill_contenders,
    make_inputs,
)
from bench.timing import GRAPH_BELOW_S, L2Flush, L2Policy, Timer, l2_bytes, summarize
from bench.turns import Entry, Method, Result, WrongError, check, set_up, take_turns, version_of
from bench.workloads import num_copies

_NAMED_ONLY = ("fa2",)  # the slowest, and its modules take long to compile


def choose_method(case: PrefillCase, kind: str, num_runs: int, rounds: int) -> Method:
    """Return how to time ``case``.

    Args:
        case: the case.
        kind: "graph", "events", or "auto": a graph where the floor is under 100 us.
        num_runs: runs inside a graph.
        rounds: turns of every contender.
    """
    if kind == "auto":
        kind = "graph" if case.floor_s < GRAPH_BELOW_S else "events"
    return Method(kind, num_runs if kind == "graph" else 1, rounds)


def bench_case(
    inputs: Inputs, contenders: Sequence[PrefillContender], method: Method, timer: Timer
) -> list[Result]:
    """Check every contender, time those that are right, in turns, and check them again."""
    oracle = PrefillOracle(inputs)
    entries = [set_up(contender, inputs, method, timer, oracle) for contender in contenders]
    take_turns(entries, method, timer)
    alone = _time_alone(entries, method, timer) if method.kind == "graph" else {}
    results = [_finish(entry, oracle, timer) for entry in entries]
    outs = {entry.result.contender: entry.prepared.outs for entry in entries if entry.prepared}
    return [
        dataclasses.replace(result, facts={**result.facts, **_more_facts(result, alone, outs)})
        for result in results
    ]


def _more_facts(
    result: Result, alone: Mapping[str, Sequence[float]], outs: Mapping[str, Tensor]
) -> dict[str, object]:
    """Return what is known beside the method's own figure."""
    name = result.contender
    facts: dict[str, object] = {}
    if result.timing and name in alone:
        facts["event_median_s"] = summarize(alone[name]).median_s
    is_variant = name.startswith("jitattn-") and name != BASELINE
    if result.timing and is_variant and BASELINE in outs:
        facts["same_bits_as_shared"] = torch.equal(outs[name], outs[BASELINE])
    return facts


def _time_alone(entries: Sequence[Entry], method: Method, timer: Timer) -> dict[str, list[float]]:
    """Return the seconds of single runs between events, of those that graphs are timed of."""
    alone = [
        Entry(entry.result, entry.prepared, entry.prepared.runs[0])
        for entry in entries
        if entry.prepared is not None
    ]
    take_turns(alone, dataclasses.replace(method, kind="events", num_runs=1), timer)
    return {entry.result.contender: entry.samples for entry in alone}


def _finish(entry: Entry, oracle: PrefillOracle, timer: Timer) -> Result:
    """Check once more, since a rival that reuses its plan may have skipped work, and sum up."""
    result, prepared, call = entry.result, entry.prepared, entry.call
    if prepared is None or call is None:
        return result
    try:
        error = check(prepared, [call], oracle)
    except WrongError as reason:
        return dataclasses.replace(result, status="wrong", reason=f"after it was timed: {reason}")
    facts = dict(result.facts)
    if prepared.plan is not None:
        facts["plan_s"] = summarize(timer.samples(prepared.plan)).median_s
    error = max(error, result.error or 0.0)
    timing = summarize(entry.samples)
    return dataclasses.replace(result, timing=timing, error=error, facts=facts)


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
    if not torch.cuda.is_available():
        print("bench_prefill needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = [c for c in contenders if c.name in options.contenders.split(",")]
    env = records.environment({c.name: version_of(c) for c in chosen})
    report.print_head(env)
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    rows: list[tuple[PrefillCase, list[Result]]] = []
    for case in select_prefill(options.cases):
        method = choose_method(case, options.method, options.runs, options.rounds)
        cache_bytes = l2_bytes(device)
        copies = num_copies(case.pages(), cache_bytes, options.runs) if method.num_runs > 1 else 1
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
