"""Merge attention over parts of the keys: ``merge_states``."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.kernels.merge.check import check_base, check_states
from jitattn.kernels.merge.launch import dispatch


def merge_states(outs: Tensor, lses: Tensor, *, base: float = math.e) -> tuple[Tensor, Tensor]:
    """Merge states of the same queries over disjoint sets of keys, in the order given.

    Args:
        outs: [num_states, num_tokens, num_heads, head_dim], float16, bfloat16 or float32; the last
            dimension contiguous.
        lses: float32 [num_states, num_tokens, num_heads], logarithms. A state whose lse is -inf
            changes no bit, whatever its out holds.
        base: of the logarithms in ``lses`` and of the lse returned: e, as plans have it, or 2, as
            FlashInfer's kernels do.

    Returns:
        out [num_tokens, num_heads, head_dim] in the dtype of ``outs``, and lse. Without any state
        above -inf: 0 and -inf.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, device or base doesn't fit.
    """
    check_states(outs, lses)
    is_binary = check_base(base) == 2
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(outs.shape[1:3], dtype=torch.float32, device=outs.device)
    merge_into(outs, lses * math.log(2) if is_binary else lses, out, lse)
    return out, lse.mul_(math.log2(math.e)) if is_binary else lse


def merge_into(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge states that were checked into ``out`` and ``lse``, of any strides."""
    if is_dynamo_compiling():
        from jitattn.kernels.merge.torch_op import trace_merge

        trace_merge(outs, lses, out, lse)
    else:
        dispatch(outs, lses, out, lse)
