"""How contenders take part: each is set up and checked, then all take turns at the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from bench.cases import BASELINE
from bench.contenders import Prepared, SkipError
from bench.timing import GRAPH_BELOW_S, Call, Timer, Timing, summarize

Subject = TypeVar("Subject", contravariant=True)


class WrongError(Exception):
    """An output is not the reference's."""


@dataclass(frozen=True)
class Result:
    """What came of one contender on one case.

    Attributes:
        contender: its name.
        status: "timed", "skipped" (absent or refused), "failed" (raised) or "wrong".
        reason: why it wasn't timed.
        timing: seconds per run; None unless timed.
        error: largest relative error against the reference.
        facts: how it was planned, kernels and the like.
    """

    contender: str
    status: str
    reason: str = ""
    timing: Timing | None = None
    error: float | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


def stopped(contender: str, reason: Exception) -> Result:
    """Return what came of a contender that raised."""
    if isinstance(reason, SkipError | WrongError):
        status = "skipped" if isinstance(reason, SkipError) else "wrong"
        return Result(contender, status, str(reason))
    return Result(contender, "failed", f"{type(reason).__name__}: {reason}")


@dataclass(frozen=True)
class Method:
    """How a case is timed, the same for everyone.

    Attributes:
        kind: "graph" or "events".
        num_runs: runs inside a graph; 1 between a pair of events.
        rounds: turns that every contender gets.
    """

    kind: str
    num_runs: int
    rounds: int


@dataclass
class Entry:
    """A contender on its way through a case."""

    result: Result
    prepared: Prepared | None = None
    call: Call | None = None
    samples: list[float] = field(default_factory=list)


class Checker(Protocol):
    """Knows the right answer."""

    limit: float

    def error(self, outs: Tensor) -> float:
        """Return the largest relative error of ``outs``."""


class Competitor(Protocol[Subject]):
    """A contender, of whatever it computes."""

    name: str

    def version(self) -> str:
        """Return its version, or raise SkipError."""

    def prepare(self, subject: Subject, /) -> Prepared:
        """Compile, plan and bind, or raise SkipError."""


def version_of(contender: Competitor[Subject]) -> str:
    """Return the version of a contender, or the reason of its absence."""
    try:
        return contender.version()
    except Exception as error:  # the reason is the record
        return f"absent: {error}"


def set_up(
    contender: Competitor[Subject],
    subject: Subject,
    method: Method,
    timer: Timer,
    oracle: Checker,
) -> Entry:
    """Prepare and check one contender; whatever it raises becomes its result."""
    name = contender.name
    try:
        contender.version()
        prepared = contender.prepare(subject)
        error = check(prepared, prepared.runs, oracle)
        call: Call = prepared.runs[0]
        if method.kind == "graph":
            call = timer.capture(prepared.plan, prepared.runs, method.num_runs)
            error = max(error, check(prepared, [call], oracle))
    except Exception as reason:  # a rival may raise anything, and the others still have their turn
        return Entry(stopped(name, reason))
    result = Result(name, "timed", error=error, facts=prepared.facts)
    return Entry(result, prepared, call)


def check(prepared: Prepared, calls: Sequence[Call], oracle: Checker) -> float:
    """Return the error of what ``calls`` write over NaN, or raise WrongError."""
    prepared.outs.fill_(float("nan"))
    for call in calls:
        call()
    error = oracle.error(prepared.outs)
    if error > oracle.limit:
        raise WrongError(f"relative error {error:.1e}, at most {oracle.limit:.0e} is right")
    return error


def take_turns(entries: Sequence[Entry], method: Method, timer: Timer) -> None:
    """Time everyone that was set up, ``method.rounds`` times one after the other.

    Whoever raises is not timed, nor asked again: after a fault on the device that is everyone, and
    the reasons are still recorded.
    """
    for _ in range(method.rounds):
        for entry in entries:
            if entry.call is None:
                continue
            try:
                samples = timer.samples(entry.call)
            except Exception as reason:
                entry.result = stopped(entry.result.contender, reason)
                entry.prepared = entry.call = None
                continue
            entry.samples += [seconds / method.num_runs for seconds in samples]


def choose_method(floor_s: float, kind: str, num_runs: int, rounds: int) -> Method:
    """Return how to time a case.

    Args:
        floor_s: seconds that nobody stays under.
        kind: "graph", "events", or "auto": a graph where the floor is under 100 us.
        num_runs: runs inside a graph.
        rounds: turns of every contender.
    """
    if kind == "auto":
        kind = "graph" if floor_s < GRAPH_BELOW_S else "events"
    return Method(kind, num_runs if kind == "graph" else 1, rounds)


def compare(
    subject: Subject,
    contenders: Sequence[Competitor[Subject]],
    method: Method,
    timer: Timer,
    oracle: Checker,
    others: Mapping[str, Checker] | None = None,
) -> list[Result]:
    """Check every contender, time those that are right, in turns, and check them again.

    ``others`` are the oracles of contenders that compute something else, by their names.
    """
    checkers = {c.name: (others or {}).get(c.name, oracle) for c in contenders}
    entries = [set_up(c, subject, method, timer, checkers[c.name]) for c in contenders]
    take_turns(entries, method, timer)
    alone = _time_alone(entries, method, timer) if method.kind == "graph" else {}
    results = [_finish(entry, checkers[entry.result.contender], timer) for entry in entries]
    outs = {entry.result.contender: entry.prepared.outs for entry in entries if entry.prepared}
    return [
        dataclasses.replace(result, facts={**result.facts, **_more_facts(result, alone, outs)})
        for result in results
    ]


def _more_facts(
    result: Result, alone: Mapping[str, Sequence[float]], outs: Mapping[str, Tensor]
) -> dict[str, object]:
    """Return what is known beside the method's own figure."""
    name = result.contender
    facts: dict[str, object] = {}
    if result.timing and name in alone:
        facts["event_median_s"] = summarize(alone[name]).median_s
    is_variant = name.startswith("jitattn-") and name != BASELINE
    if result.timing and is_variant and BASELINE in outs:
        facts["same_bits_as_shared"] = torch.equal(outs[name], outs[BASELINE])
    return facts


def _time_alone(entries: Sequence[Entry], method: Method, timer: Timer) -> dict[str, list[float]]:
    """Return the seconds of single runs between events, of those that graphs are timed of."""
    alone = [
        Entry(entry.result, entry.prepared, entry.prepared.runs[0])
        for entry in entries
        if entry.prepared is not None
    ]
    take_turns(alone, dataclasses.replace(method, kind="events", num_runs=1), timer)
    return {entry.result.contender: entry.samples for entry in alone if entry.call is not None}


def _finish(entry: Entry, oracle: Checker, timer: Timer) -> Result:
    """Check once more, since a rival that reuses its plan may have skipped work, and sum up."""
    result, prepared, call = entry.result, entry.prepared, entry.call
    if prepared is None or call is None:
        return result
    facts = dict(result.facts)
    try:
        error = check(prepared, [call], oracle)
        if prepared.plan is not None and prepared.plan_is_a_call:
            facts["plan_s"] = summarize(timer.samples(prepared.plan)).median_s
    except WrongError as reason:
        return dataclasses.replace(result, status="wrong", reason=f"after it was timed: {reason}")
    except Exception as reason:
        return stopped(result.contender, reason)
    error = max(error, result.error or 0.0)
    timing = summarize(entry.samples)
    return dataclasses.replace(result, timing=timing, error=error, facts=facts)
