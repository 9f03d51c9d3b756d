"""All operators of ``torch.ops.jitattn``: importing this module defines them."""

from jitattn.kernels.attention.torch_op import attention, dequantize_queries
from jitattn.kernels.merge.torch_op import merge_states
from jitattn.kernels.mla.torch_op import mla_attention
from jitattn.kernels.preprocess.torch_op import append_kv, preprocess_qkv
from jitattn.kernels.select.torch_op import (
    index_logits,
    page_bounds,
    select_pages,
    select_tokens,
)

__all__ = [
    "append_kv",
    "attention",
    "dequantize_queries",
    "index_logits",
    "merge_states",
    "mla_attention",
    "page_bounds",
    "preprocess_qkv",
    "select_pages",
    "select_tokens",
]
