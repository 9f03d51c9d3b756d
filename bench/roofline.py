"""Plot bytes moved and bandwidth reached of every decode case, a panel for each card.

    python -m bench.roofline bench/results/*.jsonl -o docs/images/roofline.svg
    python -m bench.roofline --prefill bench/results/*.jsonl -o docs/images/prefill.svg
    python -m bench.roofline --mla bench/results/*.jsonl -o docs/images/mla.svg

Reads what `bench_decode --json` wrote and takes the cases with rivals of the newest commit that was
measured on a card. The two lines are what that card reached in a copy and in a streaming read.
With `--prefill` it plots TFLOP/s of what `bench_prefill --json` wrote, with `--mla` how much of the
floor's speed what `bench_mla --json` wrote reaches.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import case_plot
from bench.cases import BASELINE, RIVALS
from bench.options import make_parser

# Colours of Okabe and Ito, which colour-blind people tell apart; shapes say the same.
_STYLES: dict[str, dict[str, Any]] = {
    BASELINE: {"marker": "o", "color": "#D55E00", "label": "jitattn, shared table"},
    "fa2": {"marker": "v", "color": "#999999", "label": "FlashInfer fa2"},
    "fa2-tc": {"marker": "^", "color": "#56B4E9", "label": "FlashInfer fa2, tensor cores"},
    "xqa": {"marker": "s", "color": "#009E73", "label": "XQA"},
    "fa3": {"marker": "D", "color": "#0072B2", "label": "FlashAttention-3"},
}
_DEFAULTS = ("-h32_8", "-d128", "-p16")  # left out of labels
_CLUSTER = 1.25  # cases whose bytes differ by less stand side by side
_CASE_WIDTH, _CLUSTER_WIDTH = 0.16, 0.5  # at the most, as a share of the bytes
_MAX_LABELS = 3  # of a cluster

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The newest figures of a card.

    Attributes:
        card: its name.
        commit: what was measured.
        copy: GB/s, read plus written.
        read: GB/s of a streaming read.
        cases: records of each case that rivals took part in, by its name; fewest bytes first.
    """

    card: str
    commit: str
    copy: float
    read: float
    cases: Mapping[str, Sequence[Record]]


def load(paths: Iterable[Path], kind: str = "decode") -> list[Record]:
    """Return the records of a bench in some files that hold figures."""
    lines = itertools.chain.from_iterable(path.read_text().splitlines() for path in paths)
    records = [json.loads(line) for line in lines if line.strip()]
    return [r for r in records if r["kind"] == kind and r["status"] == "timed"]


def newest_runs(records: Sequence[Record]) -> list[Run]:
    """Return a run for each card that rivals were measured on, in the order of their names."""
    cards = sorted({record["environment"]["card"] for record in records})
    runs = (_newest([r for r in records if r["environment"]["card"] == card]) for card in cards)
    return [run for run in runs if run is not None]


def _newest(records: Sequence[Record]) -> Run | None:
    """Return the run of one card: its newest commit with rivals, of each case the last figures."""
    beside = [r for r in records if r["contender"] in RIVALS]
    if not beside:
        return None
    last = max(beside, key=_time)
    commit = last["environment"]["commit"]
    beside = [r for r in beside if r["environment"]["commit"] == commit]
    cases: dict[str, list[Record]] = {}
    for name, num_bytes in sorted({(r["case"], r["num_bytes"]) for r in beside}, key=_by_bytes):
        time = max(_time(r) for r in beside if r["case"] == name)
        cases[name] = [
            r
            for r in records
            if (r["case"], r["num_bytes"], _time(r)) == (name, num_bytes, time)
            and r["contender"] in _STYLES
        ]
    limits = last["ceilings"]
    card = last["environment"]["card"]
    return Run(card, commit, limits["copy"] / 1e9, limits["read"] / 1e9, cases)


def _time(record: Record) -> str:
    return str(record["environment"]["time"])


def _by_bytes(case: tuple[str, int]) -> tuple[int, str]:
    return case[1], case[0]


def clusters(run: Run) -> list[list[str]]:
    """Return the names of cases, those of nearly equal bytes together."""
    groups: list[list[str]] = []
    start = 0.0
    for name, records in run.cases.items():
        num_bytes = records[0]["num_bytes"]
        if num_bytes > start * _CLUSTER:
            groups.append([])
            start = num_bytes
        groups[-1].append(name)
    return groups


