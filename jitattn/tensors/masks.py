"""Custom masks of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor


@dataclass(frozen=True, slots=True)
class Mask:
    """A custom mask, in one of its forms.

    ``layout`` is "bool" (bool [num_tokens, width]), "packed" (uint8 [num_tokens, width / 8], bits
    from the lowest up), both over the last ``width`` keys of each request, or "ragged" (uint8
    bytes over all keys, ``indptr`` [batch_size + 1] says in bytes where each request begins).
    """

    layout: str
    values: Tensor
    width: int
    indptr: Tensor | None


def view_mask(
    custom_mask: Tensor | tuple[Tensor, Tensor],
    num_tokens: int,
    batch_size: int,
    device: torch.device,
) -> Mask:
    """Check a custom mask.

    Raises:
        TypeError: neither a bool or uint8 tensor nor a pair (packed, mask_indptr).
        ValueError: a shape, stride or device doesn't fit.
    """
    if isinstance(custom_mask, (tuple, list)):
        return _view_ragged_mask(custom_mask, batch_size, device)
    check_tensor("custom_mask", custom_mask, (torch.bool, torch.uint8))
    if custom_mask.dim() != 2 or custom_mask.shape[0] != num_tokens:
        raise ValueError(
            f"custom_mask has shape {list(custom_mask.shape)}: expected [{num_tokens}, width] bool "
            f"or [{num_tokens}, width / 8] uint8"
        )
    check_device("custom_mask", custom_mask, device)
    check_last_stride("custom_mask", custom_mask)
    if custom_mask.dtype == torch.bool:
        return Mask("bool", custom_mask, custom_mask.shape[1], None)
    return Mask("packed", custom_mask, 8 * custom_mask.shape[1], None)


def _view_ragged_mask(
    custom_mask: tuple[Tensor, Tensor] | list[Tensor], batch_size: int, device: torch.device
) -> Mask:
    if len(custom_mask) != 2:
        raise TypeError("custom_mask is no pair (packed, mask_indptr)")
    packed, indptr = custom_mask
    check_tensor("custom_mask[0]", packed, (torch.uint8,))
    check_tensor("custom_mask[1]", indptr, (torch.int32,))
    if packed.dim() != 1:
        raise ValueError(f"custom_mask[0] has shape {list(packed.shape)}: expected one dimension")
    check_last_stride("custom_mask[0]", packed)
    if tuple(indptr.shape) != (batch_size + 1,):
        raise ValueError(
            f"custom_mask[1] has shape {list(indptr.shape)}: expected [{batch_size + 1}]"
        )
    check_device("custom_mask[0]", packed, device)
    check_device("custom_mask[1]", indptr, device)
    if device.type == "cpu" and int(indptr[-1]) > packed.shape[0]:
        raise ValueError(
            f"custom_mask[1][-1] is {int(indptr[-1])}: custom_mask[0] has {packed.shape[0]} bytes"
        )
    return Mask("ragged", packed, 0, indptr)
