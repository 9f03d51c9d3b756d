"""FP8 queries: their scales, checked, and what attention kernels get for them, in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jitattn.kernels.attention.params import QueryParams
from jitattn.kernels.attention.spec import DequantizeQueriesSpec
from jitattn.kernels.common import device_kernels
from jitattn.spec.dtype import FP8_QUERIES, DType
from jitattn.tensors.scales import ScaleLike, scale_value
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_rows, check_tensor
from jitattn.tensors.tensor_layouts import NO_LAYOUT, RowLayout

if TYPE_CHECKING:
    from jitattn.device.driver import Launch

FP8 = DType(FP8_QUERIES).torch_dtype
FP8_VECTOR = 16
"""Elements of FP8 queries that kernels read at once."""
_SPEC = DequantizeQueriesSpec()


@dataclass(frozen=True, slots=True)
class QueryScale:
    """What stored queries are multiplied with.

    ``tensor`` is float32 with one for all, for each head, or for each token and head, which are
    ``strides`` elements apart, 0 where one serves several. It is read when the kernel runs. Without
    it ``value`` counts.
    """

    value: float
    tensor: Tensor | None = None
    strides: tuple[int, int] = (0, 0)


def check_fp8_queries(q: Tensor) -> None:
    """Raise unless ``q`` is FP8 of three dimensions, of which vectors can be read.

    Raises:
        TypeError, ValueError: naming it.
    """
    check_tensor("q", q, (FP8,))
    if q.dim() != 3 or q.shape[2] % FP8_VECTOR:
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
    token_stride, head_stride = q_scale.expand(num_tokens, num_heads).stride()
    return QueryScale(1.0, q_scale, (token_stride, head_stride))


def dequantized_queries(q: Tensor, scale: QueryScale) -> Tensor:
    """Return queries times their scales in float64: the definition."""
    if scale.tensor is None:
        return q.double() * scale.value
    return q.double() * scale.tensor.double().expand(q.shape[:2])[..., None]


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
        launch = _launch_of(card, q)
        _write_addresses(launch.params, q, RowLayout(q, vector=FP8_VECTOR), scale, out)
        device_kernels.launch_on(card, launch)


def load_kernel(device: torch.device) -> None:
    """Load the kernel, which a capture can't do."""
    if (card := device_kernels.card_of(device)) is not None:
        device_kernels.load(_SPEC, card)


class QueryScales:
    """Checks of scales: those that lie like the last ones take little time.

    For one thread at a time.
    """

    __slots__ = ("_layout", "_strides")

    def __init__(self) -> None:
        """Know nothing."""
        self.forget()

    def forget(self) -> None:
        """Check the next one, since queries lie in another way."""
        self._layout, self._strides = NO_LAYOUT, (0, 0)

    def of(self, q: Tensor, q_scale: ScaleLike | None) -> QueryScale:
        """Return the scale of queries that passed their checks, as ``check_q_scale`` does."""
        if self._layout.fits(q_scale):
            assert isinstance(q_scale, Tensor)
            return QueryScale(1.0, q_scale, self._strides)
        scale = check_q_scale(q_scale, q)
        if scale.tensor is not None:
            self._strides, self._layout = scale.strides, RowLayout(scale.tensor)
        return scale


class QueryDequantizer:
    """Checks and launches of a plan's queries: those that lie like the last ones take little time.

    For one thread at a time.
    """

    __slots__ = ("_launch", "_layout", "_scales")

    def __init__(self) -> None:
        """Know nothing."""
        self._layout = NO_LAYOUT
        self._scales = QueryScales()
        self._launch: Launch | None = None

    def knows(self, q: Tensor) -> bool:
        """Whether queries lie like the last ones, which passed their checks."""
        return self._layout.fits(q)

    def check(self, q: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
        """Raise unless queries fit.

        Args:
            q: the queries.
            shape: of them; its first number is negative where there may be any.
            device: of the plan.
        """
        check_fp8_queries(q)
        wanted = (q.shape[0] if shape[0] < 0 else shape[0], *shape[1:])
        check_rows("q", q, wanted, FP8, device)
        self._layout = RowLayout(q, vector=FP8_VECTOR)
        self._scales.forget()
        self._launch = None

    def scale_of(self, q: Tensor, q_scale: ScaleLike | None) -> QueryScale:
        """Return the scale of queries that passed, as ``check_q_scale`` does."""
        return self._scales.of(q, q_scale)

    def launch(self, q: Tensor, scale: QueryScale, out: Tensor) -> None:
        """Write the values of queries that passed into ``out``, as ``dequantize_into`` does."""
        if out.dtype is torch.float64 or q.numel() == 0:
            return dequantize_into(q, scale, out)
        card = device_kernels.card_of(q.device)
        assert card is not None
        if self._launch is None:
            self._launch = _launch_of(card, q)
        _write_addresses(self._launch.params, q, self._layout, scale, out)
        device_kernels.launch_on(card, self._launch)


def _launch_of(card: int, q: Tensor) -> Launch:
    from jitattn.device.driver import Launch

    num_tokens, num_heads, head_dim = q.shape
    row_vectors = head_dim // FP8_VECTOR
    params = QueryParams(
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        num_tokens=num_tokens,
        num_heads=num_heads,
        row_vectors=row_vectors,
    )
    num_threads = device_kernels.tile_of(_SPEC, card).num_threads
    grid = -(-num_tokens * num_heads * row_vectors // num_threads)
    return Launch(device_kernels.load(_SPEC, card), params, grid, num_threads)


def _write_addresses(
    params: Any, q: Tensor, layout: RowLayout, scale: QueryScale, out: Tensor
) -> None:
    q_at = q.data_ptr()
    params.q, params.out = q_at, out.data_ptr()
    params.q_is_aligned = layout.is_aligned(q_at)
    params.scales = None if scale.tensor is None else scale.tensor.data_ptr()
    params.scale_token_stride, params.scale_head_stride = scale.strides
    params.scale = scale.value
