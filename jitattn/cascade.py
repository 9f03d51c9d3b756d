"""Cascade attention: a planner for batches whose requests share prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.kernels.cascade import (
        BoundCascadeCache,
        CascadeLevel,
        CascadePlan,
        CascadePlanner,
    )

__all__ = ["BoundCascadeCache", "CascadeLevel", "CascadePlan", "CascadePlanner"]

__getattr__ = lazy_names(
    __name__,
    {
        "BoundCascadeCache": "jitattn.kernels.cascade",
        "CascadeLevel": "jitattn.kernels.cascade",
        "CascadePlan": "jitattn.kernels.cascade",
        "CascadePlanner": "jitattn.kernels.cascade",
    },
)
