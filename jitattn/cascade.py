"""Cascade attention: a planner for batches whose requests share prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.door import lazy_names

if TYPE_CHECKING:
    from jitattn.kernels.attention.cascade import (
        BoundCascadeCache,
        CascadeLevel,
        CascadePlan,
        CascadePlanner,
    )

__all__ = ["BoundCascadeCache", "CascadeLevel", "CascadePlan", "CascadePlanner"]

__getattr__ = lazy_names(
    __name__,
    {
        "BoundCascadeCache": "jitattn.kernels.attention.cascade",
        "CascadeLevel": "jitattn.kernels.attention.cascade",
        "CascadePlan": "jitattn.kernels.attention.cascade",
        "CascadePlanner": "jitattn.kernels.attention.cascade",
    },
)
