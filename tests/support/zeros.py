"""Tensors of zeros, for calls that are refused before anything is read."""

from __future__ import annotations

import torch
from torch import Tensor


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def fp8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)
