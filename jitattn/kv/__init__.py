"""Pages for many requests, exact and independent of an engine: ``KVCacheManager``.

Tables and caches go straight into ``AttentionPlanner``. Importing this imports numpy and no torch;
a manager with storage, and one that makes tables, imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.errors import KVCacheError
from jitattn.kv.config import KVCacheConfig, LayerConfig
from jitattn.kv.layout import LayerGroup
from jitattn.kv.manager import KVCacheManager, PoolStats, Region, Stats
from jitattn.kv.mode import PageIndexMode
from jitattn.kv.sequence import KVSequence
from jitattn.kv.state import Scratch

if TYPE_CHECKING:
    from jitattn.kv.layer_view import LayerView

__all__ = [
    "KVCacheConfig",
    "KVCacheError",
    "KVCacheManager",
    "KVSequence",
    "LayerConfig",
    "LayerGroup",
    "LayerView",
    "PageIndexMode",
    "PoolStats",
    "Region",
    "Scratch",
    "Stats",
]


def __getattr__(name: str) -> object:
    """Import what needs torch when it is used."""
    if name == "LayerView":
        from jitattn.kv.layer_view import LayerView

        return LayerView
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
