"""How contenders take part: each is set up and checked, then all take turns at the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from bench.contenders import Prepared, SkipError
from bench.timing import Call, Timer, Timing

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
    except SkipError as reason:
        return Entry(Result(name, "skipped", str(reason)))
    except WrongError as reason:
        return Entry(Result(name, "wrong", str(reason)))
    except Exception as reason:  # a rival may raise anything, and the others still have their turn
        return Entry(Result(name, "failed", f"{type(reason).__name__}: {reason}"))
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
    """Time everyone that was set up, ``method.rounds`` times one after the other."""
    for _ in range(method.rounds):
        for entry in entries:
            if entry.call is not None:
                samples = timer.samples(entry.call)
                entry.samples += [seconds / method.num_runs for seconds in samples]
