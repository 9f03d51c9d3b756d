"""Threads of tests that run ranks beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
