"""What engines are asked: tokens drawn with a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

Prompts = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """A batch that is timed from the call to the last token.

    Attributes:
        name: of records.
        lengths: tokens of each prompt.
        num_new: tokens that each prompt gets.
    """

    name: str
    lengths: tuple[int, ...]
    num_new: int


def spread(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Return lengths whose logarithms are even, in an order that mixes them."""
    step = math.log(longest / shortest) / max(1, count - 1)
    lengths = [round(shortest * math.exp(i * step)) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(lengths[i] for i in order)


WORKLOADS: Mapping[str, tuple[Workload, ...]] = {
    "8b": (
        Workload("decode", (512,) * 64, 256),
        Workload("ragged", spread(32, 128, 8192), 128),
    ),
    "tiny": (
        Workload("decode", (12,) * 3, 4),
        Workload("ragged", spread(3, 4, 40), 3),
    ),
}
COMPARED: Mapping[str, tuple[tuple[int, ...], int, int]] = {
    "8b": (spread(16, 16, 3000), 1040, 64),
    "tiny": (spread(3, 4, 40), 36, 5),
}
"""Lengths of prompts whose tokens are compared, tokens that the second half of them begins with,
which ends within a page, and new tokens."""
LIMITS: Mapping[str, tuple[int, int, int]] = {
    "8b": (8192 + 512, 8192, 64),
    "tiny": (64, 48, 4),
}
"""Tokens of a request, tokens of a step (longer prompts are split), requests of a step."""


def draw(lengths: tuple[int, ...], vocab_size: int, seed: int) -> Prompts:
    """Return random tokens, none of which a model gives a meaning."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def compared(model: str, vocab_size: int) -> tuple[Prompts, int]:
    """Return the prompts whose tokens are compared, and how many new ones they get.

    The second half begin with the same tokens, so that they share pages, up to the middle of one.
    """
    lengths, num_common, num_new = COMPARED[model]
    prompts = draw(lengths, vocab_size, seed=1)
    (common,) = draw((num_common,), vocab_size, seed=2)
    half = len(prompts) // 2
    longest = LIMITS[model][0] - num_new
    shared = [(common + prompt[: 1 + len(prompt) // 4])[:longest] for prompt in prompts[half:]]
    return prompts[:half] + shared, num_new
