"""The definition of ``merge_states``, in float64 PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jitattn.tensors.quantization import saturated


def merge_by_definition(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merged out and lse, computed in float64."""
    logs = lses.double()
    lse = (
        torch.logsumexp(logs, dim=0) if lses.shape[0] else logs.new_full(lses.shape[1:], -math.inf)
    )
    weights = torch.exp(logs - lse.masked_fill(lse == -math.inf, 0.0))
    live = (weights > 0).unsqueeze(-1)
    values = torch.where(live, outs.double(), 0.0) * weights.unsqueeze(-1)
    return saturated(values.sum(dim=0), outs.dtype), lse.float()
