"""Planners of latent attention, shared by calls, and the dimensions that they have."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from jitattn.base.validate import check_count
from jitattn.kernels.mla.api import MLAPlanner


def check_dims(name: str, value: object, allowed: tuple[int, ...]) -> None:
    """Raise unless a dimension is one that there are kernels for.

    Raises:
        TypeError, ValueError: naming it.
    """
    if check_count(name, value) not in allowed:
        raise ValueError(f"{name} is {value}: expected {' or '.join(map(str, allowed))}")


def latent_planner(arguments: Mapping[str, object], device: torch.device) -> MLAPlanner:
    """Return the planner of some arguments on a device; equal ones share it.

    Raises:
        ConfigError: as its constructor.
    """
    return _planner_of(tuple(sorted(arguments.items())), device)


@functools.lru_cache(maxsize=64)
def _planner_of(arguments: tuple[tuple[str, object], ...], device: torch.device) -> MLAPlanner:
    return MLAPlanner(**dict(arguments), device=device)  # type: ignore[arg-type]
