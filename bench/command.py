"""What benches of attention have in common: options, records and the exit status."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from bench import records
from bench.options import cuda_device, make_parser
from bench.timing import L2Flush, L2Policy, Timer, l2_bytes
from bench.turns import Competitor, Method, Result, version_of
from bench.workloads import num_copies

ContenderT = TypeVar("ContenderT", bound=Competitor[Any])


class Named(Protocol):
    """A case of a group."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> str: ...


def result_record(
    kind: str,
    result: Result,
    case: Named,
    method: Method,
    l2: L2Policy,
    env: Mapping[str, object],
    facts: Mapping[str, object],
    rates: Callable[[float], Mapping[str, object]],
) -> dict[str, object]:
    """Return the JSON record of one result: ``facts`` of its case, ``rates`` of its median."""
    figures: dict[str, object] = {}
    if result.timing is not None:
        figures = {**dataclasses.asdict(result.timing), **rates(result.timing.median_s)}
    return records.of_result(
        kind,
        env,
        case.name,
        result,
        group=case.group,
        method=method.kind,
        num_runs=method.num_runs,
        l2_policy=l2.value,
        error=result.error,
        **facts,
        **figures,
        **result.facts,
    )


def parse(
    argv: Sequence[str] | None,
    *,
    program: str,
    description: str | None,
    names: Sequence[str],
    select: Callable[[str], object],
    runs: int,
    named_only: Collection[str] = (),
) -> argparse.Namespace:
    """Return the options of a comparison of the contenders ``names``.

    Those ``named_only`` run where they are asked for. ``select`` raises ValueError for cases that
    aren't there.
    """
    parser = make_parser(program, description)
    default = ",".join(name for name in names if name not in named_only)
    but = f"all but {', '.join(named_only)}" if named_only else "all"
    add = parser.add_argument
    add("--cases", default="figures", help="groups and name patterns, comma-separated")
    add("--contenders", default=default, help=f"of {','.join(names)}; default: {but}")
    add("--method", choices=("auto", "graph", "events"), default="auto")
    add("--runs", type=int, default=runs, help="runs inside a graph")
    add("--rounds", type=int, default=3, help="turns of every contender")
    add("--repeats", type=int, default=20, help="timed calls a turn")
    add("--l2", type=L2Policy, default=L2Policy.WRITE, help="write, read or keep")
    add("--table", action="store_true", help="print the tables at the end")
    add("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    check_names(parser, "contender", options.contenders, names)
    try:
        select(options.cases)
    except ValueError as error:
        parser.error(str(error))
    return options


@dataclass(frozen=True)
class Comparison(Generic[ContenderT]):
    """A comparison as its command line asks for it.

    Attributes:
        chosen: the contenders that are asked for.
        groups: of cases, by name; they say who is measured on them.
        env: what the records say of this machine.
    """

    options: argparse.Namespace
    device: torch.device
    chosen: Sequence[ContenderT]
    groups: Mapping[str, Any]
    env: dict[str, object]
    timer: Timer

    def of_group(self, case: Named) -> list[ContenderT]:
        """Return those that are measured on the cases of the group of ``case``."""
        return [c for c in self.chosen if c.name in self.groups[case.group].contenders]

    def num_copies(self, method: Method, kv_bytes: int) -> int:
        """Return the pools that runs take turns with, so that none finds its own in L2."""
        if method.num_runs == 1:
            return 1
        return num_copies(kv_bytes, l2_bytes(self.device), self.options.runs)


def comparison(
    argv: Sequence[str] | None,
    contenders: Sequence[ContenderT],
    groups: Mapping[str, Any],
    *,
    program: str,
    **others: Any,
) -> Comparison[ContenderT]:
    """Return the comparison that is asked for; ``others`` are arguments of ``parse``."""
    names = [contender.name for contender in contenders]
    options = parse(argv, program=f"bench.{program}", names=names, **others)
    device = cuda_device(program)
    chosen = [c for c in contenders if c.name in options.contenders.split(",")]
    env = records.environment({c.name: version_of(c) for c in chosen})
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    return Comparison(options, device, chosen, groups, env, timer)


def check_names(
    parser: argparse.ArgumentParser, what: str, given: str, known: Sequence[str]
) -> None:
    """Refuse comma-separated names that aren't ``known``."""
    if unknown := set(given.split(",")) - set(known):
        parser.error(f"no {what} {', '.join(sorted(unknown))}; there are {', '.join(known)}")


def status_of(results: Iterable[Sequence[Result]]) -> int:
    """Return the exit status: 1 when an output was wrong."""
    return int(any(result.status == "wrong" for of_case in results for result in of_case))
