"""How fast a host is: figures that host times of different machines are compared by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.timing import no_gc, summarize

LOOP_ROUNDS = 1000


@dataclass(frozen=True)
class HostSpeed:
    """Median seconds of things that have nothing to do with jitattn.

    Attributes:
        loop_s: of a Python loop with `LOOP_ROUNDS` additions.
        torch_op_s: of ``torch.empty(0)``.
        launch_s: of ``zero_()`` of an element on the device, which is one launch; None without one.
    """

    loop_s: float
    torch_op_s: float
    launch_s: float | None = None

    def __str__(self) -> str:
        launch = "" if self.launch_s is None else f", a zero_() {self.launch_s * 1e6:.2f} us"
        return (
            f"{LOOP_ROUNDS} additions in Python {self.loop_s * 1e6:.1f} us, "
            f"a torch.empty(0) {self.torch_op_s * 1e6:.2f} us{launch}"
        )


def measure(device: torch.device | None = None, *, repeats: int = 51) -> HostSpeed:
    """Time a loop, an operation that does nothing, and a launch on a CUDA ``device``."""
    launch_s = None
    if device is not None and device.type == "cuda":
        target = torch.zeros(1, device=device)
        launch_s = _median(lambda: _repeat(target.zero_, 100), repeats, _synchronise) / 100
    return HostSpeed(
        loop_s=_median(_loop, repeats),
        torch_op_s=_median(lambda: _repeat(_empty, 100), repeats) / 100,
        launch_s=launch_s,
    )


def _loop() -> int:
    total = 0
    for i in range(LOOP_ROUNDS):
        total += i
    return total


def _empty() -> object:
    return torch.empty(0)


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _synchronise() -> None:
    torch.cuda.synchronize()


def _median(
    call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    samples = []
    with no_gc():
        for _ in range(repeats):
            before()
            started = time.perf_counter()
            call()
            samples.append(time.perf_counter() - started)
    return summarize(samples).median_s
