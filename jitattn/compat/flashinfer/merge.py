"""FlashInfer's merges of attention over parts of the keys: lse is base 2."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.kernels.merge import api as merge_api
from jitattn.tensors.tensor_checks import check_device, check_tensor, check_writable

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states of the same queries over disjoint sets of keys.

    Args:
        v_a: [seq_len, num_heads, head_dim], float16, bfloat16 or float32.
        s_a: [seq_len, num_heads], base 2, any float dtype; -inf where there was no key.
        v_b: like ``v_a``.
        s_b: like ``s_a``.

    Returns:
        v like ``v_a``, and s, float32. Without any key: 0 and -inf.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check_state("v_a", v_a, "s_a", s_a, v_a)
    _check_state("v_b", v_b, "s_b", s_b, v_a)
    return _merged(torch.stack((v_a, v_b)), torch.stack((s_a.float(), s_b.float())))


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merge another state into ``v`` and ``s``.

    Args:
        v: [seq_len, num_heads, head_dim], float16, bfloat16 or float32.
        s: float32 [seq_len, num_heads], base 2; of another dtype it is refused, since it could not
            be written.
        v_other: like ``v``.
        s_other: like ``s``, any float dtype.
        mask: bool or uint8 [seq_len], which queries are merged; None is all.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_tensor("s", s, (torch.float32,))
    _check_state("v", v, "s", s, v)
    _check_state("v_other", v_other, "s_other", s_other, v)
    check_writable("v", v)
    check_writable("s", s)
    if mask is not None:
        check_tensor("mask", mask, (torch.bool, torch.uint8))
        if tuple(mask.shape) != (v.shape[0],):
            raise ValueError(f"mask has shape {list(mask.shape)}: expected [{v.shape[0]}]")
        check_device("mask", mask, v.device)
    merged_v, merged_s = _merged(torch.stack((v, v_other)), torch.stack((s, s_other.float())))
    if mask is not None:
        is_merged = mask.bool()[:, None]
        merged_v = torch.where(is_merged[:, :, None], merged_v, v)
        merged_s = torch.where(is_merged, merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge states of the same queries over disjoint sets of keys.

    Args:
        v: [seq_len, num_states, num_heads, head_dim], float16, bfloat16 or float32.
        s: [seq_len, num_states, num_heads], base 2, any float dtype.

    Returns:
        v [seq_len, num_heads, head_dim], and s, float32 [seq_len, num_heads]. Without any key: 0
        and -inf.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_tensor("v", v, _FLOATS[:3])
    check_tensor("s", s, _FLOATS)
    if v.dim() != 4:
        raise ValueError(
            f"v has shape {list(v.shape)}: expected [seq_len, num_states, num_heads, head_dim]"
        )
    if s.shape != v.shape[:3]:
        raise ValueError(f"s has shape {list(s.shape)}: expected {list(v.shape[:3])}")
    check_device("s", s, v.device)
    if v.shape[-1] > 1 and v.stride(-1) != 1:
        v = v.contiguous()
    return _merged(v.transpose(0, 1), s.float().transpose(0, 1))


def _check_state(v_name: str, v: Tensor, s_name: str, s: Tensor, first: Tensor) -> None:
    check_tensor(v_name, v, _FLOATS[:3])
    check_tensor(v_name, v, (first.dtype,))
    check_tensor(s_name, s, _FLOATS)
    if v.dim() != 3 or v.shape != first.shape:
        wanted = "[seq_len, num_heads, head_dim]" if v is first else str(list(first.shape))
        raise ValueError(f"{v_name} has shape {list(v.shape)}: expected {wanted}")
    if s.shape != v.shape[:2]:
        raise ValueError(f"{s_name} has shape {list(s.shape)}: expected {list(v.shape[:2])}")
    check_device(v_name, v, first.device)
    check_device(s_name, s, first.device)


def _merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge states, the first dimension, whose lse is base 2."""
    return merge_api.merge_states(outs, lses, base=2)
