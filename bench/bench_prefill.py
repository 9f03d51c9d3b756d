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

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench import prefill_report, records, report
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
    figures: dict[str, object] = {}
    if result.timing is not None:
        figures = dataclasses.asdict(result.timing)
        figures["tflop_per_s"] = case.flop / result.timing.median_s / 1e12
    return records.record(
        "prefill",
        env,
        case=case.name,
        group=case.group,
        contender=result.contender,
        status=result.status,
        reason=result.reason,
        method=method.kind,
        num_runs=method.num_runs,
        l2_policy=l2.value,
        flop=case.flop,
        error=result.error,
        **figures,
        **result.facts,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases; the exit status is 1 when an output was wrong."""
    contenders = all_prefill_contenders()
    options = _parse(argv, [contender.name for contender in contenders])
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
    return int(any(result.status == "wrong" for _, results in rows for result in results))


def _of_group(contenders: Sequence[PrefillContender], case: PrefillCase) -> list[PrefillContender]:
    """Return those that are measured on the cases of the group of ``case``."""
    return [c for c in contenders if c.name in PREFILL_GROUPS[case.group].contenders]


def _parse(argv: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bench_prefill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    default = ",".join(name for name in names if name not in _NAMED_ONLY)
    add("--cases", default="figures", help="groups and name patterns, comma-separated")
    add("--contenders", default=default, help="of " + ",".join(names) + "; default: all but fa2")
    add("--method", choices=("auto", "graph", "events"), default="auto")
    add("--runs", type=int, default=16, help="runs inside a graph")
    add("--rounds", type=int, default=3, help="turns of every contender")
    add("--repeats", type=int, default=20, help="timed calls a turn")
    add("--l2", type=L2Policy, default=L2Policy.WRITE, help="write, read or keep")
    add("--table", action="store_true", help="print the tables at the end")
    add("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    if unknown := set(options.contenders.split(",")) - set(names):
        parser.error(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    try:
        select_prefill(options.cases)
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    raise SystemExit(main())
