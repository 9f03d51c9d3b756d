"""The plot of prefill records: TFLOP/s of every case and contender, a panel for each card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.cases import BASELINE
from bench.prefill_cases import PREFILL_CASES, PREFILL_GROUPS, PREFILL_RIVALS

# Colours of Okabe and Ito, as in bench.roofline; shapes say the same.
STYLES: dict[str, dict[str, Any]] = {
    "fa2": {"marker": "v", "color": "#999999", "label": "FlashInfer fa2"},
    "flashinfer-fa3": {"marker": "^", "color": "#56B4E9", "label": "FlashInfer fa3"},
    "fa3-paged": {"marker": "D", "color": "#0072B2", "label": "FlashAttention-3, pages"},
    "fa3-contiguous": {"marker": "s", "color": "#009E73", "label": "FlashAttention-3, no pages"},
    BASELINE: {"marker": "o", "color": "#D55E00", "label": "jitattn"},
}
Record = Mapping[str, Any]


def newest(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each card's newest commit that rivals were measured beside.

    Of each contender and case the last; in the order of the cards' names.
    """
    shown = [r for r in records if r["contender"] in STYLES and _is_beside_rivals(r)]
    cards: dict[str, list[Record]] = {}
    for card in sorted({r["environment"]["card"] for r in shown}):
        here = sorted((r for r in shown if r["environment"]["card"] == card), key=_time)
        rivals = [r for r in here if r["contender"] in PREFILL_RIVALS]
        if rivals:
            commit = rivals[-1]["environment"]["commit"]
            of_commit = [r for r in here if r["environment"]["commit"] == commit]
            cards[card] = list({(r["case"], r["contender"]): r for r in of_commit}.values())
    return cards


def _is_beside_rivals(record: Record) -> bool:
    """Return whether its group has rivals; records that name no group are of the first."""
    group = PREFILL_GROUPS.get(record.get("group", "figures"))
    return group is not None and group.has_rivals


def _time(record: Record) -> str:
    return str(record["environment"]["time"])


def draw(cards: Mapping[str, Sequence[Record]]) -> Figure:
    """Return the figure, a panel for each card."""
    figure = Figure(figsize=(8.5, 4.4 * len(cards)), layout="constrained")
    panels = figure.subplots(len(cards), squeeze=False)[:, 0]
    for axes, (card, records) in zip(panels, cards.items(), strict=True):
        _draw_card(axes, card, records)
    return figure


def _draw_card(axes: Axes, card: str, records: Sequence[Record]) -> None:
    measured = {record["case"] for record in records}
    order = dict.fromkeys(case.name for case in PREFILL_CASES if case.name in measured)
    names = [*order, *sorted(measured - set(order))]
    for i, (contender, style) in enumerate(STYLES.items()):
        points = {r["case"]: r["tflop_per_s"] for r in records if r["contender"] == contender}
        shift = 0.12 * (i - (len(STYLES) - 1) / 2)
        at = [names.index(case) + shift for case in points]
        axes.plot(at, list(points.values()), linestyle="none", markersize=6, **style)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("TFLOP/s of unmasked work")
    commit = records[0]["environment"]["commit"]
    axes.set_title(f"Prefill on {card}, jitattn at {commit[:12]}", fontsize=10)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="lower right", fontsize=8, framealpha=0.9)
