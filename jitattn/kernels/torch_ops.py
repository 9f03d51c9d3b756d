"""All operators of ``torch.ops.jitattn``: importing this module defines them."""

from jitattn.kernels.attention.torch_op import attention
from jitattn.kernels.merge.torch_op import merge_states
from jitattn.kernels.mla.torch_op import mla_attention
from jitattn.kernels.preprocess.torch_op import append_kv, preprocess_qkv

__all__ = ["append_kv", "attention", "merge_states", "mla_attention", "preprocess_qkv"]