def draw(runs: Sequence[Run]) -> Figure:
    """Return the figure, a panel for each run."""
    figure = Figure(figsize=(8.5, 4.4 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _draw_run(axes, run)
    return figure


def _draw_run(axes: Axes, run: Run) -> None:
    axes.set_xscale("log")
    axes.set_ylim(0, 1.12 * max(run.read, run.copy))
    axes.axhline(run.read, color="black", linestyle="--", linewidth=1, label="streaming read")
    axes.axhline(run.copy, color="black", linestyle=":", linewidth=1.2, label="copy, read + write")
    for names in clusters(run):
        width = min(_CASE_WIDTH, _CLUSTER_WIDTH / len(names))
        for i, name in enumerate(names):
            _draw_case(axes, run.cases[name], width * (i - (len(names) - 1) / 2), width)
        _label(axes, run, names)
    for style in _STYLES.values():
        axes.plot([], [], linestyle="none", **style)  # the legend's, in an order of its own
    axes.margins(x=0.12)
    axes.set_xlabel(
        "bytes that must be moved (cases of equal bytes side by side, in the order of their names)"
    )
    axes.set_ylabel("GB/s")
    axes.set_title(f"Decode on {run.card}, jitattn at {run.commit[:12]}", fontsize=10)
    axes.grid(alpha=0.25)
    share = axes.secondary_yaxis("right", functions=_share_of(run.copy))
    share.set_ylabel("% of the copy")
    axes.legend(loc="best", fontsize=8, framealpha=0.9)


def _share_of(limit: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the way from GB/s to a percentage of ``limit``, and back."""
    return (lambda y: 100 * y / limit), (lambda share: share * limit / 100)


def _draw_case(axes: Axes, records: Sequence[Record], shift: float, width: float) -> None:
    """Draw everyone's point, side by side within ``width``, ``shift`` beside their bytes."""
    names = list(_STYLES)
    for record in records:
        style = {key: v for key, v in _STYLES[record["contender"]].items() if key != "label"}
        place = names.index(record["contender"]) / (len(names) - 1) - 0.5
        axes.plot(
            record["num_bytes"] * math.exp(shift + 0.6 * width * place),
            record["gb_per_s"],
            linestyle="none",
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.5,
            **style,
        )


def _label(axes: Axes, run: Run, names: Sequence[str]) -> None:
    """Write the names of a cluster below its lowest point."""
    records = [record for name in names for record in run.cases[name]]
    shown = [_short(name) for name in names[:_MAX_LABELS]]
    if len(names) > _MAX_LABELS:
        shown.append(f"and {len(names) - _MAX_LABELS} more")
    axes.annotate(
        "\n".join(shown),
        (records[0]["num_bytes"], min(record["gb_per_s"] for record in records)),
        xytext=(0, -8),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=7,
    )


def _short(name: str) -> str:
    for part in _DEFAULTS:
        name = name.replace(part, "", 1)
    return name


def _figure(paths: Sequence[Path], kind: str) -> Figure | None:
    if kind != "decode":
        plot = case_plot.PREFILL if kind == "prefill" else case_plot.MLA
        cards = plot.newest(load(paths, kind))
        return plot.draw(cards) if cards else None
    runs = newest_runs(load(paths))
    return draw(runs) if runs else None


def main(argv: Sequence[str] | None = None) -> int:
    """Write the plot; the exit status is 1 without figures of rivals."""
    parser = make_parser("bench.roofline", __doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True, help="its ending is the format")
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in {"prefill": "prefill", "mla": "latent attention's"}.items():
        add, text = kinds.add_argument, f"plot {what} records"
        add(f"--{kind}", dest="kind", action="store_const", const=kind, default="decode", help=text)
    options = parser.parse_args(argv)
    figure = _figure(options.records, options.kind)
    if figure is None:
        print("no such figures of rivals in these files")
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Fixed ids and no date: the same records give the same file.
    is_svg = options.out.suffix == ".svg"
    with matplotlib.rc_context({"svg.hashsalt": "roofline", "svg.fonttype": "none"}):
        figure.savefig(options.out, dpi=120, metadata={"Date": None} if is_svg else None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
