"""jitattn's decode beside every rival that can be imported: same inputs, same process, same clock.

    python -m bench.bench_decode --table --json bench/results/decode.jsonl

Ceilings of the card are measured in the same run. Every output is compared with the float64
reference before and, inside a graph, after capture; a wrong or absent contender is reported and
not timed. The contenders take turns for several rounds, so that a drifting clock hits them alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench import ceilings, command, records, report
from bench.cases import BASELINE, GROUPS, select
from bench.ceilings import Ceilings
from bench.contenders import VARIANTS, Contender, all_variants
from bench.oracle import Oracle
from bench.rivals import all_rivals
from bench.timing import GRAPH_BELOW_S, L2Policy, Timer, summarize
from bench.turns import Entry, Method, Result, set_up, take_turns
from bench.workloads import Batch, Case, make_batch


def choose_method(case: Case, kind: str, read: float, num_runs: int, rounds: int) -> Method:
    """Return how to time ``case``.

    Args:
        case: the case.
        kind: "graph", "events", or "auto": a graph where the bytes alone take under 100 us.
        read: bytes per second of a streaming read.
        num_runs: runs inside a graph.
        rounds: turns of every contender.
    """
    if kind == "auto":
        kind = "graph" if case.floor_s(read) < GRAPH_BELOW_S else "events"
    return Method(kind, num_runs if kind == "graph" else 1, rounds)


def bench_case(
    batch: Batch, contenders: Sequence[Contender], method: Method, timer: Timer
) -> list[Result]:
    """Check and time every contender on ``batch``, in turns."""
    oracle = Oracle(batch)
    entries = [set_up(contender, batch, method, timer, oracle) for contender in contenders]
    take_turns(entries, method, timer)
    baseline = next((e.prepared.outs for e in entries if e.prepared and _is_baseline(e)), None)
    return [_finish(entry, baseline) for entry in entries]


def _is_baseline(entry: Entry) -> bool:
    return entry.result.contender == BASELINE


def _finish(entry: Entry, baseline: Tensor | None) -> Result:
    result, prepared = entry.result, entry.prepared
    if prepared is None or not entry.samples:
        return result
    facts = dict(result.facts)
    if baseline is not None and _keeps_bits(result.contender):
        facts["same_bits_as_shared"] = torch.equal(prepared.outs, baseline)
    return dataclasses.replace(result, timing=summarize(entry.samples), facts=facts)


def _keeps_bits(name: str) -> bool:
    variant = VARIANTS.get(name.removeprefix("jitattn-"))
    return name != BASELINE and variant is not None and variant.keeps_bits


def to_record(
    result: Result,
    case: Case,
    method: Method,
    limits: Ceilings,
    l2: L2Policy,
    env: Mapping[str, object],
) -> dict[str, object]:
    """Return the JSON record of one result."""

    def rates(median_s: float) -> dict[str, object]:
        bandwidth = case.num_bytes / median_s
        return {
            "gb_per_s": bandwidth / 1e9,
            "copy_fraction": bandwidth / limits.copy,
            "read_fraction": bandwidth / limits.read,
        }

    facts = {
        "num_bytes": case.num_bytes,
        "floor_s": case.floor_s(limits.read),
        "ceilings": dataclasses.asdict(limits),
    }
    return command.result_record("decode", result, case, method, l2, env, facts, rates)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases; the exit status is 1 when an output was wrong."""
    contenders: tuple[Contender, ...] = (*all_rivals(), *all_variants())
    asked = command.comparison(
        argv,
        contenders,
        GROUPS,
        program="bench_decode",
        description=__doc__,
        select=select,
        runs=32,
    )
    options, device, env = asked.options, asked.device, asked.env
    cases = [case for case in select(options.cases) if asked.of_group(case)]
    limits = ceilings.measure(device)
    report.print_head(env, limits)
    rows: list[tuple[Case, list[Result]]] = []
    for case in cases:
        method = choose_method(case, options.method, limits.read, options.runs, options.rounds)
        batch = make_batch(case, asked.num_copies(method, case.kv_bytes), device)
        results = bench_case(batch, asked.of_group(case), method, asked.timer)
        del batch
        records.append_json(
            options.json, [to_record(r, case, method, limits, options.l2, env) for r in results]
        )
        report.print_case(case, method.kind, results)
        rows.append((case, results))
        torch.cuda.empty_cache()
    if options.table:
        report.print_tables(rows, limits)
    return command.status_of(results for _, results in rows)


if __name__ == "__main__":
    raise SystemExit(main())
