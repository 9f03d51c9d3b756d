"""FlashInfer's custom masks, whose rows follow each other bit by bit, as rows of whole bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from jitattn.tensors.tensor_checks import check_tensor

# What the bits of a byte are multiplied with, the first of them the lowest.
WEIGHTS = tuple(1 << i for i in range(8))


def rows_of_bytes(
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return a mask as ``Plan.run`` takes it for all keys of each request.

    Args:
        custom_mask: bool [sum of q_len * kv_len], or None.
        packed_custom_mask: uint8, the same bits from the lowest up, of each request from a byte of
            its own on; or None.
        q_lens: query tokens of each request.
        kv_lens: their keys.
        device: where the result is; the mask may be elsewhere.

    Returns:
        uint8 [sum of q_len * ceil(kv_len / 8)], each row beginning at a byte, and int32
        [batch_size + 1], where requests begin.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    bits = [q_len * kv_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    if packed_custom_mask is None:
        assert custom_mask is not None
        check_tensor("custom_mask", custom_mask, (torch.bool,))
        # A bit of it has eight bytes to itself.
        source, per_entry = custom_mask.reshape(-1), 1
        name, starts = "custom_mask", _sums(bits)
    else:
        check_tensor("packed_custom_mask", packed_custom_mask, (torch.uint8,))
        source, per_entry = packed_custom_mask.reshape(-1), 8
        name, starts = "packed_custom_mask", _sums([-(-n // 8) for n in bits])
    if source.shape[0] != starts[-1]:
        raise ValueError(f"{name} has {source.shape[0]} entries: expected {starts[-1]}")
    widths = [-(-kv_len // 8) for kv_len in kv_lens]
    begins = _sums([q_len * width for q_len, width in zip(q_lens, widths, strict=True)])
    packed = _repacked(source.to(device), per_entry, starts, begins, kv_lens)
    return packed, torch.tensor(begins, dtype=torch.int32, device=device)


def _sums(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


def _repacked(
    source: Tensor,
    per_entry: int,
    starts: Sequence[int],
    begins: Sequence[int],
    kv_lens: Sequence[int],
) -> Tensor:
    """Gather eight bits for each byte, from entries of ``per_entry`` bits."""
    if begins[-1] == 0:
        return torch.zeros(0, dtype=torch.uint8, device=source.device)
    places = torch.arange(begins[-1], device=source.device)
    of_request = torch.tensor([begins[1:], begins[:-1], starts[:-1], kv_lens], device=source.device)
    request = torch.searchsorted(of_request[0].contiguous(), places, right=True)
    _, begin, start, kv_len = of_request[:, request]
    width = (kv_len + 7) // 8
    row, column = (places - begin) // width, (places - begin) % width
    keys = 8 * column[:, None] + torch.arange(8, device=source.device)
    is_key = keys < kv_len[:, None]
    bit = torch.where(is_key, row[:, None] * kv_len[:, None] + keys, 0)
    entries = source[start[:, None] + bit // per_entry].to(torch.uint8)
    seen = (entries >> (bit % per_entry).to(torch.uint8)) & 1
    weights = torch.tensor(WEIGHTS, dtype=torch.uint8, device=source.device)
    packed: Tensor = (seen * is_key * weights).sum(dim=1, dtype=torch.uint8)
    return packed
