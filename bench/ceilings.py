"""What the card itself reaches: the figures that every other figure is divided by."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.timing import L2Flush, L2Policy, Timer, summarize

_COPY_BYTES = 2 << 30
"""Far beyond the L2 cache, so that it needs no flush and start-up doesn't show."""


@dataclass(frozen=True)
class Ceilings:
    """Bandwidths of one device in bytes per second.

    Attributes:
        copy: a device-to-device copy, bytes read plus bytes written.
        read: a streaming read, the better of ``read_method``'s.
        read_method: what reached it.
    """

    copy: float
    read: float
    read_method: str


@dataclass(frozen=True)
class TensorCeilings(Ceilings):
    """Those and the operations per second of one device.

    Attributes:
        product: of a product of two large bfloat16 matrices.
    """

    product: float


def measure(device: torch.device, *, num_bytes: int = _COPY_BYTES, repeats: int = 15) -> Ceilings:
    """Time a copy and streaming reads of ``num_bytes`` without any code of jitattn's."""
    timer = Timer(L2Flush(L2Policy.KEEP, device), repeats=repeats)
    source = torch.randint(0, 9, (num_bytes // 4,), dtype=torch.int32, device=device)
    copy_s = _time_copy(timer, source)
    reads = {"torch.sum": summarize(timer.samples(source.sum)).median_s}
    if importlib.util.find_spec("triton") is not None:
        from bench import streaming_read

        for block, steps in streaming_read.SHAPES:
            call = streaming_read.prepare(source, block, steps)
            reads[f"triton {block} x {steps}"] = summarize(timer.samples(call)).median_s
    best = min(reads, key=lambda name: reads[name])
    return Ceilings(copy=2 * num_bytes / copy_s, read=num_bytes / reads[best], read_method=best)


def measure_tensor(device: torch.device, *, size: int = 8192, repeats: int = 15) -> TensorCeilings:
    """Measure those, and time torch's product of two ``size`` x ``size`` bfloat16 matrices."""
    limits = measure(device)
    timer = Timer(L2Flush(L2Policy.KEEP, device), repeats=repeats)
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    seconds = summarize(timer.samples(lambda: torch.mm(a, b, out=out))).median_s
    return TensorCeilings(
        copy=limits.copy,
        read=limits.read,
        read_method=limits.read_method,
        product=2 * size**3 / seconds,
    )


def _time_copy(timer: Timer, source: Tensor) -> float:
    target = torch.empty_like(source)
    return summarize(timer.samples(lambda: target.copy_(source))).median_s
