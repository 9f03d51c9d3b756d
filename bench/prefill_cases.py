"""The prefill cases by name, in groups; a group says who is measured on its cases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from bench.cases import BASELINE, Group, pick, ragged_lens
from bench.workloads import Case, PlannerArguments

Q_DTYPE = "bfloat16"

# What no card of today exceeds: floors under these choose the method, and nothing else.
_FLOP_PER_S = 1e15
_BYTES_PER_S = 3.5e12

PREFILL_RIVALS = ("fa2", "flashinfer-fa3", "fa3-paged", "fa3-contiguous")
CONTIGUOUS = "fa3-contiguous"
_LAYOUTS = ("page1", "page64", "page128", "separate", "cross-layer")
PREFILL_GROUPS = {
    "figures": Group("the cases that decide", (*PREFILL_RIVALS, BASELINE)),
    "more": Group("head dims, windows, caps, sinks, e4m3", (*PREFILL_RIVALS, BASELINE)),
    "layouts": Group(
        "one batch, other pages and strides", (BASELINE, *(f"jitattn-{name}" for name in _LAYOUTS))
    ),
    "mixed": Group(
        "decode and prefill in one run or two",
        ("flashinfer-pod", "fa3-paged", BASELINE, "jitattn-apart"),
    ),
}


class PrefillArguments(PlannerArguments):
    """What a planner is given for a prefill case, besides the device."""

    logits_soft_cap: float


@dataclass(frozen=True)
class PrefillCase:
    """Query tokens and KV tokens of each request; causal, queries in bfloat16."""

    name: str
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: str = Q_DTYPE
    window_left: int = -1
    logits_soft_cap: float = 0.0
    use_sinks: bool = False
    group: Literal["figures", "more", "layouts", "mixed"] = "figures"

    @property
    def flop(self) -> int:
        """Operations of both products over the keys that each query token sees."""
        pairs = zip(self.q_lens, self.seq_lens, strict=True)
        num_scores = sum(self._seen_until(n) - self._seen_until(n - q) for q, n in pairs)
        return 4 * self.head_dim * self.num_qo_heads * num_scores

    def _seen_until(self, num_rows: int) -> int:
        """Return how many keys the first tokens of a request see, all of them together."""
        if self.window_left < 0:
            return num_rows * (num_rows + 1) // 2
        full = self.window_left + 1
        ramp = min(num_rows, full)
        return ramp * (ramp + 1) // 2 + (num_rows - ramp) * full

    @property
    def floor_s(self) -> float:
        """Seconds that no card of today stays under."""
        return max(self.flop / _FLOP_PER_S, self.pages().kv_bytes / _BYTES_PER_S)

    @property
    def num_decodes(self) -> int:
        """Requests of one query token at the start of the batch."""
        return next((i for i, q_len in enumerate(self.q_lens) if q_len > 1), len(self.q_lens))

    def pages(self) -> Case:
        """Return the case whose caches and tables this one uses; none of its pages are dead."""
        return Case(
            name=self.name, seq_lens=self.seq_lens, num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, page_size=self.page_size,
            q_dtype=Q_DTYPE, kv_dtype=self.kv_dtype, use_sinks=self.use_sinks,
        )  # fmt: skip

    def planner_arguments(self, page_table: str) -> PrefillArguments:
        """Return the arguments of `jitattn.AttentionPlanner` for this case."""
        arguments = self.pages().planner_arguments(page_table)
        arguments["window_left"] = self.window_left
        return PrefillArguments(**arguments, logits_soft_cap=self.logits_soft_cap)

    def tiny(self) -> PrefillCase:
        """Return the smallest batch that makes a contender compile what this case needs."""
        q_lens = (1, 2) if 0 < self.num_decodes < len(self.q_lens) else (2,)
        seq_lens = (2 * self.page_size,) * len(q_lens)
        return dataclasses.replace(self, q_lens=q_lens, seq_lens=seq_lens)


def _figures() -> tuple[PrefillCase, ...]:
    ragged = ragged_lens(64)
    return (
        PrefillCase("1x1k", (1024,), (1024,)),
        PrefillCase("1x4k", (4096,), (4096,)),
        PrefillCase("1x16k", (16_384,), (16_384,)),
        PrefillCase("8x2k", (2048,) * 8, (2048,) * 8),
        PrefillCase("4x512-on-8k", (512,) * 4, (8192,) * 4),
        PrefillCase("1x2k-on-32k", (2048,), (32_768,)),
        PrefillCase("64ragged", tuple(max(16, n // 8) for n in ragged), ragged),
        PrefillCase("1x128-on-64k", (128,), (65_536,)),
    )


def _more() -> tuple[PrefillCase, ...]:
    by_name = {case.name: case for case in _figures()}
    long, many, late = by_name["1x16k"], by_name["8x2k"], by_name["1x128-on-64k"]
    e4m3 = "float8_e4m3fn"
    on_8k = by_name["4x512-on-8k"]
    d64: dict[str, Any] = {"num_qo_heads": 64, "head_dim": 64}
    d256: dict[str, Any] = {"num_qo_heads": 16, "head_dim": 256}
    changes: tuple[tuple[PrefillCase, str, dict[str, Any]], ...] = (
        *((case, "h64_8-d64", d64) for case in (many, long, on_8k)),
        *((case, "h16_8-d256", d256) for case in (many, long, on_8k)),
        (long, "w1023", {"window_left": 1023}),
        (many, "cap50", {"logits_soft_cap": 50.0}),
        (many, "w1023-cap50", {"window_left": 1023, "logits_soft_cap": 50.0}),
        (many, "w1023-cap30", {"window_left": 1023, "logits_soft_cap": 30.0}),
        (many, "w1023-sinks", {"window_left": 1023, "use_sinks": True}),
        (many, "e4m3", {"kv_dtype": e4m3}),
        (late, "e4m3", {"kv_dtype": e4m3}),
    )
    short = PrefillCase("1x512", (512,), (512,), group="more")
    return short, *(
        dataclasses.replace(case, name=f"{case.name}-{mark}", group="more", **change)
        for case, mark, change in changes
    )


PREFILL_CASES = (
    *_figures(),
    *_more(),
    PrefillCase("8x2k", (2048,) * 8, (2048,) * 8, group="layouts"),
    PrefillCase(
        "60x1-on-2k+4x1k", (1,) * 60 + (1024,) * 4, (2048,) * 60 + (1024,) * 4, group="mixed"
    ),
    PrefillCase(
        "128x1-on-2k+2x2k", (1,) * 128 + (2048,) * 2, (2048,) * 128 + (2048,) * 2, group="mixed"
    ),
)


def select_prefill(patterns: str) -> list[PrefillCase]:
    """Return the prefill cases that `pick` picks."""
    return pick(patterns, PREFILL_CASES, PREFILL_GROUPS)
