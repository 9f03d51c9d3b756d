"""Attention over tokens that lie on several devices, on torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.base.errors import ParallelError
    from jitattn.parallel.context import ContextParallel
    from jitattn.parallel.plan import ContextMLAPlan, ContextPlan

__all__ = ["ContextMLAPlan", "ContextParallel", "ContextPlan", "ParallelError"]

__getattr__ = lazy_names(
    __name__,
    {
        "ContextMLAPlan": "jitattn.parallel.plan",
        "ContextParallel": "jitattn.parallel.context",
        "ContextPlan": "jitattn.parallel.plan",
        "ParallelError": "jitattn.base.errors",
    },
)
