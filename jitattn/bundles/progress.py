"""Progress on stderr: a bar in a terminal, and elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str, bool], None]
"""Counts a kernel, given its name and whether it failed."""

LINE_S = 5.0
"""Between two lines."""


@contextmanager
def show_progress(total: int, show: bool) -> Iterator[Advance]:
    """Yield what counts kernels, of which there are ``total``."""
    if not show:
        yield lambda name, failed: None
    elif sys.stderr.isatty():
        with _bar(total) as advance:
            yield advance
    else:
        with _lines(total) as advance:
            yield advance


@contextmanager
def _lines(total: int) -> Iterator[Advance]:
    started = time.monotonic()
    done = num_failed = 0
    last = ""
    ended = threading.Event()

    def advance(name: str, failed: bool) -> None:
        nonlocal done, num_failed, last
        done, num_failed, last = done + 1, num_failed + failed, name

    def line() -> str:
        failed = f", {num_failed} failed" if num_failed else ""
        name = f", {last}" if last else ""
        return f"jitattn: {done}/{total} kernels, {time.monotonic() - started:.0f} s{failed}{name}"

    def say() -> None:
        while not ended.wait(LINE_S):
            _write(line())

    # Not waited for when the process ends.
    speaker = threading.Thread(target=say, name="jitattn-progress", daemon=True)
    speaker.start()
    try:
        yield advance
    finally:
        ended.set()
        speaker.join()
        _write(line())


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def _bar(total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # names of kernels are long
    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}{task.fields[now]}", table_column=rest),
    )
    with Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task("kernels", total=total, now="", failed="")
        num_failed = 0

        def advance(name: str, failed: bool) -> None:
            nonlocal num_failed
            num_failed += failed
            shown = f"{num_failed} failed  " if num_failed else ""
            bar.update(task, advance=1, now=name, failed=shown)

        yield advance
