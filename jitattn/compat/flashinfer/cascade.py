"""FlashInfer's merges of states, and its wrappers of shared prefixes."""

from __future__ import annotations

from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.merge import merge_state, merge_state_in_place, merge_states
from jitattn.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from jitattn.compat.flashinfer.single import single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_prefill_with_kv_cache",
]

__getattr__ = names_of(__name__, __all__)
