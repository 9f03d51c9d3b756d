"""Host microseconds of one launch, by each way there is to launch: which one should driver.py use?

    python -m bench.probe_launch

The kernel is the schedule kernel of a plan of one request, which is done long before the host is
back. "32 in turn" launches 32 plans, each with parameters of its own. torch's `zero_()` of one
element is what an operation of torch costs. Ways take turns, in blocks of 32 launches on an idle
device; what is printed is the median block, the 10th and the 90th percentile.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Sequence

import torch
from cuda.bindings import driver as cuda
from rich.table import Table

import jitattn
from bench import records
from bench.report import console
from bench.timing import Call, no_gc, summarize
from jitattn.device import driver
from jitattn.device.driver import Launch
from jitattn.kernels.common.cuda_plan import CudaPlan

LAUNCHES = 32
BLOCKS = 100


def ways(launch: Launch, stream: int) -> dict[str, Call]:
    """Return every way to make ``launch``, prepared as far as it can be."""
    library = ctypes.CDLL("libcuda.so.1")
    keeping_gil = ctypes.PyDLL("libcuda.so.1")
    grid, num_threads, smem_bytes = launch.shape
    config = ctypes.byref(driver._config(*launch.shape, stream, launch.kernel.begins_early))
    function, pointer = launch.kernel.argument, ctypes.byref(launch.pointer)
    numbers = (grid, 1, 1, num_threads, 1, 1, smem_bytes)
    shape = tuple(ctypes.c_uint.from_param(number) for number in numbers)
    at = ctypes.c_void_p.from_param(stream)
    address = ctypes.addressof(launch.pointer)
    call = functools.partial
    return {
        "Launch, as it is": call(launch, stream),
        "ctypes cuLaunchKernelEx": driver._by_ctypes(launch, stream),
        "the same, GIL kept": call(
            keeping_gil["cuLaunchKernelEx"], config, function, pointer, None
        ),
        "ctypes cuLaunchKernel": call(
            library["cuLaunchKernel"], function, *shape, at, pointer, None
        ),
        "binding cuLaunchKernelEx": driver._by_binding(launch, stream),
        "binding cuLaunchKernel": call(
            cuda.cuLaunchKernel, launch.kernel.function, *numbers, stream, address, 0
        ),
    }


def plans() -> list[jitattn.types.Plan]:
    """Return plans that live, each with parameters of its own."""
    planner = jitattn.AttentionPlanner(backend="cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device=planner.device)
    lengths = torch.ones(1, dtype=torch.int32, device=planner.device)
    return [planner.plan(jitattn.BlockTable(table), lengths) for _ in range(LAUNCHES)]


def block_time(calls: Sequence[Call]) -> float:
    """Return the seconds of one of ``calls``, made one after the other on an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def check(name: str, call: Callable[[], object]) -> None:
    """Raise RuntimeError where a way doesn't launch."""
    answer = call()
    status = answer[0] if isinstance(answer, tuple) else answer
    if status:
        raise RuntimeError(f"{name} returned {status!r}")


def main() -> int:
    """Time every way and print a table."""
    if not torch.cuda.is_available():
        print("probe_launch needs a CUDA device", file=sys.stderr)
        return 2
    alive = plans()
    backends = [plan.backend for plan in alive]
    stream = torch.cuda.current_stream().cuda_stream
    prepared = [
        ways(backend.schedule_launch, stream)
        for backend in backends
        if isinstance(backend, CudaPlan)
    ]
    x = torch.zeros(1, device="cuda")
    blocks: dict[str, list[Call]] = {"torch zero_()": [x.zero_] * LAUNCHES}
    for name in prepared[0]:
        if name != "Launch, as it is":
            check(name, prepared[0][name])
        blocks[name] = [prepared[0][name]] * LAUNCHES
        blocks[f"{name}, 32 in turn"] = [calls[name] for calls in prepared]
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    with no_gc():  # a collection takes longer than a block
        for i in range(BLOCKS + 3):
            for name, calls in blocks.items():
                seconds = block_time(calls)
                if i >= 3:  # the first blocks warm caches up
                    samples[name].append(seconds)
    _print(samples)
    return 0


def _print(samples: dict[str, list[float]]) -> None:
    env = records.environment()
    out = console()
    out.print(f"{env['card']}, torch {env['torch']}, commit {env['commit']}", markup=False)
    table = Table(title="host us a launch")
    for column in ("way", "median", "p10", "p90"):
        table.add_column(column)
    for name, seconds in samples.items():
        timing = summarize(seconds)
        figures = (timing.median_s, timing.p10_s, timing.p90_s)
        table.add_row(name, *(f"{1e6 * figure:.2f}" for figure in figures))
    out.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
