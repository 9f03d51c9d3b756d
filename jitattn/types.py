"""Types of what planners and functions return, for annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.bundles.precompile import Report
    from jitattn.kernels.attention.api import Plan
    from jitattn.kernels.common.kernel_loader import KernelInfo
    from jitattn.kernels.mla.api import MLAPlan
    from jitattn.kernels.mla.check import BoundMLACache
    from jitattn.kernels.registry import Config, Support
    from jitattn.tensors.bound_cache import BoundCache

__all__ = [
    "BoundCache",
    "BoundMLACache",
    "Config",
    "KernelInfo",
    "MLAPlan",
    "Plan",
    "Report",
    "Support",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BoundCache": "jitattn.tensors.bound_cache",
        "BoundMLACache": "jitattn.kernels.mla.check",
        "Config": "jitattn.kernels.registry",
        "KernelInfo": "jitattn.kernels.common.kernel_loader",
        "MLAPlan": "jitattn.kernels.mla.api",
        "Plan": "jitattn.kernels.attention.api",
        "Report": "jitattn.bundles.precompile",
        "Support": "jitattn.kernels.registry",
    },
)
