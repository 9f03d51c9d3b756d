"""The definition of ``merge_states``, in float64 PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jitattn.tensors.quantization import saturated


def merge_by_definition(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merged out and lse, computed in float64."""
    logs = lses.double()
    top = logs.amax(0) if len(logs) else logs.new_full(lses.shape[1:], -math.inf)
    # Relative to the largest: beside an lse of -1e30, the sum of two equal weights is lost.
    weights = torch.exp(logs - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(0)
    shares = (weights / total.masked_fill(total == 0, 1.0)).unsqueeze(-1)
    values = torch.where(shares > 0, outs.double(), 0.0) * shares
    lse = top + torch.log(total)
    return saturated(values.sum(dim=0), outs.dtype), lse.float()
