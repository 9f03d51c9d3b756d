"""Pages for many requests, exact and independent of an engine: ``KVCacheManager``.

Tables and caches go straight into ``AttentionPlanner``. Importing this imports numpy and no torch;
a manager with storage, and one that makes tables, imports it.
"""

from __future__ import annotations

from jitattn.errors import KVCacheError
from jitattn.kv.config import KVCacheConfig, LayerConfig
from jitattn.kv.layout import LayerGroup
from jitattn.kv.manager import KVCacheManager, PoolStats, Region, Stats
from jitattn.kv.mode import PageIndexMode
from jitattn.kv.sequence import KVSequence
from jitattn.kv.state import Scratch

__all__ = [
    "KVCacheConfig",
    "KVCacheError",
    "KVCacheManager",
    "KVSequence",
    "LayerConfig",
    "LayerGroup",
    "PageIndexMode",
    "PoolStats",
    "Region",
    "Scratch",
    "Stats",
]
