"""FP8 queries: their scales, checked, and what attention kernels get for them, in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jitattn.kernels.attention.params import QueryParams
from jitattn.kernels.attention.spec import DequantizeQueriesSpec
from jitattn.kernels.common import device_kernels
from jitattn.spec.dtype import FP8_QUERIES, DType
from jitattn.tensors.scales import ScaleLike, scale_value
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor
from jitattn.tensors.tensor_layouts import RowLayout

FP8 = DType(FP8_QUERIES).torch_dtype
_VECTOR = 16
_SPEC = DequantizeQueriesSpec()


@dataclass(frozen=True, slots=True)
class QueryScale:
    """What stored queries are multiplied with.

    ``tensor`` is float32 [num_tokens, num_qo_heads], with strides of 0 where one serves several. It
    is read when the kernel runs. Without it ``value`` counts.
    """

    value: float
    tensor: Tensor | None = None


def check_fp8_queries(q: Tensor) -> None:
    """Raise unless ``q`` is FP8 of three dimensions, of which vectors can be read.

    Raises:
        TypeError, ValueError: naming it.
    """
    check_tensor("q", q, (FP8,))
    if q.dim() != 3 or q.shape[2] % _VECTOR:
        raise ValueError(
            f"q has shape {list(q.shape)}: expected [num_tokens, num_qo_heads, head_dim]"
        )
    check_last_stride("q", q)


def check_q_scale(q_scale: ScaleLike | None, q: Tensor) -> QueryScale:
    """Return the scale of queries that were checked, 1 when it is not given.

    Raises:
        TypeError: neither a number nor a float32 tensor.
        ValueError: not finite, or a tensor whose shape or device doesn't fit.
    """
    if q_scale is None:
        return QueryScale(1.0)
    if not isinstance(q_scale, Tensor):
        return QueryScale(scale_value("q_scale", q_scale))
    check_tensor("q_scale", q_scale, (torch.float32,))
    num_tokens, num_heads, _ = q.shape
    if tuple(q_scale.shape) not in ((), (1,), (num_heads,), (num_tokens, num_heads)):
        raise ValueError(
            f"q_scale has shape {list(q_scale.shape)}: expected [], [1], [{num_heads}], one for "
            f"each query head, or [{num_tokens}, {num_heads}], one for each token and head"
        )
    check_device("q_scale", q_scale, q.device)
    return QueryScale(1.0, q_scale.expand(num_tokens, num_heads))


def dequantized_queries(q: Tensor, scale: QueryScale) -> Tensor:
    """Return queries times their scales in float64: the definition."""
    factor: float | Tensor
    factor = scale.value if scale.tensor is None else scale.tensor.double()[..., None]
    return q.double() * factor


def dequantize_into(q: Tensor, scale: QueryScale, out: Tensor) -> None:
    """Write queries that were checked, times their scales, into ``out``.

    Args:
        q: FP8 [num_tokens, num_qo_heads, head_dim].
        scale: of them.
        out: like q, contiguous: float16, where what is beyond it saturates and an infinite scale is
            NaN; or float64 of the reference backend.
    """
    if out.dtype is torch.float64:
        out.copy_(dequantized_queries(q, scale))
    elif q.numel() > 0:
        card = device_kernels.card_of(q.device)
        assert card is not None
        _launch(card, q, scale, out)


def load_kernel(device: torch.device) -> None:
    """Load the kernel, which a capture can't do."""
    if (card := device_kernels.card_of(device)) is not None:
        device_kernels.load(_SPEC, card)


def _launch(card: int, q: Tensor, scale: QueryScale, out: Tensor) -> None:
    from jitattn.device.driver import Launch

    num_tokens, num_heads, head_dim = q.shape
    row_vectors, scales = head_dim // _VECTOR, scale.tensor
    params = QueryParams(
        q.data_ptr(),
        None if scales is None else scales.data_ptr(),
        out.data_ptr(),
        *q.stride()[:2],
        *((0, 0) if scales is None else scales.stride()),
        num_tokens,
        num_heads,
        row_vectors,
        scale.value,
        RowLayout(q, vector=_VECTOR).is_aligned(q.data_ptr()),
    )
    num_threads = device_kernels.tile_of(_SPEC, card).num_threads
    grid = -(-num_tokens * num_heads * row_vectors // num_threads)
    kernel = device_kernels.load(_SPEC, card)
    device_kernels.launch_on(card, Launch(kernel, params, grid, num_threads))
