"""Checks of attention states that are to be merged."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jitattn.base.validate import check_number
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_states(outs: Tensor, lses: Tensor) -> None:
    """Raise TypeError or ValueError where a dtype, shape, stride or device doesn't fit."""
    check_tensor("outs", outs, _DTYPES)
    check_tensor("lses", lses, (torch.float32,))
    if outs.dim() != 4:
        raise ValueError(
            f"outs has shape {list(outs.shape)}: expected [num_states, num_tokens, num_heads, "
            "head_dim]"
        )
    if lses.shape != outs.shape[:3]:
        raise ValueError(f"lses has shape {list(lses.shape)}: expected {list(outs.shape[:3])}")
    check_last_stride("outs", outs)
    check_device("lses", lses, outs.device)


def check_base(base: object) -> float:
    """Return the base of logarithms: e or 2.

    Raises:
        TypeError, ValueError: neither of them.
    """
    number = check_number("base", base)
    if number not in (2.0, math.e):
        raise ValueError(f"base is {number}: expected 2 or math.e")
    return number
