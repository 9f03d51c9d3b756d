"""FlashInfer 0.7's attention wrappers and functions, forward only.

The signatures are FlashInfer's, and so are modules, shapes, alignment of queries and keys, and the
base of lse, 2. Wrappers plan on the device, in ``plan``, and their workspaces are not needed. A
name that is not here raises an error that says what to use instead.
"""

from __future__ import annotations

from jitattn.compat.flashinfer import attention as attention
from jitattn.compat.flashinfer import cascade as cascade
from jitattn.compat.flashinfer import decode as decode
from jitattn.compat.flashinfer import mla as mla
from jitattn.compat.flashinfer import page as page
from jitattn.compat.flashinfer import pod as pod
from jitattn.compat.flashinfer import prefill as prefill
from jitattn.compat.flashinfer import quantization as quantization
from jitattn.compat.flashinfer import rope as rope
from jitattn.compat.flashinfer import sparse as sparse
from jitattn.compat.flashinfer.absent import RELEASE, names_of
from jitattn.compat.flashinfer.attention import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithAttentionSinkWrapper,
)
from jitattn.compat.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from jitattn.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from jitattn.compat.flashinfer.mla import (
    BatchMLAPagedAttentionWrapper,
    MLAPlanMetadata,
    trtllm_batch_decode_with_kv_cache_mla,
)
from jitattn.compat.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from jitattn.compat.flashinfer.pod import (
    BatchPODWithPagedKVCacheWrapper,
    PODWithPagedKVCacheWrapper,
)
from jitattn.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_batch_context_with_kv_cache,
)
from jitattn.compat.flashinfer.quantization import packbits, segment_packbits
from jitattn.compat.flashinfer.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from jitattn.compat.flashinfer.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from jitattn.compat.flashinfer.xqa import xqa, xqa_mla

__version__ = RELEASE
"""The release of FlashInfer whose signatures these are."""

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "__version__",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa",
    "xqa_mla",
]

__getattr__ = names_of(__name__, __all__)
