"""Watches over tests: of what they ask a card for, and of what they leave unwritten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that asks for kernels which tests/gpu/bundle.py lacks."""
    from tests.unit.asked import Asked  # costs seconds, so only when a test asks

    asked = Asked(monkeypatch)
    yield
    assert asked.configs
    missing = sorted(spec.symbol for spec in asked.specs_beside_the_bundle())
    assert not missing, f"tests/gpu/bundle.py lacks {', '.join(missing)}"


@pytest.fixture
def new_tensors_are_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN, so that what is not written is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch.use_deterministic_algorithms(False)
