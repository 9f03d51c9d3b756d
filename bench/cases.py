"""The decode cases by name, in groups, and how cases of any bench are grouped and picked.

Figures within a group are compared: with rivals by "best rival / jitattn", without by the time of
each variant over that of the group's first.
"""

from __future__ import annotations

import fnmatch
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bench.workloads import Case

RIVALS = ("fa2", "fa2-tc", "xqa", "fa3")
BASELINE = "jitattn-shared"


@dataclass(frozen=True)
class Group:
    """What the cases of a group are for.

    Attributes:
        title: of its table.
        contenders: names of those that are measured, in their order.
        against: the case of the group whose time is divided by the others'; "": none.
    """

    title: str
    contenders: tuple[str, ...]
    against: str = ""

    @property
    def has_rivals(self) -> bool:
        """Whether anyone but jitattn is measured."""
        return any(not name.startswith("jitattn-") for name in self.contenders)


class Grouped(Protocol):
    """A case of any bench."""

    @property
    def name(self) -> str:
        """Its name, which no other case of its group has."""

    @property
    def group(self) -> str:
        """The name of its group."""


GroupedCase = TypeVar("GroupedCase", bound=Grouped)


_BESIDE_RIVALS = (*RIVALS, BASELINE, "jitattn-separate")
_STRIDES = ("separate", "cross-layer", "packed", "unaligned")
GROUPS = {
    "figures": Group("the cases that decide", _BESIDE_RIVALS),
    "more": Group("other batches, page sizes, windows, sinks, query tokens", _BESIDE_RIVALS),
    "layouts": Group(
        "one cache, several strides", (BASELINE, *(f"jitattn-{strides}" for strides in _STRIDES))
    ),
    "invariant": Group("what batch_invariant costs", (BASELINE, "jitattn-invariant")),
    "chain": Group("32 layers in a graph, early_kv", (BASELINE, "jitattn-early-kv")),
    # No rivals: XQA reads NVFP4 on compute capability 12 alone, FlashAttention-3 never; FlashInfer
    # on tensor cores would, and has not been tried. Shares of the streaming read and the speed over
    # that of e4m3 need none.
    "nvfp4": Group(
        "one cache in 16, 8 and 4 bits", (BASELINE,), against="B64x8k-h32_8-d128-p16-e4m3fn"
    ),
}


def ragged_lens(
    batch_size: int, *, low: int = 128, high: int = 16384, seed: int = 0
) -> tuple[int, ...]:
    """Return lengths that are log-uniform between ``low`` and ``high``; a seed fixes them."""
    rng = random.Random(seed)
    low_log2, high_log2 = math.log2(low), math.log2(high)
    return tuple(int(2 ** rng.uniform(low_log2, high_log2)) for _ in range(batch_size))


def _lens(batch: str) -> tuple[int, ...]:
    """Read "B64x2k" and "B64ragged"."""
    count, _, length = batch.removeprefix("B").partition("x")
    if length:
        return (int(length.removesuffix("k")) * 1024,) * int(count)
    return ragged_lens(int(count.removesuffix("ragged")))


def _case(
    batch: str,
    heads: str = "32/8",
    head_dim: int = 128,
    page_size: int = 16,
    *,
    kv_dtype: str = "bfloat16",
    kv_layout: str = "NHD",
    window_left: int = -1,
    use_sinks: bool = False,
    q_len: int = 1,
    group: str = "figures",
) -> Case:
    """Name a case after every number that isn't a default."""
    num_qo_heads, num_kv_heads = (int(part) for part in heads.split("/"))
    marks = {
        kv_dtype.removeprefix("float8_"): kv_dtype != "bfloat16",
        kv_layout.lower(): kv_layout != "NHD",
        f"w{window_left}": window_left >= 0,
        "sinks": use_sinks,
        f"q{q_len}": q_len > 1,
    }
    shape = f"{batch}-h{num_qo_heads}_{num_kv_heads}-d{head_dim}-p{page_size}"
    return Case(
        name="-".join((shape, *(mark for mark, is_set in marks.items() if is_set))),
        seq_lens=_lens(batch),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        window_left=window_left,
        use_sinks=use_sinks,
        q_len=q_len,
        group=group,
    )


CASES = (
    _case("B1x8k"),
    _case("B1x128k"),
    _case("B16x2k"),
    _case("B64x2k"),
    _case("B64x8k"),
    _case("B256x1k"),
    _case("B64ragged"),
    _case("B64ragged", page_size=64),
    _case("B64x4k", "8/1"),
    _case("B32x4k", "32/32"),
    _case("B64x4k", "64/8", 64),
    _case("B64x4k", "16/8", 256),
    _case("B64x8k", kv_dtype="float8_e4m3fn"),
    # Small batches and other groups of heads.
    _case("B1x1k", group="more"),
    _case("B8x4k", group="more"),
    _case("B128x2k", "8/1", group="more"),
    _case("B16x4k", "32/4", group="more"),
    # The two kinds of layers of gpt-oss, with and without its sinks.
    *(
        _case("B32x32k", "64/8", 64, window_left=window, use_sinks=use_sinks, group="more")
        for use_sinks in (False, True)
        for window in (-1, 127)
    ),
    *(_case("B64x8k", page_size=page_size, group="more") for page_size in (1, 8, 32, 64, 128)),
    _case("B64x8k", kv_layout="HND", group="more"),
    # Speculative decoding.
    _case("B8x4k", q_len=4, group="more"),
    _case("B64x8k", q_len=4, group="more"),
    # jitattn against itself.
    _case("B64x8k", group="layouts"),
    _case("B64x8k", group="invariant"),
    _case("B256x1k", group="invariant"),
    _case("B64ragged", group="invariant"),
    _case("B32x4k", "32/32", group="invariant"),
    *(
        _case("B64x8k", kv_dtype=kv_dtype, group="nvfp4")
        for kv_dtype in ("bfloat16", "float8_e4m3fn", "nvfp4", "int4", "int4_g32")
    ),
    _case("B1x1k", group="chain"),
    _case("B1x8k", group="chain"),
)


def select(patterns: str) -> list[Case]:
    """Return the decode cases that `pick` picks."""
    return pick(patterns, CASES, GROUPS)


def pick(
    patterns: str, cases: Iterable[GroupedCase], groups: Mapping[str, Group]
) -> list[GroupedCase]:
    """Return the cases that a comma-separated list of groups and name patterns picks, in order.

    Patterns know cases with rivals only; the others go by their group.

    Raises:
        ValueError: a pattern picks nothing.
    """
    cases = list(cases)
    picked: set[tuple[str, str]] = set()
    for pattern in patterns.split(","):
        found = {(case.group, case.name) for case in cases if _matches(case, pattern, groups)}
        if not found:
            known = ", ".join(dict.fromkeys(case.name for case in cases))
            titles = ", ".join(groups)
            raise ValueError(f"no case matches {pattern!r}; groups: {titles}; cases: {known}")
        picked |= found
    return [case for case in cases if (case.group, case.name) in picked]


def _matches(case: Grouped, pattern: str, groups: Mapping[str, Group]) -> bool:
    by_name = groups[case.group].has_rivals and fnmatch.fnmatchcase(case.name, pattern)
    return case.group == pattern or by_name
