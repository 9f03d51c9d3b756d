"""How far two engines' tokens and their logarithmic probabilities are apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Greedy:
    """What an engine decoded greedily of one prompt.

    Attributes:
        tokens: new ones.
        best: logarithmic probability of each.
        second: of the best token beside it.
        num_cached: tokens of the prompt that were in the cache already.
    """

    tokens: list[int]
    best: list[float]
    second: list[float]
    num_cached: int = 0


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the place of the first token that differs, or None."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)


def of_greedy(ours: Sequence[Greedy], theirs: Sequence[Greedy]) -> dict[str, object]:
    """Compare tokens up to where they part, after which contexts differ.

    Returns:
        requests, those whose tokens are all equal, tokens that were compared and equal, the gaps
        between the best and second token where they part (the smaller of the two engines': a tie
        is near 0), and the differences of logarithmic probabilities before.
    """
    equal, num_same, gaps, apart = 0, 0, [], []
    for a, b in zip(ours, theirs, strict=True):
        place = first_difference(a.tokens, b.tokens)
        until = len(a.tokens) if place is None else place
        num_same += until
        apart += [abs(x - y) for x, y in zip(a.best[:until], b.best[:until], strict=True)]
        if place is None:
            equal += 1
        else:
            gaps.append(min(a.best[place] - a.second[place], b.best[place] - b.second[place]))
    return {
        "num_requests": len(ours),
        "equal_requests": equal,
        "equal_tokens": num_same,
        "gaps_where_they_part": sorted(round(gap, 4) for gap in gaps),
        **_spread("greedy", apart),
    }


def of_forced(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> dict[str, object]:
    """Compare the logarithmic probabilities of the same tokens in the same contexts."""
    apart = [
        abs(x - y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True)
    ]
    return _spread("forced", apart)


def _spread(name: str, apart: Sequence[float]) -> dict[str, object]:
    if not apart:
        return {f"{name}_tokens": 0}
    return {
        f"{name}_tokens": len(apart),
        f"{name}_mean": statistics.fmean(apart),
        f"{name}_p99": sorted(apart)[min(len(apart) - 1, int(0.99 * len(apart)))],
        f"{name}_max": max(apart),
    }
