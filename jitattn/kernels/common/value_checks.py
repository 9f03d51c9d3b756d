"""Checks of what tensors hold, which wait for the device: JITATTN_CHECK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jitattn.base import knobs
from jitattn.tensors.page_tables import BlockTable, CsrPages, TokenTable

PagedTable = BlockTable | TokenTable | CsrPages
"""The tables that list pages or slots."""


def asks_for_checks() -> bool:
    """Whether JITATTN_CHECK is set: then calls that aren't captured look at what tensors hold."""
    return knobs.load().check


@contextmanager
def checking() -> Iterator[None]:
    """Say that what is refused here was looked at because of JITATTN_CHECK."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"JITATTN_CHECK: {error}") from None


def on_cpu(pages: PagedTable) -> PagedTable:
    """Return a copy of a table on the CPU, which waits for the device.

    Raises:
        ValueError: its offsets are wrong.
    """
    first, *more = (tensor.cpu() for tensor in pages.tensors)
    if isinstance(pages, CsrPages):
        return CsrPages(first, more[0])
    return type(pages)(first, rows=more[0] if more else None)
