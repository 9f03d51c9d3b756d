"""Tables for people. The JSON records are the result; this is how they look on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.ceilings import Ceilings
from bench.workloads import Case

if TYPE_CHECKING:
    from bench.bench_decode import Result

_OURS = "jitattn-"
_WIDTH = 160


def console() -> Console:
    """Return a console that is wide enough for every table, also when it is no terminal."""
    return Console(width=_WIDTH, highlight=False)


def print_head(env: Mapping[str, object], limits: Ceilings) -> None:
    """Print where the figures come from and the ceilings of the card."""
    out = console()
    for name in ("card", "driver", "cuda", "torch", "jitattn", "compiler", "commit"):
        out.print(f"{name:10} {env[name]}", markup=False)
    rivals = env["rivals"]
    if isinstance(rivals, Mapping):
        for name, version in rivals.items():
            out.print(f"{name:17} {version}", markup=False)
    out.print(
        f"copy {limits.copy / 1e9:.0f} GB/s (read + write), "
        f"streaming read {limits.read / 1e9:.0f} GB/s ({limits.read_method})"
    )


def print_case(case: Case, method: str, results: Sequence[Result]) -> None:
    """Print one case as soon as it is done: a long run that is cut off has shown its figures."""
    cells = []
    for result in results:
        text = f"{result.timing.median_s * 1e6:.1f} us" if result.timing else result.status
        cells.append(f"{result.contender} {text}")
    out = console()
    out.print(f"{case.name} ({method}): " + "; ".join(cells), markup=False)
    for result in results:
        if result.reason:
            out.print(f"    {result.contender}: {result.reason[:400]}", markup=False)
        if result.facts.get("same_bits_for_both_tables") is False:
            out.print(f"    {result.contender}: shared and separate tables differ in some bits")


def best_rival_s(results: Sequence[Result]) -> float | None:
    """Return the median of the fastest rival that was timed."""
    times = [r.timing.median_s for r in results if r.timing and not r.contender.startswith(_OURS)]
    return min(times, default=None)


def best_ours_s(results: Sequence[Result]) -> float | None:
    """Return jitattn's median: the shared table's where it was timed."""
    for name in ("jitattn-shared", "jitattn-separate"):
        for result in results:
            if result.contender == name and result.timing:
                return result.timing.median_s
    return None


def print_table(rows: Sequence[tuple[Case, Sequence[Result]]], limits: Ceilings) -> None:
    """Print every case: microseconds, bandwidth, share of the copy, ratio to the best rival."""
    names = list(dict.fromkeys(result.contender for _, results in rows for result in results))
    table = Table(title="decode, us; GB/s and ratios are those of jitattn with a shared table")
    table.add_column("case", no_wrap=True)
    for name in ("floor", *names, "GB/s", "% copy", "best rival / jitattn", "separate / shared"):
        table.add_column(name, justify="right")
    for case, results in rows:
        table.add_row(*_row(case, results, names, limits))
    out = console()
    out.print(table)
    gains = [_ratio(best_rival_s(results), best_ours_s(results)) for _, results in rows]
    known = [gain for gain in gains if gain is not None]
    if known:
        mean = statistics.geometric_mean(known)
        out.print(f"best rival / jitattn: geometric mean {mean:.3f}, lowest {min(known):.3f}")


def _row(
    case: Case, results: Sequence[Result], names: Sequence[str], limits: Ceilings
) -> list[str]:
    times = {r.contender: r.timing.median_s for r in results if r.timing}
    status = {r.contender: r.status for r in results}
    cells = [case.name, f"{case.floor_s(limits.read) * 1e6:.1f}"]
    for name in names:
        cells.append(f"{times[name] * 1e6:.1f}" if name in times else status.get(name, "-"))
    ours = best_ours_s(results)
    if ours is None:
        return [*cells, "-", "-", "-", "-"]
    bandwidth = case.num_bytes / ours
    separate = _ratio(times.get("jitattn-separate"), times.get("jitattn-shared"))
    return [
        *cells,
        f"{bandwidth / 1e9:.0f}",
        f"{100 * bandwidth / limits.copy:.1f}",
        _text(_ratio(best_rival_s(results), ours)),
        _text(separate),
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None else None


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
