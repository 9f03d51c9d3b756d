"""Tables of latent attention for people: microseconds beside the floor, rates, ratios, means."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.cases import BASELINE
from bench.ceilings import TensorCeilings
from bench.mla_cases import MLA_GROUPS, MLACase
from bench.report import (
    best_ours_s,
    best_rival,
    console,
    print_mean,
    print_reason,
    ratio,
    short,
    text,
    times,
)
from bench.turns import Result

Rows = Sequence[tuple[MLACase, Sequence[Result]]]


def print_product(limits: TensorCeilings) -> None:
    """Print the card's ceiling that only products have."""
    console().print(f"product of matrices {limits.product / 1e12:.0f} TFLOP/s (bfloat16)")


def print_case(
    case: MLACase, method: str, results: Sequence[Result], limits: TensorCeilings
) -> None:
    """Print one case as soon as it is done: a long run that is cut off has shown its figures."""
    out = console()
    cells = [f"{result.contender} {_figure(result)}" for result in results]
    floor = f"floor {case.floor_s(limits) * 1e6:.1f} us"
    out.print(f"{case.name} ({method}): {floor}; " + "; ".join(cells), markup=False)
    for result in results:
        print_reason(result)
        if result.facts.get("same_bits_as_shared") is False:
            out.print(f"    {result.contender}: some bits differ from {BASELINE}'s")
    for key, title in {"event_median_s": "alone", "plan_s": "plan"}.items():
        known = [(r.contender, r.facts[key]) for r in results if key in r.facts]
        if known:
            line = "; ".join(f"{name} {_us(seconds)}" for name, seconds in known)
            out.print(f"    {title}: {line}", markup=False)


def _figure(result: Result) -> str:
    return _us(result.timing.median_s) if result.timing else result.status


def _us(seconds: object) -> str:
    return f"{seconds * 1e6:.1f} us" if isinstance(seconds, float) else "-"


def print_tables(rows: Rows, limits: TensorCeilings) -> None:
    """Print a table for each group of cases, with geometric mean and lowest of its ratios.

    Where rivals took part in several groups, the ratios of all of them, too.
    """
    beside = [(case, results) for case, results in rows if MLA_GROUPS[case.group].has_rivals]
    for group in dict.fromkeys(case.group for case, _ in rows):
        of_group = [(case, results) for case, results in rows if case.group == group]
        if MLA_GROUPS[group].has_rivals:
            _print_beside_rivals(group, of_group, limits)
        else:
            _print_ways(group, of_group, limits)
    if len({case.group for case, _ in beside}) > 1:
        _print_gains("all", beside)
    _print_forms(rows)


def _print_beside_rivals(group: str, rows: Rows, limits: TensorCeilings) -> None:
    columns = ("best rival", "rival / jitattn", "separate / shared")
    names = _names(rows)
    table = _table(group, names, columns)
    for case, results in rows:
        rival, medians = best_rival(results), times(results)
        table.add_row(
            *_measured(case, results, names, limits),
            rival[0] if rival else "-",
            text(_gain(results)),
            text(ratio(medians.get("jitattn-separate"), medians.get(BASELINE))),
        )
    console().print(table)
    _print_gains(group, rows)


def _print_gains(title: str, rows: Rows) -> None:
    print_mean(f"{title}: best rival / jitattn", [_gain(results) for _, results in rows])


def _gain(results: Sequence[Result]) -> float | None:
    rival = best_rival(results)
    return ratio(rival[1] if rival else None, best_ours_s(results))


def _print_ways(group: str, rows: Rows, limits: TensorCeilings) -> None:
    """Print the figures of each way and its time over the plain one's."""
    names = _names(rows)
    others = [name for name in names if name != BASELINE]
    table = _table(group, names, [f"{short(name)} / shared" for name in others])
    for case, results in rows:
        medians = times(results)
        costs = [text(ratio(medians.get(name), medians.get(BASELINE))) for name in others]
        table.add_row(*_measured(case, results, names, limits), *costs)
    console().print(table)


def _print_forms(rows: Rows) -> None:
    """Print the speed over an FP8 cache as a share of that over the 16-bit one."""
    medians = {
        case.name: times(results).get(BASELINE)
        for case, results in rows
        if MLA_GROUPS[case.group].has_rivals
    }
    for case, _ in rows:
        plain = case.name.removesuffix(f"-{case.form}")
        if plain != case.name and (gain := ratio(medians.get(plain), medians.get(case.name))):
            console().print(f"{case.name}: {gain:.3f} x the speed of {plain}", markup=False)


def _table(group: str, names: Sequence[str], columns: Sequence[str]) -> Table:
    table = Table(title=f"{group}: {MLA_GROUPS[group].title}, us")
    table.add_column("case", no_wrap=True)
    rates = ("GB/s of latents", "TFLOP/s", "% of floor")
    for name in ("floor", *map(short, names), *rates, *columns):
        table.add_column(name, justify="right")
    return table


def _measured(
    case: MLACase, results: Sequence[Result], names: Sequence[str], limits: TensorCeilings
) -> list[str]:
    """Return the cells of the case, its floor, every contender, and jitattn's rates.

    The floor says whether bytes or products make it.
    """
    medians = times(results)
    status = {result.contender: result.status for result in results}
    cells = [
        f"{medians[name] * 1e6:.1f}" if name in medians else status.get(name, "-") for name in names
    ]
    kind = "B" if case.is_bound_by_bytes(limits) else "F"
    floor = f"{case.floor_s(limits) * 1e6:.1f} {kind}"
    return [case.name, floor, *cells, *_rates(case, best_ours_s(results), limits)]


def _rates(case: MLACase, seconds: float | None, limits: TensorCeilings) -> tuple[str, str, str]:
    if seconds is None:
        return "-", "-", "-"
    return (
        f"{case.kv_bytes / seconds / 1e9:.0f}",
        f"{case.flop / seconds / 1e12:.0f}",
        f"{100 * case.floor_s(limits) / seconds:.1f}",
    )


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(result.contender for _, results in rows for result in results))
