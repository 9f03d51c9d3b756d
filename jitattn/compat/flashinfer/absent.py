"""FlashInfer's names that jitattn doesn't have, and what to use instead of each."""

from __future__ import annotations

from collections.abc import Callable, Collection

from jitattn.compat.missing import refusals

RELEASE = "0.7.4"
"""The FlashInfer whose names and signatures these modules have."""

_ITSELF = "jitattn has attention alone: take it from flashinfer itself"
_PAGED = "BatchDecodeWithPagedKVCacheWrapper or trtllm_batch_decode_with_kv_cache"
_SPARSE = "attention to chosen tokens is not built: BlockSparseAttentionWrapper has chosen blocks"

# What a name looks like, and what to use instead; the first that fits counts.
_INSTEAD: tuple[tuple[str, str], ...] = (
    (
        r"(get|gen)_.*module$|_with_jit_module$|^make_hashable_cache$|^TrtllmGen.*Module$|^jit$",
        "jitattn compiles its own kernels: use jitattn.precompile to have them ahead, and "
        "AttentionPlanner(variant=...) for ones with your own scores",
    ),
    (
        r"^nvfp4_quantize_append_|^nvfp4_quantize_paged_kv_cache$|^nvfp4_kv_quantize$",
        "use jitattn.append_kv with a jitattn.QuantizedKV, which writes NVFP4 and its scales",
    ),
    (
        r"^nvfp4_kv_dequantize",
        "use jitattn.gather_kv, which reads pages of any dtype",
    ),
    (
        r"^(mla_)?rope_quantize_fp8|^concat_mla_kv_quant_fp8$|^fused_qk_rmsnorm_rope$",
        "use jitattn.preprocess_qkv, which turns, normalises, quantises and appends in a launch",
    ),
    (
        r"sparse_mla|sparse_paged|dsv4|DSV4|qsa_|msa_ops|mqa_logits|MQATopK|hca_metadata"
        r"|[qQ](_t|T)oken(_kv_b|KvB)lock(_s|S)parse|SparseMLA|_mla_swa",
        _SPARSE,
    ),
    (
        r"^cudnn_batch_decode|^cake_batch_decode|sm110_gqa|balanced_batch_decode|prims_ts_batch_dec"
        r"|PrimsTSBatchDec|[rR]equest_?[oO]rdered",
        f"use {_PAGED}, with any backend: all mean jitattn's kernels",
    ),
    (
        r"^cudnn_batch_prefill|^cake_batch_context",
        "use BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper or "
        "trtllm_batch_context_with_kv_cache",
    ),
    (
        r"^BatchPrefillWithCausalBidirectionalRangesWrapper$",
        "use BatchPrefillWithPagedKVCacheWrapper with a custom_mask of the ranges",
    ),
    (
        r"nvfp4_batch_decode|mla_nvfp4|MlaNvfp4|quantize_mla_nvfp4|KimiK3|kimi_k3",
        "queries are float16 or bfloat16: use BatchMLAPagedAttentionWrapper or "
        "trtllm_batch_decode_with_kv_cache_mla, with latents of 16 bits or FP8",
    ),
    (
        r"mla_varq_dcp|_dcp_spec_",
        "use jitattn.parallel, or trtllm_batch_decode_with_kv_cache_mla on each rank, and "
        "merge_states for what they return",
    ),
    (
        r"^fmha_v|^trtllm_fmha_v2_prefill$|^minimax_h3_varlen|^convert_bsr_mask_layout$",
        "use BatchPrefillWithRaggedKVCacheWrapper, or "
        "jitattn.compat.flash_attn.flash_attn_varlen_func",
    ),
    (
        r"(fp8|nvfp4)_(ptilemax_)?attention|sage_attention|MiniMaxH3",
        "queries are float16 or bfloat16: use BatchPrefillWithRaggedKVCacheWrapper, with K and V "
        "of 16 bits, FP8 or NVFP4",
    ),
    (
        r"^cake_fmha_manifest$|^MLALayerDimensions$|mla_decode",
        "use jitattn.supported_configs, which says what there are kernels for",
    ),
)


def names_of(module: str, has: Collection[str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module that stands for one of FlashInfer's."""
    return refusals(module, has, _INSTEAD, _ITSELF)
