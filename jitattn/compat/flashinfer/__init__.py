"""FlashInfer 0.7's attention wrappers and functions, forward only.

The signatures are FlashInfer's, and so are shapes, alignment of queries and keys, and the base of
lse, 2. Wrappers plan on the device, in ``plan``, and their workspaces are not needed.
"""

from __future__ import annotations

from jitattn.compat.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from jitattn.compat.flashinfer.common.metadata import MLAPlanMetadata
from jitattn.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from jitattn.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper
from jitattn.compat.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from jitattn.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from jitattn.compat.flashinfer.trtllm.attention import (
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from jitattn.compat.flashinfer.trtllm.latents import trtllm_batch_decode_with_kv_cache_mla

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
]
