"""Where attention states are merged: on a card, or by definition."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jitattn.base import knobs
from jitattn.spec.dtype import DType, dtype_name
from jitattn.tensors.quantization import saturated
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor

if TYPE_CHECKING:
    from jitattn.device.driver import LoadedKernel

_DTYPES = tuple(dtype.torch_dtype for dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32))


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


def dispatch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge states that were checked into ``out`` and ``lse``, of any strides."""
    if outs.device.type != "cuda":
        merged, merged_lse = _merge_by_definition(outs, lses)
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


def _merge_by_definition(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    logs = lses.double()
    lse = (
        torch.logsumexp(logs, dim=0) if lses.shape[0] else logs.new_full(lses.shape[1:], -math.inf)
    )
    weights = torch.exp(logs - lse.masked_fill(lse == -math.inf, 0.0))
    live = (weights > 0).unsqueeze(-1)
    values = torch.where(live, outs.double(), 0.0) * weights.unsqueeze(-1)
    return saturated(values.sum(dim=0), outs.dtype), lse.float()


def _merge_on_device(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Launch the kernel, which writes contiguous outputs."""
    from jitattn.device.driver import Launch
    from jitattn.kernels.merge.params import MergeParams

    num_states, num_tokens, num_heads, head_dim = outs.shape
    if out.numel() == 0:
        return
    assert outs.device.index is not None
    kernel, num_threads = _kernel(dtype_name(outs.dtype), outs.device.index)
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
    launch = Launch(kernel, params, grid, num_threads)
    with torch.cuda.device(outs.device):
        launch(torch._C._cuda_getCurrentRawStream(outs.device.index))


@functools.cache
def _kernel(dtype: str, device_index: int) -> tuple[LoadedKernel, int]:
    from jitattn.device.driver import LoadedKernel, device_facts
    from jitattn.jit.build import build
    from jitattn.kernels.common.device_kernels import arch_of
    from jitattn.kernels.merge.spec import MergeSpec
    from jitattn.spec.dtype import DType

    arch = arch_of(device_facts(device_index))
    spec = MergeSpec(dtype=DType(dtype))
    built = build(spec, arch, knobs.load())
    tile = spec.tile(arch)
    return LoadedKernel(built.cubin, built.symbol, device_index, 0), tile.num_threads
