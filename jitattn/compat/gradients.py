"""Refuse inputs that require gradients: nothing here has a backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def refuse_gradients(tensors: Mapping[str, object]) -> None:
    """Raise ValueError where gradients are recorded and one of ``tensors``, by name, wants one."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient: there is no backward pass here; use torch.no_grad()"
            )
