"""A streaming read in Triton. Apart, because Triton reads this file's source and may be absent."""

# Triton's kernels are no Python functions, and its package is optional.
# mypy: ignore-errors

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

SHAPES = ((4096, 8), (8192, 4), (2048, 16))
"""Integers a step and steps a program; which is best depends on the card."""


@triton.jit
def _read(source, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # noqa: N803
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    start = program * BLOCK * STEPS
    for i in range(STEPS):
        total += tl.load(source + start + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total))


def prepare(source: Tensor, block: int, steps: int) -> Callable[[], object]:
    """Return a call that reads ``source`` once.

    Args:
        source: int32, contiguous; its length is a multiple of block * steps.
        block: integers that a program reads at once.
        steps: reads of a program.
    """
    num_programs, rest = divmod(source.numel(), block * steps)
    if rest:
        raise ValueError(f"source has {source.numel()} values, not a multiple of {block * steps}")
    sums = torch.empty(num_programs, dtype=torch.int32, device=source.device)
    return lambda: _read[(num_programs,)](source, sums, block, steps)
