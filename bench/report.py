"""Tables for people. The JSON records are the result; this is how they look on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.cases import BASELINE, GROUPS
from bench.ceilings import Ceilings
from bench.workloads import Case

if TYPE_CHECKING:
    from bench.turns import Result

_OURS = "jitattn-"
_WIDTH = 200


def console() -> Console:
    """Return a console that is wide enough for every table, also when it is no terminal."""
    return Console(width=_WIDTH, highlight=False)


def print_head(env: Mapping[str, object], limits: Ceilings | None = None) -> None:
    """Print where the figures come from and, where they were measured, the card's ceilings."""
    out = console()
    for name in ("card", "driver", "cuda", "torch", "jitattn", "compiler", "commit"):
        out.print(f"{name:10} {env[name]}", markup=False)
    rivals = env["rivals"]
    if isinstance(rivals, Mapping):
        for name, version in rivals.items():
            out.print(f"{name:17} {version}", markup=False)
    if limits is None:
        return
    out.print(
        f"copy {limits.copy / 1e9:.0f} GB/s (read + write), "
        f"streaming read {limits.read / 1e9:.0f} GB/s ({limits.read_method})"
    )


def print_reason(result: Result) -> None:
    """Print why a contender has no figures, if it has none."""
    if result.reason:
        console().print(f"    {result.contender}: {result.reason[:400]}", markup=False)


def print_case(case: Case, method: str, results: Sequence[Result]) -> None:
    """Print one case as soon as it is done: a long run that is cut off has shown its figures."""
    cells = []
    for result in results:
        figure = f"{result.timing.median_s * 1e6:.1f} us" if result.timing else result.status
        cells.append(f"{result.contender} {figure}")
    out = console()
    out.print(f"{case.name} ({method}): " + "; ".join(cells), markup=False)
    for result in results:
        print_reason(result)
        if result.facts.get("same_bits_as_shared") is False:
            out.print(f"    {result.contender}: some bits differ from jitattn-shared's")


Rows = Sequence[tuple[Case, Sequence["Result"]]]


def best_rival(results: Sequence[Result]) -> tuple[str, float] | None:
    """Return name and median of the fastest rival that was timed."""
    medians = [
        (result.timing.median_s, result.contender)
        for result in results
        if result.timing and not result.contender.startswith(_OURS)
    ]
    seconds, name = min(medians, default=(None, ""))
    return None if seconds is None else (name, seconds)


def best_ours_s(results: Sequence[Result]) -> float | None:
    """Return jitattn's median: the shared table's where it was timed."""
    medians = times(results)
    return medians.get("jitattn-shared", medians.get("jitattn-separate"))


def print_tables(rows: Rows, limits: Ceilings) -> None:
    """Print a table for each group of cases, with geometric mean and lowest of its ratios."""
    for group in dict.fromkeys(case.group for case, _ in rows):
        of_group = [(case, results) for case, results in rows if case.group == group]
        if GROUPS[group].has_rivals:
            _print_beside_rivals(group, of_group, limits)
        else:
            _print_variants(group, of_group, limits)


def _print_beside_rivals(group: str, rows: Rows, limits: Ceilings) -> None:
    """Print microseconds, bandwidth, share of the copy, ratio to the best rival."""
    names = _names(rows)
    columns = ("GB/s", "% copy", "best rival", "rival / jitattn", "separate / shared")
    table = _table(f"{group}: {GROUPS[group].title}, us", names, columns)
    for case, results in rows:
        rival, ours, medians = best_rival(results), best_ours_s(results), times(results)
        table.add_row(
            *_measured(case, results, names, limits),
            *_bandwidth(case, ours, limits),
            rival[0] if rival else "-",
            text(ratio(rival[1] if rival else None, ours)),
            text(ratio(medians.get("jitattn-separate"), medians.get("jitattn-shared"))),
        )
    console().print(table)
    gains = [
        ratio(rival[1], best_ours_s(results))
        for _, results in rows
        if (rival := best_rival(results))
    ]
    print_mean(f"{group}: best rival / jitattn", gains)


