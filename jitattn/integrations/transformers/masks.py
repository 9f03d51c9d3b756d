"""Masks of a step: the lengths, windows and bits that decide which keys a query sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.attention.api import Plan

STEP_ATTRIBUTE = "jitattn_step"


@dataclass
class MaskedStep:
    """What the queries of a step see, and the plans for it.

    Query i of a row sits at ``end`` - q_len + i of the row's keys, of which those before its start
    are padding.

    Attributes:
        shape: batch size, queries and keys of a row.
        end: how many keys of each row there are, this step's included: a number, or [].
        causal: queries see no later keys.
        window_left: earlier keys that a query sees besides its own; -1 is all.
        starts: [batch_size], keys of each row that are padding; None: none.
        bits: bool [batch_size * q_len, kv_len], what is seen, instead of all that.
        plans: by what else they depend on.
    """

    shape: tuple[int, int, int]
    end: int | Tensor
    causal: bool = False
    window_left: int = -1
    starts: Tensor | None = None
    bits: Tensor | None = None
    plans: dict[object, Plan] = field(default_factory=dict)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return a tensor of four dimensions that carries a `MaskedStep`.

    It is bits [batch_size, 1, q_length, kv_length], or [1, 1, 1, 1] where lengths say it all:
    whoever changes that loses the step, and is told so by `attend`. It is contiguous, since
    ``contiguous()``, which ``generate`` calls with static caches, then returns the tensor itself.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    shape = batch_size, q_length, kv_length
    step = _step_of_lengths(shape, q_offset, kv_offset, mask_function, attention_mask)
    device = others.get("device", "cpu")
    if step is not None:
        mask = torch.zeros((1, 1, 1, 1), dtype=torch.uint8, device=device)
        setattr(mask, STEP_ATTRIBUTE, step)
        return mask
    bits = masking_utils.sdpa_mask(
        *shape,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=others.get("use_vmap", False),
        device=device,
    )
    assert isinstance(bits, Tensor)
    bits = bits.contiguous()
    setattr(bits, STEP_ATTRIBUTE, _step_of_bits(bits, shape))
    return bits


def _step_of_lengths(
    shape: tuple[int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
) -> MaskedStep | None:
    """Return the step of rows that begin with padding and see what came before; else None."""
    window_left = _window_left(mask_function)
    if window_left is None:
        return None
    _, q_length, kv_length = shape
    end = q_offset - kv_offset + q_length
    step = MaskedStep(shape, end, causal=True, window_left=window_left)
    if attention_mask is None:
        return step
    if attention_mask.dim() != 2:
        return None
    seen = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    seen = torch.nn.functional.pad(seen, (0, kv_length - seen.shape[1]))
    is_past = torch.arange(kv_length, device=seen.device) >= end
    # One answer for the whole step, as transformers waits for one to leave masks out.
    if not bool((seen[:, 1:] | ~seen[:, :-1] | is_past[1:]).all()):
        return None
    step.starts = (~(seen | is_past)).sum(dim=1)
    return step


def _window_left(mask_function: Callable[..., Tensor]) -> int | None:
    """Return the window of transformers' causal masks, -1 without one; None of all others."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return -1
    like = masking_utils.sliding_window_causal_mask_function(1)
    found: list[int] = []
    if not _is_like(mask_function, like, found) or len(found) != 1:
        return None
    return found[0] - 1


def _is_like(one: object, other: object, numbers: list[int]) -> bool:
    """Whether two closures have the same code and cells but for numbers, which are collected."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ is other.__code__ and _is_like(
            one.__closure__ or (), other.__closure__ or (), numbers
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(
            _is_like(a, b, numbers) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, CellType) and isinstance(other, CellType):
        return _is_like(one.cell_contents, other.cell_contents, numbers)
    if type(one) is int and type(other) is int:
        numbers.append(one)
        return True
    return one is other


def _step_of_bits(bits: Tensor, shape: tuple[int, int, int]) -> MaskedStep:
    """Return the step of a bool mask [batch_size or 1, 1, q_length, kv_length]."""
    batch_size, q_length, kv_length = shape
    rows = bits.expand(batch_size, 1, q_length, kv_length).reshape(-1, kv_length)
    return MaskedStep(shape, kv_length, bits=rows.contiguous())


def step_of_mask(mask: Tensor, shape: tuple[int, int, int]) -> MaskedStep:
    """Return the step of a mask that a caller made, for all layers that get it."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attention_mask has dtype {mask.dtype}: expected a bool or float mask, or the one "
            "that jitattn's mask function made, as it was"
        )
    found = list(mask.shape)
    batch_size, q_length, kv_length = shape
    if mask.dim() != 4 or found[1:] != [1, q_length, kv_length] or found[0] not in (1, batch_size):
        raise ValueError(
            f"attention_mask has shape {found}: expected [{batch_size}, 1, {q_length}, {kv_length}]"
        )
    seen = mask
    if mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            raise ValueError(
                "attention_mask has other numbers than 0 and minus infinity: a bias of scores is "
                "not supported"
            )
    step = _step_of_bits(seen, shape)
    setattr(mask, STEP_ATTRIBUTE, step)
    return step


def step_without_mask(
    module: Any, shape: tuple[int, int, int], is_causal: bool | None, sliding_window: int | None
) -> MaskedStep:
    """Return the step of a call without a mask, from causality and window.

    Raises:
        ValueError: they don't say where queries stand.
    """
    _, q_length, kv_length = shape
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        if sliding_window is not None:
            raise ValueError(
                f"sliding_window is {sliding_window} without a mask and without causality: such "
                "windows need an attention_mask"
            )
        return MaskedStep(shape, kv_length)
    if q_length not in (1, kv_length):
        raise ValueError(
            f"attention_mask is None: {q_length} queries may stand anywhere among {kv_length} keys"
        )
    window_left = -1 if sliding_window is None else sliding_window - 1
    return MaskedStep(shape, kv_length, causal=True, window_left=window_left)
