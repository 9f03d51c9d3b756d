"""Launches of the kernel that merges attention states."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.kernels.common import device_kernels
from jitattn.kernels.merge.params import MergeParams
from jitattn.kernels.merge.reference import merge_by_definition
from jitattn.kernels.merge.spec import MergeSpec
from jitattn.spec.dtype import DType


def dispatch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge states that were checked into ``out`` and ``lse``, of any strides."""
    if outs.device.type != "cuda":
        with torch.no_grad():  # as on a card
            merged, merged_lse = merge_by_definition(outs, lses)
            out.copy_(merged)
            lse.copy_(merged_lse)
    elif out.is_contiguous() and lse.is_contiguous():
        _merge_on_device(outs, lses, out, lse)
    else:
        merged, merged_lse = _new(outs)
        _merge_on_device(outs, lses, merged, merged_lse)
        out.copy_(merged)
        lse.copy_(merged_lse)


def _new(outs: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    return out, torch.empty(outs.shape[1:3], dtype=torch.float32, device=outs.device)


def _merge_on_device(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Launch the kernel, which writes contiguous outputs."""
    from jitattn.device.driver import Launch

    num_states, num_tokens, num_heads, head_dim = outs.shape
    if out.numel() == 0:
        return
    card = device_kernels.card_of(outs.device)
    assert card is not None
    spec = MergeSpec(dtype=DType.of(outs.dtype))
    num_threads = device_kernels.tile_of(spec, card).num_threads
    params = MergeParams(
        outs.data_ptr(),
        lses.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        *outs.stride()[:3],
        *lses.stride(),
        num_tokens,
        num_heads,
        num_states,
        head_dim,
    )
    grid = -(-num_tokens * num_heads * 32 // num_threads)
    kernel = device_kernels.load(spec, card)
    device_kernels.launch_on(card, Launch(kernel, params, grid, num_threads))
