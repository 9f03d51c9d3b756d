"""``merge_states`` inside a compiled function: ``torch.ops.jitattn.merge_states``."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.kernels.common.torch_op import define, refuse_gradients
from jitattn.kernels.merge.check import check_states
from jitattn.kernels.merge.launch import dispatch
from jitattn.tensors.tensor_checks import check_rows

__all__ = ["merge_states"]


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge states: ``torch.ops.jitattn.merge_states``.

    Args:
        outs: as of ``merge_states``.
        lses: likewise.
        out: [num_tokens, num_heads, head_dim], of the dtype of ``outs``; written.
        lse: float32 [num_tokens, num_heads]; written.

    Raises:
        TypeError, ValueError: as ``merge_states``, or an output doesn't fit.
    """
    check_states(outs, lses)
    check_rows("out", out, tuple(outs.shape[1:]), outs.dtype, outs.device)
    check_rows("lse", lse, tuple(outs.shape[1:3]), torch.float32, outs.device)
    dispatch(outs, lses, out, lse)


define(merge_states, "Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()")


def trace_merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Put a merge of states into the graph."""
    refuse_gradients({"outs": outs, "lses": lses})
    torch.ops.jitattn.merge_states(outs, lses, out, lse)
