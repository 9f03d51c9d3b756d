"""The plots of prefill and of latent attention: every case and contender, a panel for each card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.cases import BASELINE, Group
from bench.mla_cases import MLA_CASES, MLA_GROUPS, MLA_RIVALS
from bench.prefill_cases import PREFILL_CASES, PREFILL_GROUPS, PREFILL_RIVALS

# Colours of Okabe and Ito, as in bench.roofline; shapes say the same.
_STYLES: dict[str, dict[str, Any]] = {
    "fa2": {"marker": "v", "color": "#999999", "label": "FlashInfer fa2"},
    "flashinfer-fa3": {"marker": "^", "color": "#56B4E9", "label": "FlashInfer fa3"},
    "fa3-paged": {"marker": "D", "color": "#0072B2", "label": "FlashAttention-3, pages"},
    "fa3-contiguous": {"marker": "s", "color": "#009E73", "label": "FlashAttention-3, no pages"},
    "flashmla": {"marker": "P", "color": "#CC79A7", "label": "FlashMLA"},
    BASELINE: {"marker": "o", "color": "#D55E00", "label": "jitattn"},
}
Record = Mapping[str, Any]


@dataclass(frozen=True)
class CasePlot:
    """What is plotted of the records of a bench.

    Attributes:
        title: of every panel, before the card's name.
        unit: of the figures.
        rivals: names of contenders that jitattn is measured beside.
        cases: names, in their order on the axis.
        groups: of those cases; the ones without rivals are not shown.
        figure: what a record comes to.
    """

    title: str
    unit: str
    rivals: tuple[str, ...]
    cases: tuple[str, ...]
    groups: Mapping[str, Group]
    figure: Callable[[Record], float]

    @property
    def styles(self) -> dict[str, dict[str, Any]]:
        """How the contenders look that are shown."""
        return {name: style for name, style in _STYLES.items() if name in (*self.rivals, BASELINE)}

    def newest(self, records: Sequence[Record]) -> dict[str, list[Record]]:
        """Return the records of each card's newest commit that rivals were measured beside.

        Of each contender and case the last; in the order of the cards' names.
        """
        shown = [r for r in records if r["contender"] in self.styles and self._is_beside_rivals(r)]
        cards: dict[str, list[Record]] = {}
        for card in sorted({r["environment"]["card"] for r in shown}):
            here = sorted((r for r in shown if r["environment"]["card"] == card), key=_time)
            rivals = [r for r in here if r["contender"] in self.rivals]
            if rivals:
                commit = rivals[-1]["environment"]["commit"]
                of_commit = [r for r in here if r["environment"]["commit"] == commit]
                cards[card] = list({(r["case"], r["contender"]): r for r in of_commit}.values())
        return cards

    def _is_beside_rivals(self, record: Record) -> bool:
        """Return whether its group has rivals; records that name no group are of the first."""
        group = self.groups.get(record.get("group", "figures"))
        return group is not None and group.has_rivals

    def draw(self, cards: Mapping[str, Sequence[Record]]) -> Figure:
        """Return the figure, a panel for each card."""
        figure = Figure(figsize=(8.5, 4.4 * len(cards)), layout="constrained")
        panels = figure.subplots(len(cards), squeeze=False)[:, 0]
        for axes, (card, records) in zip(panels, cards.items(), strict=True):
            self._draw_card(axes, card, records)
        return figure

    def _draw_card(self, axes: Axes, card: str, records: Sequence[Record]) -> None:
        measured = {record["case"] for record in records}
        order = [name for name in self.cases if name in measured]
        names = [*order, *sorted(measured - set(order))]
        styles = self.styles
        for i, (contender, style) in enumerate(styles.items()):
            points = {r["case"]: self.figure(r) for r in records if r["contender"] == contender}
            shift = 0.12 * (i - (len(styles) - 1) / 2)
            at = [names.index(case) + shift for case in points]
            axes.plot(at, list(points.values()), linestyle="none", markersize=6, **style)
        size = 8 if len(names) < 20 else 6
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=size)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(self.unit)
        commit = records[0]["environment"]["commit"]
        axes.set_title(f"{self.title} on {card}, jitattn at {commit[:12]}", fontsize=10)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(loc="best", fontsize=8, framealpha=0.9)


def _time(record: Record) -> str:
    return str(record["environment"]["time"])


PREFILL = CasePlot(
    title="Prefill",
    unit="TFLOP/s of unmasked work",
    rivals=PREFILL_RIVALS,
    cases=tuple(dict.fromkeys(case.name for case in PREFILL_CASES)),
    groups=PREFILL_GROUPS,
    figure=lambda record: float(record["tflop_per_s"]),
)
MLA = CasePlot(
    title="Latent attention",
    unit="% of what bytes or products allow",
    rivals=MLA_RIVALS,
    cases=tuple(dict.fromkeys(case.name for case in MLA_CASES)),
    groups=MLA_GROUPS,
    figure=lambda record: 100 * float(record["floor_fraction"]),
)
