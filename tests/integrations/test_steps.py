"""Bound caches of engines' layers: bound again when they lie elsewhere, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.integrations import steps
from jitattn.integrations.steps import BoundCaches


@pytest.fixture
def pool() -> Tensor:
    return torch.zeros(6, 2, 4, 2, 16).to(torch.float8_e4m3fn)


@pytest.fixture
def planner() -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=4, kv_dtype="float8_e4m3fn",
        device="cpu",
    )  # fmt: skip


def test_the_same_tensors_are_known_at_once(
    pool: Tensor, planner: jitattn.AttentionPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, scale = BoundCaches(), torch.ones(1)
    given: tuple[Any, ...] = (planner, pool[:, 0], pool[:, 1], scale, 0.5)
    bound = caches.of(*given)
    monkeypatch.setattr(steps, "place_of", None)
    assert caches.of(*given) is bound


def test_others_at_the_same_place_are_not_bound_again(
    pool: Tensor, planner: jitattn.AttentionPlanner
) -> None:
    caches, scale = BoundCaches(), torch.ones(2)
    bound = caches.of(planner, pool[:, 0], pool[:, 1], scale[:1], 0.5)
    for _ in range(2):
        assert caches.of(planner, pool[:, 0], pool[:, 1], scale[:1], 0.5) is bound


@pytest.mark.parametrize("what", ["K", "V", "K's memory", "strides", "a scale", "a number", "none"])
def test_what_has_moved_is_bound_again(
    pool: Tensor, planner: jitattn.AttentionPlanner, what: str
) -> None:
    caches, other = BoundCaches(), pool.clone()
    scale = torch.ones(1)
    parts: dict[str, Any] = {"k": pool[:, 0], "v": pool[:, 1], "k_scale": scale, "v_scale": 0.5}
    bound = caches.of(planner, *parts.values())
    if what == "K's memory":
        parts["k"].set_(other[:, 0])
    else:
        parts |= {
            "K": {"k": other[:, 0]},
            "V": {"v": other[:, 1]},
            "strides": {"k": pool[::2, 0], "v": pool[::2, 1]},
            "a scale": {"k_scale": torch.ones(1)},
            "a number": {"v_scale": 0.25},
            "none": {"k_scale": None},
        }[what]
    found = caches.of(planner, *parts.values())
    assert found is not bound
    assert found.k.tensor.data_ptr() == parts["k"].data_ptr()
    assert caches.of(planner, *parts.values()) is found


def test_planners_have_their_own(pool: Tensor, planner: jitattn.AttentionPlanner) -> None:
    other = jitattn.AttentionPlanner(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=4, kv_dtype="float8_e4m3fn",
        window_left=3, device="cpu",
    )  # fmt: skip
    caches = BoundCaches()
    parts = pool[:, 0], pool[:, 1], 1.0, 1.0
    bound = [caches.of(each, *parts) for each in (planner, other)]
    assert bound[0] is not bound[1]
    assert [caches.of(each, *parts) for each in (planner, other)] == bound
