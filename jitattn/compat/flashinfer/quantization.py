"""FlashInfer's packing of bits, for custom masks."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.base.validate import check_name
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.masks import WEIGHTS
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_tensor

__all__ = ["packbits", "segment_packbits"]

__getattr__ = names_of(__name__, __all__)

_BINARY = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32)


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Pack elements into bits, as ``numpy.packbits`` does.

    Args:
        x: [n], bool or a number that is 0 or not.
        bitorder: "big", the first element is a byte's highest bit, or "little", its lowest.

    Returns:
        uint8 [ceil(n / 8)]; the last byte is filled with zeros.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    bits = _checked(x, bitorder)
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[0] % 8))
    return _packed(padded.view(-1, 8), bitorder)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack the elements of each segment, each into bytes of its own.

    It waits for the device, to learn how many bytes there are.

    Args:
        x: [indptr[-1]], as of ``packbits``.
        indptr: int32 or int64 [num_segments + 1], where segments begin.
        bitorder: as of ``packbits``.

    Returns:
        uint8 [bytes of all segments], and int32 [num_segments + 1], where they begin in it.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    bits = _checked(x, bitorder)
    check_tensor("indptr", indptr, INTEGERS)
    if indptr.dim() != 1 or indptr.shape[0] == 0:
        raise ValueError(f"indptr has shape {list(indptr.shape)}: expected [num_segments + 1]")
    check_device("indptr", indptr, x.device)
    begins = indptr.long()
    ends = torch.zeros_like(begins)
    ends[1:] = ((begins.diff() + 7) // 8).cumsum(0)
    offsets = begins.tolist()
    if offsets[0] != 0 or offsets[-1] > x.shape[0] or offsets != sorted(offsets):
        raise ValueError(f"indptr rises from 0 to {x.shape[0]}, what x has: got {offsets[:8]}")
    segment = torch.repeat_interleave(
        torch.arange(len(offsets) - 1, device=x.device), begins.diff(), output_size=offsets[-1]
    )
    places = torch.arange(offsets[-1], device=x.device) - begins[segment] + 8 * ends[segment]
    padded = torch.zeros(8 * int(ends[-1]), dtype=torch.bool, device=x.device)
    padded[places] = bits[: offsets[-1]]
    return _packed(padded.view(-1, 8), bitorder), ends.int()


def _checked(x: Tensor, bitorder: str) -> Tensor:
    check_name("bitorder", bitorder, ("big", "little"))
    check_tensor("x", x, _BINARY)
    if x.dim() != 1:
        raise ValueError(f"x has shape {list(x.shape)}: expected one dimension")
    return x.bool()


def _packed(bits: Tensor, bitorder: str) -> Tensor:
    """Return [n] bytes of bool [n, 8]."""
    weights = torch.tensor(WEIGHTS, dtype=torch.uint8, device=bits.device)
    if bitorder == "big":
        weights = weights.flip(0)
    packed: Tensor = (bits * weights).sum(dim=1, dtype=torch.uint8)
    return packed
