"""Host microseconds of binding, planning and running, over many caches in turn with fresh queries.

    python -m bench.bench_dispatch --json bench/results/dispatch.jsonl

The batch is so small that the device is never behind. A block is one call for each cache, as a step
of a model with that many layers; the device is idle when it begins. jitattn's calls are also made
once under torch's synchronisation check, which raises where one of them would wait.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from bench import records
from bench.contenders import SkipError, set_up
from bench.options import make_parser
from bench.report import console
from bench.rivals import FlashInferFa2
from bench.timing import Call, Timing, no_gc, summarize
from bench.workloads import Batch, Case, make_batch
from jitattn.kernels.common.cuda_plan import CudaPlan

CASE = Case(
    name="B8x256-h32_8-d128-p16",
    seq_lens=(256,) * 8,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    group="dispatch",
)

MakeCalls = Callable[[Sequence[Tensor]], Sequence[Call]]
"""From a fresh query for each cache to a call for each cache."""


@dataclass(frozen=True)
class Operation:
    """One thing whose host time is measured."""

    contender: str
    name: str
    make_calls: MakeCalls


def host_time(operation: Operation, batch: Batch, blocks: int) -> Timing:
    """Return the host's seconds a call, a sample for each of ``blocks`` blocks."""
    samples = []
    with no_gc():  # a collection takes longer than a block
        for i in range(blocks + 3):
            queries = [torch.randn_like(q) for q in batch.q]
            calls = operation.make_calls(queries)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for call in calls:
                call()
            seconds = time.perf_counter() - start
            if i >= 3:  # the first blocks warm caches up
                samples.append(seconds / len(calls))
    torch.cuda.synchronize()
    return summarize(samples)


def synchronises(operation: Operation, batch: Batch) -> bool:
    """Say whether torch's check finds a call that waits for the device."""
    calls = operation.make_calls([torch.randn_like(q) for q in batch.q])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def jitattn_operations(batch: Batch, page_table: str) -> list[Operation]:
    """Return bind, plan, refresh, run and run(out=) of jitattn, and a launch alone.

    "run, not bound" is run with the caches themselves.

    The launch, of the schedule kernel, is the floor: the driver and one call from Python.
    """
    setup = set_up(batch, page_table)
    assert isinstance(setup.plan.backend, CudaPlan)
    launch = setup.plan.backend.schedule_launch
    stream = torch.cuda.current_stream().cuda_stream
    make_plan = functools.partial(setup.planner.plan, setup.pages, batch.seq_lens)
    refresh = setup.plan.refresh
    raw = [kv.source[0] if len(kv.source) == 1 else kv.source for kv in setup.caches]
    binds = [functools.partial(setup.planner.bind, cache) for cache in raw]

    def runs_raw(queries: Sequence[Tensor]) -> list[Call]:
        pairs = zip(queries, raw, strict=True)
        return [functools.partial(setup.plan.run, *pair) for pair in pairs]

    name = f"jitattn-{page_table}"
    return [
        Operation(name, "launch", lambda q: [functools.partial(launch, stream)] * len(q)),
        Operation(name, "bind", lambda queries: binds),
        Operation(name, "plan", lambda queries: [make_plan] * len(queries)),
        Operation(name, "refresh", lambda queries: [refresh] * len(queries)),
        *_run_operations(name, setup.plan.run, setup.caches, torch.empty_like(batch.q)),
        Operation(name, "run, not bound", runs_raw),
    ]


def flashinfer_operations(batch: Batch, *, use_tensor_cores: bool) -> list[Operation]:
    """Return the same of FlashInfer's decode wrapper, or raise SkipError."""
    rival = FlashInferFa2(use_tensor_cores=use_tensor_cores)
    wrapper = rival.wrapper(batch)
    make_plan = functools.partial(rival.plan, wrapper, batch)
    make_plan()
    return [
        Operation(rival.name, "plan", lambda queries: [make_plan] * len(queries)),
        *_run_operations(rival.name, wrapper.run, batch.kv.unbind(), torch.empty_like(batch.q)),
    ]


def _run_operations(
    name: str, run: Callable[..., object], caches: Sequence[object], outs: Tensor
) -> list[Operation]:
    """Return run and run(out=) over ``caches`` in turn, each with a query and an output."""

    def runs(queries: Sequence[Tensor]) -> list[Call]:
        return [functools.partial(run, *pair) for pair in zip(queries, caches, strict=True)]

    def runs_into(queries: Sequence[Tensor]) -> list[Call]:
        triples = zip(queries, caches, outs, strict=True)
        return [functools.partial(run, q, cache, out=out) for q, cache, out in triples]

    return [Operation(name, "run", runs), Operation(name, "run(out=)", runs_into)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and append the records."""
    parser = make_parser("bench.bench_dispatch", __doc__)
    parser.add_argument("--caches", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--rivals", action="store_true", help="FlashInfer's wrappers, too")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_dispatch needs a CUDA device", file=sys.stderr)
        return 2
    batch = make_batch(CASE, options.caches, torch.device("cuda", torch.cuda.current_device()))
    operations = jitattn_operations(batch, "shared") + jitattn_operations(batch, "separate")
    if options.rivals:
        operations += _rival_operations(batch)
    timings = [host_time(operation, batch, options.blocks) for operation in operations]
    # Afterwards: the check breaks off what it catches, and may leave a rival's plan half made.
    waits = [synchronises(operation, batch) for operation in operations]
    rows = list(zip(operations, timings, waits, strict=True))
    env = records.environment()
    records.append_json(
        options.json,
        [_record(op, timing, waits, options.caches, env) for op, timing, waits in rows],
    )
    _print(rows, options.caches, env)
    return 0


def _rival_operations(batch: Batch) -> list[Operation]:
    operations = []
    for use_tensor_cores in (False, True):
        try:
            operations += flashinfer_operations(batch, use_tensor_cores=use_tensor_cores)
        except SkipError as reason:
            print(f"skipped: {reason}")
    return operations


def _record(
    operation: Operation, timing: Timing, waits: bool, caches: int, env: dict[str, object]
) -> dict[str, object]:
    return records.record(
        "dispatch",
        env,
        case=CASE.name,
        contender=operation.contender,
        operation=operation.name,
        num_caches=caches,
        median_us=timing.median_s * 1e6,
        p10_us=timing.p10_s * 1e6,
        p90_us=timing.p90_s * 1e6,
        num_samples=timing.num_samples,
        synchronises=waits,
    )


def _print(
    rows: Sequence[tuple[Operation, Timing, bool]], caches: int, env: dict[str, object]
) -> None:
    out = console()
    out.print(f"{env['card']}, torch {env['torch']}, commit {env['commit']}", markup=False)
    table = Table(title=f"host us a call, {CASE.name}, {caches} caches in turn")
    for name in ("contender", "operation", "median", "p10", "p90", "waits for the device"):
        table.add_column(name)
    for operation, timing, waits in rows:
        figures = (f"{s * 1e6:.2f}" for s in (timing.median_s, timing.p10_s, timing.p90_s))
        table.add_row(operation.contender, operation.name, *figures, "yes" if waits else "no")
    out.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
