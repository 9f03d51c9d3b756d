"""Checks of what tensors hold, which wait for the device: JITATTN_CHECK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jitattn.base import knobs


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
