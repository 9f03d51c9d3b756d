"""One timer for every contender: CUDA events, a cold L2 cache, warm-up, median and spread.

A long call is timed alone between two events. A short one is timed inside a CUDA graph that holds
the contender's device-side planning once and its run many times, over caches that together exceed
the L2 cache, because a launch from the host would cost more than the kernel.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch

Call = Callable[[], object]

GRAPH_BELOW_S = 100e-6
"""Cases whose bytes alone take less than this are timed inside a graph, whoever runs them."""

_FLUSH_BYTES = 512 << 20
"""Ten times the L2 cache of an H100, and some 170 us of work: time for the host to get ahead."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call over repeated, L2-cold calls."""

    median_s: float
    p10_s: float
    p90_s: float
    num_samples: int

    def gb_per_s(self, num_bytes: int) -> float:
        """Return the bandwidth in GB/s, 1 GB = 1e9 bytes."""
        return num_bytes / self.median_s / 1e9


def summarize(samples: Sequence[float]) -> Timing:
    """Return median, 10th and 90th percentile of ``samples`` (seconds; at least two)."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(
        median_s=statistics.median(samples),
        p10_s=deciles[0],
        p90_s=deciles[-1],
        num_samples=len(samples),
    )


class L2Policy(StrEnum):
    """What happens to the L2 cache before every timed call."""

    WRITE = "write"  # overwritten: its lines are dirty, and the timed call pays for their eviction
    READ = "read"  # filled with clean lines of another buffer
    KEEP = "keep"  # left as the previous call left it


class L2Flush:
    """Puts the L2 cache of a device into the state that a policy names."""

    def __init__(self, policy: L2Policy, device: torch.device) -> None:
        """Allocate the buffer that replaces what the cache holds.

        Args:
            policy: see `L2Policy`.
            device: a CUDA device.
        """
        self.policy = policy
        num_bytes = max(_FLUSH_BYTES, 4 * l2_bytes(device))
        self._buffer = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        if self.policy is L2Policy.WRITE:
            self._buffer.zero_()
        elif self.policy is L2Policy.READ:
            self._buffer.sum()


@dataclass(frozen=True)
class Replay:
    """Replays a graph, and keeps the calls that it captured.

    A graph knows addresses only. Tensors that nobody but a captured call has would be freed with
    it, and their memory given to others, or back to the driver by the next capture.
    """

    graph: torch.cuda.CUDAGraph
    plan: Call | None
    runs: tuple[Call, ...]

    def __call__(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class Timer:
    """Times calls on the current stream of the current CUDA device."""

    flush: L2Flush
    repeats: int = 30
    warm_up_s: float = 0.03

    def samples(self, call: Call) -> list[float]:
        """Return the seconds of ``repeats`` calls, each after a flush."""
        self._warm_up(call)
        events = [_event_pair() for _ in range(self.repeats)]
        with no_gc():
            for start, stop in events:
                self.flush()
                start.record()
                call()
                stop.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in events]

    def capture(self, plan: Call | None, runs: Sequence[Call], num_runs: int) -> Call:
        """Return a replay of one CUDA graph: ``plan`` once, then ``num_runs`` of ``runs`` in turn.

        Everything must have run once before, so that nothing is loaded or compiled here.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            if plan is not None:
                plan()
            for i in range(num_runs):
                runs[i % len(runs)]()
        return Replay(graph, plan, tuple(runs))

    def _warm_up(self, call: Call) -> None:
        end = time.perf_counter() + self.warm_up_s
        while time.perf_counter() < end:
            for _ in range(4):
                call()
            torch.cuda.synchronize()


def l2_bytes(device: torch.device) -> int:
    """Return the size of the device's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the garbage collector out of a timed loop."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # untyped in torch
    return event(enable_timing=True), event(enable_timing=True)
