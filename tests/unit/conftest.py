"""A watch over tests of the CPU that run on a card, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that asks for kernels which tests/gpu/bundle.py lacks."""
    from tests.unit.asked import Asked  # costs seconds, so only when a test asks

    asked = Asked(monkeypatch)
    yield
    assert asked.configs
    missing = sorted(spec.symbol for spec in asked.specs_beside_the_bundle())
    assert not missing, f"tests/gpu/bundle.py lacks {', '.join(missing)}"
