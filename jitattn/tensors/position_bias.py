"""Values for the ready variants: the slopes of ALiBi, and T5's buckets as biases by distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jitattn.base.validate import MAX_DIM, check_count, check_flag
from jitattn.tensors.tensor_checks import as_device, check_tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def alibi_slopes(num_qo_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the slopes of the ALiBi paper (arXiv 2108.12409), for ``ALIBI``.

    They are 2 ** (-8 i / n) of head i from 1 on where n heads are a power of two. Of another number
    the first heads have those of the next lower power, the others every other one of its double.

    Args:
        num_qo_heads: query heads of the model; a part of them takes its part of the slopes.
        device: where to.

    Returns:
        float32 [num_qo_heads].

    Raises:
        TypeError, ValueError: no count.
    """
    num_qo_heads = check_count("num_qo_heads", num_qo_heads, most=MAX_DIM)
    power = 1 << num_qo_heads.bit_length() - 1
    exponents = [-8 * i / power for i in range(1, power + 1)]
    exponents += [-4 * i / power for i in range(1, 2 * power + 1, 2)]
    slopes = torch.tensor(exponents[:num_qo_heads], dtype=torch.float64, device="cpu").exp2()
    return slopes.to(torch.float32).to("cpu" if device is None else as_device("device", device))


def t5_bias(
    weight: Tensor, *, bidirectional: bool, max_distance: int = 128
) -> dict[str, Tensor | int]:
    """Return the learned biases of T5's buckets by distance, as ``RELATIVE_BIAS`` takes them.

    Args:
        weight: [num_buckets, num_qo_heads], any float dtype: ``relative_attention_bias.weight``.
        bidirectional: whether half of the buckets are for later keys: in encoders, not in decoders.
        max_distance: from which on keys share the last bucket.

    Returns:
        variant_params: ``bias`` float32 [num_qo_heads, 2 * max_distance + 1], ``zero`` its middle.

    Raises:
        TypeError, ValueError: a weight of another form, or fewer distances than buckets have.
    """
    check_tensor("weight", weight, _FLOATS)
    check_flag("bidirectional", bidirectional)
    if weight.dim() != 2 or weight.shape[0] < 4:
        raise ValueError(
            f"weight has shape {list(weight.shape)}: expected [num_buckets, num_qo_heads], 4 "
            "buckets at least"
        )
    num_buckets = weight.shape[0] // 2 if bidirectional else weight.shape[0]
    num_exact = num_buckets // 2
    max_distance = check_count("max_distance", max_distance, least=num_exact + 1, most=MAX_DIM)
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")  # to earlier keys
    size = distance.abs() if bidirectional else distance.clamp(min=0)
    # In float32, as the model was trained.
    ratio = torch.log(size.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    wide = (num_exact + (ratio * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    bucket = torch.where(size < num_exact, size, wide)
    if bidirectional:
        bucket = bucket + num_buckets * (distance < 0)
    bias = weight.detach().float()[bucket.to(weight.device)]
    return {"bias": bias.T, "zero": max_distance}
