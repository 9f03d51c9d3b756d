"""What tests of several engines need."""

from __future__ import annotations

import pytest

from jitattn.kernels.attention.api import AttentionPlanner, Plan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What planners are asked for, in order."""
    seen: list[str] = []
    planner, plan = AttentionPlanner, Plan
    make, refresh = planner.plan, plan.refresh
    monkeypatch.setattr(planner, "plan", lambda *a, **k: seen.append("plan") or make(*a, **k))
    monkeypatch.setattr(plan, "refresh", lambda self: seen.append("refresh") or refresh(self))
    return seen
