"""flash-attn's ``bert_padding``: between padded sequences and tokens that follow each other."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.base.validate import check_count
from jitattn.compat.flash_attn.absent import names_of
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_tensor

__all__ = ["pad_input", "unpad_input"]

__getattr__ = names_of(__name__, __all__)

_MASKS = (torch.bool, torch.uint8, *INTEGERS)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take the tokens that masks have, one sequence after the other; it waits for the device.

    Args:
        hidden_states: [batch_size, seqlen, ..], any dtype.
        attention_mask: bool or integer [batch_size, seqlen], 1 for tokens.
        unused_mask: likewise, tokens that are taken but don't count; or None.

    Returns:
        (tokens [total, ..], their places int64 [total] in batch_size * seqlen, offsets int32
        [batch_size + 1], the longest sequence, tokens that count int32 [batch_size]).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    taken = attention_mask.bool()
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        taken = taken | unused_mask.bool()
    lens = taken.sum(-1, dtype=torch.int32)
    places = taken.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.bool().sum(-1, dtype=torch.int32)
    longest = int(lens.max()) if lens.numel() else 0
    return hidden_states.flatten(0, 1)[places], places, offsets, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back to their places; zeros are in the others.

    Args:
        hidden_states: [total, ..], any dtype.
        indices: int32 or int64 [total], places in batch * seqlen.
        batch: sequences.
        seqlen: tokens of each.

    Returns:
        [batch, seqlen, ..].

    Raises:
        TypeError, ValueError: naming the argument.
    """
    rows = check_count("batch", batch, least=0) * check_count("seqlen", seqlen, least=0)
    check_tensor("indices", indices, INTEGERS)
    if not isinstance(hidden_states, Tensor):
        raise TypeError(f"hidden_states is a {type(hidden_states).__name__}: expected a tensor")
    check_device("indices", indices, hidden_states.device)
    if hidden_states.dim() < 1 or tuple(indices.shape) != (hidden_states.shape[0],):
        raise ValueError(
            f"indices has shape {list(indices.shape)}: hidden_states has {hidden_states.shape[:1]}"
        )
    padded = hidden_states.new_zeros(rows, *hidden_states.shape[1:])
    padded.index_copy_(0, indices.long(), hidden_states)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if not isinstance(hidden_states, Tensor):
        raise TypeError(f"hidden_states is a {type(hidden_states).__name__}: expected a tensor")
    check_tensor(name, mask, _MASKS)
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} has shape {list(mask.shape)}: expected {list(hidden_states.shape[:2])}"
        )
    check_device(name, mask, hidden_states.device)
