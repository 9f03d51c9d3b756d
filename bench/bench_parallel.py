"""Context-parallel decode over the cards of a host: a step in a graph, speed-up, communication.

    torchrun --nproc-per-node 2 -m bench.bench_parallel --table --json bench/results/parallel.jsonl
    torchrun --nproc-per-node 2 -m bench.bench_parallel --backend gloo --tiny --table
    python -m bench.bench_parallel --arithmetic 8

A step is one layer: queries gathered, attention over the rank's tokens, outputs exchanged and
merged. Each rank's median is of replays of a graph with several such steps; the slowest rank
counts. `attention` is the same graph without what travels, `one card` the whole batch on rank 0
alone, `by hand` FlashInfer on each rank's tokens and `merge_states`, as its documentation has it,
where it is installed. Outputs are compared, bit for bit, with the ranks' states merged in their
order, and FlashInfer's with ours. On the CPU (gloo, the reference backend) calls are timed one by
one: that shows that it runs, and no speed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import jitattn
from bench import records
from bench.contenders import SkipError
from bench.options import make_parser
from bench.parallel_cases import PAGE, Case, Step, cases
from bench.parallel_rivals import merge_by_hand
from jitattn.parallel import ContextParallel

_LAYERS = 8  # of a graph
RIVAL_ERROR = 0.05  # of the largest value; 8-bit caches are read with other roundings


@dataclass(frozen=True)
class Measured:
    """Seconds of a layer; 0 where it was not measured."""

    step_s: float
    attention_s: float
    by_hand_s: float
    one_card_s: float
    is_same: bool


def measure(case: Case, cp: ContextParallel, device: torch.device, repeats: int) -> Measured:
    """Time a case on every rank; the slowest counts."""
    step_s, attention_s, by_hand_s, is_same = _measure_ranks(case, cp, device, repeats)
    one_card_s = _measure_alone(case, device, repeats) if cp.rank == 0 else 0.0
    dist.barrier()
    figures = torch.tensor(
        [step_s, attention_s, by_hand_s, one_card_s, float(not is_same)], device=device
    )
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    slowest = figures.tolist()
    return Measured(slowest[0], slowest[1], slowest[2], slowest[3], slowest[4] == 0)


def _measure_ranks(
    case: Case, cp: ContextParallel, device: torch.device, repeats: int
) -> tuple[float, float, float, bool]:
    """Return seconds of the step, its attention and the rival, and whether bits are right."""
    step = Step(case, cp.num_ranks, cp.rank, device)
    pages = jitattn.BlockTable(step.table)
    plan: Any = cp.plan(step.planner, pages, step.seq_lens)
    alone = step.planner.plan(pages, cp.local_lens(step.seq_lens))
    own = step.own(cp)
    is_same = _is_merge_in_order(cp, plan, alone, step, own)

    def run_step(kv: object) -> None:
        plan.run(*own, kv)

    def attend(kv: object) -> None:
        alone.run(*step.qs, kv, return_lse=True)

    step_s = _seconds(plan.refresh, run_step, step.caches, device, repeats)
    attention_s = _seconds(alone.refresh, attend, step.caches, device, repeats)
    by_hand_s = _measure_by_hand(step, cp, plan.run(*own, step.caches[0]), repeats)
    return step_s, attention_s, by_hand_s, is_same


def _measure_by_hand(step: Step, cp: ContextParallel, wanted: Tensor, repeats: int) -> float:
    """Return seconds of FlashInfer with a merge by hand; 0 where it can't be had."""
    try:
        run = merge_by_hand(step, cp, own := step.own(cp))
    except SkipError as error:
        if cp.rank == 0:
            print(f"{step.case.name}: no rival: {error}", flush=True)
        return 0.0
    try:
        out = run(step.pools[0])
    except RuntimeError as error:  # the same on every rank: its merge takes no such shape
        if cp.rank == 0:
            print(f"{step.case.name}: no rival: {error}", flush=True)
        # Its failed launch is found once more, by whoever launches next.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=step.device)
        return 0.0
    off = float((out.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    if not off < RIVAL_ERROR:
        print(f"{step.case.name}: the rival is {off:.3g} off", flush=True)
        return 0.0
    return _seconds(lambda: own, run, step.pools, step.device, repeats)


def _measure_alone(case: Case, device: torch.device, repeats: int) -> float:
    """Return seconds of the whole batch on this card."""
    whole = Step(case, 1, 0, device)
    plan = whole.planner.plan(jitattn.BlockTable(whole.table), whole.seq_lens)
    return _seconds(plan.refresh, lambda kv: plan.run(*whole.qs, kv), whole.caches, device, repeats)


def _is_merge_in_order(
    cp: ContextParallel, plan: Any, alone: Any, step: Step, own: Sequence[Tensor]
) -> bool:
    """Whether a step is what `merge_states` makes of all ranks' states."""
    out, lse = plan.run(*own, step.caches[0], return_lse=True)
    part, part_lse = alone.run(*step.qs, step.caches[0], return_lse=True)
    states = []
    for tensor in (part, part_lse):
        found = [torch.empty_like(tensor) for _ in range(cp.num_ranks)]
        dist.all_gather(found, tensor.contiguous())
        states.append(torch.stack(found))
    want, want_lse = jitattn.merge_states(*states)
    heads = slice(cp.rank * own[0].shape[1], (cp.rank + 1) * own[0].shape[1])
    return torch.equal(out, want[:, heads]) and torch.equal(lse, want_lse[:, heads])


def _seconds(
    refresh: Callable[[], object],
    run: Callable[[Any], object],
    caches: Sequence[Tensor] | Sequence[object],
    device: torch.device,
    repeats: int,
) -> float:
    """Return the median of a layer, of replays of a graph of eight, or of calls on the CPU."""
    if device.type == "cpu":
        samples = []
        for _ in range(repeats):
            begun = time.perf_counter()
            refresh()
            for kv in caches:
                run(kv)
            samples.append((time.perf_counter() - begun) / len(caches))
        return statistics.median(samples)
    refresh()
    for kv in caches:
        run(kv)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refresh()
        for i in range(_LAYERS):
            run(caches[i % len(caches)])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for _ in range(3):
        graph.replay()
    for begun, ended in zip(events[::2], events[1::2], strict=True):
        begun.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]
    return statistics.median(times) / _LAYERS


def arithmetic(num_ranks: int) -> str:
    """Return bytes of a layer on so many ranks, and the times that follow from them, as a table."""
    lines = [
        f"| a layer | KV, GB | attention on 1 card, us | on {num_ranks}, us | a rank receives, kB "
        "| travelling may take, us |",
        "| -- | --: | --: | --: | --: | --: |",
    ]
    for case in cases(is_tiny=False, names=""):
        one = case.seconds * 1e6
        each = one / num_ranks
        received = case.received_bytes(num_ranks) / 1e3
        lines.append(
            f"| {case.name} | {case.kv_bytes / 1e9:.2f} | {one:,.0f} | {each:,.0f} | "
            f"{received:,.0f} | {one - each:,.0f} |"
        )
    return "\n".join(lines)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.bench_parallel", __doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--tiny", action="store_true", help="sizes of a machine without a card")
    parser.add_argument("--cases", default="", help="parts of names, comma-separated")
    parser.add_argument("--interleave", type=int, default=1, help="pages of a block")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--table", action="store_true", help="print a table at the end")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    parser.add_argument("--arithmetic", type=int, help="print bytes for so many ranks, and stop")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.arithmetic is not None:
        print(arithmetic(options.arithmetic))
        return 0
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    is_own = not dist.is_initialized()
    if is_own:
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.backend == "nccl" else "gloo")
    cp = ContextParallel(interleave=options.interleave, page_size=PAGE)
    env, lines, is_right = records.environment(), [], True
    for case in cases(is_tiny=options.tiny, names=options.cases):
        found = measure(case, cp, device, options.repeats)
        is_right &= found.is_same
        share = 1 - found.attention_s / found.step_s
        speed_up = found.one_card_s / found.step_s
        by_hand = f"{found.by_hand_s * 1e6:,.1f}" if found.by_hand_s else "-"
        lines.append(
            f"| {case.name} | {found.one_card_s * 1e6:,.1f} | {found.step_s * 1e6:,.1f} | "
            f"{speed_up:.2f} | {share:.0%} | {by_hand} | {'yes' if found.is_same else 'NO'} |"
        )
        if cp.rank == 0:
            print(lines[-1], flush=True)
            facts = asdict(case) | asdict(found) | {
                "case": case.name, "num_ranks": cp.num_ranks, "interleave": cp.interleave,
                "backend": options.backend, "speed_up": speed_up, "communication": share,
                "kv_bytes": case.kv_bytes, "received_bytes": case.received_bytes(cp.num_ranks),
            }  # fmt: skip
            records.append_json(options.json, [records.record("parallel", env, **facts)])
    if cp.rank == 0 and options.table:
        heading = [
            "case",
            "one card, us",
            f"{cp.num_ranks} ranks, us",
            "times",
            "travelling",
            "FlashInfer by hand, us",
            "same bits",
        ]
        rule = "| -- | --: | --: | --: | --: | --: | -- |"
        print("\n".join([f"| {' | '.join(heading)} |", rule, *lines]))
    if is_own:
        dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
