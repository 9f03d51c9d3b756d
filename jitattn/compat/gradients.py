"""Refuse inputs that require gradients: nothing here has a backward pass."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_gradients(**tensors: object) -> None:
    """Raise ValueError where gradients are recorded and a tensor wants one."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient: there is no backward pass here; use torch.no_grad()"
            )
