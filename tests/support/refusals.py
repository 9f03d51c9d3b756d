"""Calls of functions that have many arguments, and what they say of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

Call = Callable[..., object]


class Nonsense:
    """What no argument may be."""


def check_refused(call: Call, changes: dict[str, object], match: str) -> None:
    """Raise an error that says what is wanted instead."""
    with pytest.raises((TypeError, ValueError), match=match):
        call(**changes)


def refusals(cases: Sequence[tuple[Call, dict[str, object], str]]) -> pytest.MarkDecorator:
    """The parameters of a test of ``check_refused``."""
    names = "call", "changes", "match"
    return pytest.mark.parametrize(names, cases, ids=lambda x: getattr(x, "__name__", ""))


def check_not_ignored(call: Call, name: str) -> None:
    """An argument, or one of a method: "plan.q"; what it can't be is refused by its name."""
    check_refused(call, {name: Nonsense()}, rf"\b{name.rpartition('.')[2]}\b")


def names_of(parameter: object) -> str:
    """The id of a parameter: a function by its name, a name by itself, others by number."""
    return parameter if isinstance(parameter, str) else getattr(parameter, "__name__", "")
