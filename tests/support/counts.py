"""How many random examples a module of tests has run, said at its end."""

from __future__ import annotations

import time
from typing import Self

import pytest


class Counts:
    """A number that grows, and is written to the terminal when the module is done."""

    def __init__(self, request: pytest.FixtureRequest, what: str) -> None:
        self.number, self._what, self._started = 0, what, time.monotonic()
        self._reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def add(self, number: int) -> None:
        self.number += number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reporter is not None:
            seconds = time.monotonic() - self._started
            self._reporter.ensure_newline()
            self._reporter.write_line(f"{self.number} {self._what} in {seconds:.0f} s")
