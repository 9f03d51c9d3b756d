"""Scales of quantised K and V."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import FLOAT32_MAX, as_float, type_name
from jitattn.spec.dtype import QUANTISED_DTYPES
from jitattn.tensors.tensor_checks import check_device, check_tensor

ScaleLike = float | Tensor
"""A scale as callers give it: a number, or a float32 tensor that is read when a kernel runs."""


class Scale(NamedTuple):
    """What the stored values of a quantised cache are multiplied with.

    ``tensor`` is float32 with one entry for each KV head, ``stride`` elements apart, or with one
    for all and a stride of 0. It is read when the kernel runs. Without it ``value`` counts.
    """

    value: float
    tensor: Tensor | None = None
    stride: int = 0


def view_scale(
    name: str,
    scale: ScaleLike | None,
    kv_dtype: str,
    device: torch.device,
    *,
    num_kv_heads: int,
) -> Scale | None:
    """Return a scale of K or V, 1 when it is not given; None where K and V are not quantised.

    Raises:
        TypeError: neither a number nor a float32 tensor.
        ValueError: given for a cache that is not quantised, not finite, or a tensor whose shape or
            device doesn't fit.
    """
    if kv_dtype not in QUANTISED_DTYPES:
        if scale is not None:
            raise ValueError(f"{name} is given, but a cache of {kv_dtype} is not quantised")
        return None
    return check_scale(name, scale, device, num_kv_heads=num_kv_heads)


def check_scale(
    name: str, scale: ScaleLike | None, device: torch.device, *, num_kv_heads: int = 1
) -> Scale:
    """Return the scale of a quantised cache, 1 when it is not given.

    Raises:
        TypeError: neither a number nor a float32 tensor.
        ValueError: not finite, or a tensor whose shape or device doesn't fit.
    """
    if scale is None:
        return Scale(1.0)
    if not isinstance(scale, Tensor):
        return Scale(scale_value(name, scale))
    check_tensor(name, scale, (torch.float32,))
    if tuple(scale.shape) not in ((), (1,), (num_kv_heads,)):
        each = f"[], [1] or [{num_kv_heads}], one for each KV head"
        raise ValueError(
            f"{name} has shape {list(scale.shape)}: expected "
            f"{each if num_kv_heads > 1 else '[] or [1]'}"
        )
    check_device(name, scale, device)
    return Scale(1.0, scale, scale.stride(0) if scale.numel() > 1 else 0)


def scale_value(name: str, scale: object) -> float:
    """Return a scale that is a number.

    Raises:
        TypeError: it is none.
        ValueError: no finite float32.
    """
    value = as_float(scale)
    if value is None:
        raise TypeError(f"{name} is a {type_name(scale)}: expected a number or a tensor of float32")
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name} is {value}: expected a finite float32")
    return value
