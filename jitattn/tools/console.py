"""Output of the command line: tables drawn with rich, JSON, and errors of usage."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from jitattn.base import knobs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_PIPE_WIDTH = 240  # of tables that go to a file or a pipe, where no terminal says how wide to be


class UsageError(Exception):
    """The command line, or the environment, asks for something that makes no sense."""


def load_knobs() -> knobs.Knobs:
    """Read the environment.

    Raises:
        UsageError: a variable makes no sense.
    """
    try:
        return knobs.load()
    except ValueError as error:
        raise UsageError(error) from error


def make_console() -> Console:
    """Return a console as wide as the terminal, or as a table in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def make_table(console: Console, title: str, *columns: str) -> Table:
    """Print a title and return an empty table."""
    from rich.table import Table

    console.print(
        title, style="bold", markup=False
    )  # as a table's own title it would wrap at its width
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_json(value: object) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
