"""Prefill tables for people: microseconds, TFLOP/s of unmasked work, ratios and their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from bench.cases import BASELINE
from bench.prefill_cases import CONTIGUOUS, PREFILL_GROUPS, PREFILL_RIVALS, PrefillCase
from bench.report import console, print_mean, print_reason, ratio, short, text, times
from bench.turns import Result

Rows = Sequence[tuple[PrefillCase, Sequence[Result]]]

_E4M3 = "-e4m3"  # ends the name of a case that is another's with an 8-bit cache


def print_case(case: PrefillCase, method: str, results: Sequence[Result]) -> None:
    """Print one case as soon as it is done: a long run that is cut off has shown its figures."""
    out = console()
    cells = [f"{result.contender} {_figure(case, result)}" for result in results]
    out.print(f"{case.name} ({method}): " + "; ".join(cells), markup=False)
    for result in results:
        print_reason(result)
    extra = {"event_median_s": "alone", "plan_s": "plan"}
    for key, title in extra.items():
        known = [(r.contender, r.facts[key]) for r in results if key in r.facts]
        if known:
            line = "; ".join(f"{name} {_us(seconds)}" for name, seconds in known)
            out.print(f"    {title}: {line}", markup=False)


def _figure(case: PrefillCase, result: Result) -> str:
    if result.timing is None:
        return result.status
    seconds = result.timing.median_s
    return f"{_us(seconds)}, {case.flop / seconds / 1e12:.0f} TFLOP/s"


def _us(seconds: object) -> str:
    return f"{seconds * 1e6:.1f} us" if isinstance(seconds, float) else "-"


def ratios(results: Sequence[Result]) -> dict[str, tuple[float | None, str]]:
    """Return how many times as fast as others jitattn is, with whom it is compared.

    Those are the best rival over pages, and FlashAttention-3 with and without pages.
    """
    medians = times(results)
    ours = medians.get(BASELINE)
    paged = {
        name: seconds
        for name, seconds in medians.items()
        if not name.startswith("jitattn-") and name != CONTIGUOUS
    }
    best = min(paged, key=paged.__getitem__, default="-")
    return {
        "best paged rival": (ratio(paged.get(best), ours), best),
        "fa3-paged": (ratio(medians.get("fa3-paged"), ours), ""),
        CONTIGUOUS: (ratio(medians.get(CONTIGUOUS), ours), ""),
    }


def print_tables(rows: Rows) -> None:
    """Print a table for each group of cases, with geometric mean and lowest of its ratios."""
    for group in dict.fromkeys(case.group for case, _ in rows):
        of_group = [(case, results) for case, results in rows if case.group == group]
        if _has_prefill_rivals(group):
            _print_beside_rivals(group, of_group)
        else:
            _print_ways(group, of_group)
    _print_e4m3(rows)


def _has_prefill_rivals(group: str) -> bool:
    """Return whether all rivals of prefill alone are measured in a group."""
    return set(PREFILL_RIVALS) <= set(PREFILL_GROUPS[group].contenders)


def _print_beside_rivals(group: str, rows: Rows) -> None:
    names = _names(rows)
    table = _table(group, names)
    for title in ("best paged", "it / ours", "fa3-paged / ours", f"{CONTIGUOUS} / ours"):
        table.add_column(title, justify="right")
    for case, results in rows:
        compared = ratios(results)
        (best, rival), *others = compared.values()
        cells = [rival, text(best), *(text(value) for value, _ in others)]
        table.add_row(case.name, *_cells(case, results, names), *cells)
    console().print(table)
    for title in ratios([]):
        print_mean(f"{group}: {title} / jitattn", [ratios(r)[title][0] for _, r in rows])


def _print_ways(group: str, rows: Rows) -> None:
    """Print the figures of each contender and its time over the plain way's."""
    names = _names(rows)
    table = _table(group, names)
    others = [name for name in names if name != BASELINE]
    for name in others:
        table.add_column(f"{short(name)} / shared", justify="right")
    for case, results in rows:
        medians = times(results)
        costs = [text(ratio(medians.get(name), medians.get(BASELINE))) for name in others]
        table.add_row(case.name, *_cells(case, results, names), *costs)
    console().print(table)


def _print_e4m3(rows: Rows) -> None:
    """Print the speed over an 8-bit cache as a share of that over the 16-bit one."""
    medians: Mapping[str, float | None] = {
        case.name: times(results).get(BASELINE)
        for case, results in rows
        if _has_prefill_rivals(case.group)
    }
    for name, seconds in medians.items():
        plain = name.removesuffix(_E4M3)
        if plain != name and (gain := ratio(medians.get(plain), seconds)):
            console().print(f"{name}: {gain:.3f} x the speed of {plain}", markup=False)


def _table(group: str, names: Sequence[str]) -> Table:
    table = Table(title=f"{group}: {PREFILL_GROUPS[group].title}, us (TFLOP/s)")
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(short(name), justify="right")
    return table


def _cells(case: PrefillCase, results: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Return the cell of every contender."""
    medians = times(results)
    status = {result.contender: result.status for result in results}
    return [
        f"{medians[name] * 1e6:.1f} ({case.flop / medians[name] / 1e12:.0f})"
        if name in medians
        else status.get(name, "-")
        for name in names
    ]


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(result.contender for _, results in rows for result in results))