def _print_variants(group: str, rows: Rows, limits: Ceilings) -> None:
    """Print microseconds and the time of each variant over the plain one's."""
    if GROUPS[group].against:
        _print_against(group, rows, limits)
        return
    names = _names(rows)
    variants = [name for name in names if name != BASELINE]
    ratios = [f"{short(name)} / shared" for name in variants]
    table = _table(f"{group}: {GROUPS[group].title}, us", names, ("GB/s", "% copy", *ratios))
    for case, results in rows:
        ours = times(results).get(BASELINE)
        table.add_row(
            *_measured(case, results, names, limits),
            *_bandwidth(case, ours, limits),
            *(text(ratio(times(results).get(name), ours)) for name in variants),
        )
    console().print(table)
    for name, title in zip(variants, ratios, strict=True):
        medians = [times(results) for _, results in rows]
        costs = [ratio(each.get(name), each.get(BASELINE)) for each in medians]
        print_mean(f"{group}: {title}", costs)


def _print_against(group: str, rows: Rows, limits: Ceilings) -> None:
    """Print microseconds, the share of the streaming read, the speed as a multiple of a case's."""
    names, against = _names(rows), GROUPS[group].against
    other = next((best_ours_s(results) for case, results in rows if case.name == against), None)
    columns = ("MB", "GB/s", "% copy", "% read", f"speed / {against}'s")
    table = _table(f"{group}: {GROUPS[group].title}, us", names, columns)
    for case, results in rows:
        ours = best_ours_s(results)
        share = ratio(case.floor_s(limits.read), ours)
        table.add_row(
            *_measured(case, results, names, limits),
            f"{case.num_bytes / 1e6:.0f}",
            *_bandwidth(case, ours, limits),
            "-" if share is None else f"{100 * share:.1f}",
            text(ratio(other, ours)),
        )
    console().print(table)


def _table(title: str, names: Sequence[str], columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("case", no_wrap=True)
    for name in ("floor", *map(short, names), *columns):
        table.add_column(name, justify="right")
    return table


def short(name: str) -> str:
    """Return the name of a contender as a column has it."""
    return name.removeprefix(_OURS)


def _measured(
    case: Case, results: Sequence[Result], names: Sequence[str], limits: Ceilings
) -> list[str]:
    """Return the cells of the case, its floor and every contender."""
    medians = times(results)
    status = {result.contender: result.status for result in results}
    cells = [
        f"{medians[name] * 1e6:.1f}" if name in medians else status.get(name, "-") for name in names
    ]
    return [case.name, f"{case.floor_s(limits.read) * 1e6:.1f}", *cells]


def _bandwidth(case: Case, seconds: float | None, limits: Ceilings) -> tuple[str, str]:
    """Return GB/s and the percentage of the copy's."""
    if seconds is None:
        return "-", "-"
    bandwidth = case.num_bytes / seconds
    return f"{bandwidth / 1e9:.0f}", f"{100 * bandwidth / limits.copy:.1f}"


def print_mean(title: str, ratios: Sequence[float | None]) -> None:
    """Print geometric mean, lowest and highest of the ratios that are known."""
    known = [ratio for ratio in ratios if ratio is not None]
    if known:
        mean = statistics.geometric_mean(known)
        console().print(
            f"{title}: geometric mean {mean:.3f}, lowest {min(known):.3f}, "
            f"highest {max(known):.3f}, {len(known)} cases"
        )


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(result.contender for _, results in rows for result in results))


def times(results: Sequence[Result]) -> dict[str, float]:
    """Return the median of everyone who was timed."""
    return {r.contender: r.timing.median_s for r in results if r.timing}


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b where both are known."""
    return a / b if a is not None and b is not None else None


def text(value: float | None) -> str:
    """Return a ratio as a cell."""
    return "-" if value is None else f"{value:.3f}"
