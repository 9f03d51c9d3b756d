"""What a cache stores for a value, in torch: the definition that every writer and reader follows.

A stored value times its scale is the value. What is stored is ``value * (1 / scale)``, computed in
float32, as the nearest number of the type, ties to even: numbers of the type come back. Where none
is near enough, infinities included, it is the largest finite one. NaN stays NaN (the byte 0x7f in
both FP8 types); int8 has none and stores 0.

NVFP4 has blocks of 16 elements along head_dim, each with a scale of type e4m3: the largest
magnitude of the block (after ``scale``) divided by 6, to the nearest e4m3. An
element is stored as the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 to its value divided by that, with
its sign, two in a byte. A block whose scale rounds to 0 is 0, and NaN makes its block NaN.

Twin: templates/include/jitattn/convert.cuh.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from jitattn.base.validate import shown
from jitattn.spec.dtype import KV_DTYPES, QUANTISED_DTYPES, DType, dtype_name
from jitattn.tensors.scales import check_scale, scale_value
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor

NVFP4_BLOCK = 16
"""Elements of a block of NVFP4, which share a scale."""

_VALUES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = tuple(dtype.value for dtype in DType if dtype.value in KV_DTYPES)
"""Names of the types that a cache may have."""

_TORCH = {name: DType(name).torch_dtype for name in CACHE_DTYPES if name != DType.NVFP4}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_E2M1 = 6.0


class QuantizedKV:
    """A cache in NVFP4: K and V in four bits, and the scales of their blocks.

    Attributes:
        k: uint8 [num_pages, page_size, num_kv_heads, head_dim / 2] (NHD; HND likewise), or without
            pages [num_kv_tokens, num_kv_heads, head_dim / 2]: two elements a byte, the even one in
            the low half. Any strides but the last, which is 1.
        v: likewise; its head_dim may differ.
        k_block_scales: float8_e4m3fn [.., head_dim / 16], the dimensions before as those of ``k``,
            with strides of their own. uint8 is read as the bytes of it.
        v_block_scales: likewise of ``v``.
        scale_layout: "linear", as described.
    """

    __slots__ = ("k", "k_block_scales", "scale_layout", "v", "v_block_scales")

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        k_block_scales: Tensor,
        v_block_scales: Tensor,
        scale_layout: str = "linear",
    ) -> None:
        """Hold the tensors; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: a shape, stride or device doesn't fit, or ``scale_layout`` is not "linear".
        """
        if not isinstance(scale_layout, str) or scale_layout != "linear":
            raise ValueError(
                f"scale_layout is {shown(scale_layout)}: expected 'linear', [.., head_dim / 16] in "
                "the order of the cache (TensorRT-LLM interleaves the scales of V by 4 tokens, "
                "which is not built)"
            )
        self.k, self.k_block_scales = _check_blocks("k", k, k_block_scales)
        self.v, self.v_block_scales = _check_blocks("v", v, v_block_scales)
        self.scale_layout = scale_layout
        check_device("v", v, k.device)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            raise AttributeError(f"QuantizedKV.{name} can't be replaced: make another QuantizedKV")
        object.__setattr__(self, name, value)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, the scales of blocks last."""
        return self.k, self.v, self.k_block_scales, self.v_block_scales

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"QuantizedKV.{name} can't be deleted")

    def __repr__(self) -> str:
        """Show the shapes."""
        return f"QuantizedKV(k={list(self.k.shape)}, v={list(self.v.shape)}, {self.scale_layout})"

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.k.device


KVCache = Tensor | tuple[Tensor, Tensor] | QuantizedKV


def cache_of(tensors: Sequence[Tensor]) -> KVCache:
    """Return the cache of its tensors."""
    if len(tensors) == 1:
        return tensors[0]
    if len(tensors) == 2:
        return tensors[0], tensors[1]
    if len(tensors) == 4:
        k, v, k_scales, v_scales = tensors
        return QuantizedKV(k, v, k_scales, v_scales)
    raise ValueError(f"kv_cache has {len(tensors)} tensors: expected 1, 2 (K, V), or 4 of NVFP4")


def tensors_of(kv_cache: KVCache) -> tuple[Tensor, ...]:
    """Return the tensors of a cache: one, K and V, or those of NVFP4, scales of blocks last."""
    if isinstance(kv_cache, Tensor):
        return (kv_cache,)
    if isinstance(kv_cache, QuantizedKV):
        return kv_cache.tensors
    return tuple(kv_cache)


"""A cache as callers give it: K and V in one tensor, a pair of them, or four of NVFP4."""


def _check_blocks(name: str, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    check_tensor(name, data, (torch.uint8,))
    check_tensor(f"{name}_block_scales", scales, (torch.float8_e4m3fn, torch.uint8))
    if data.dim() not in (3, 4):
        raise ValueError(
            f"{name} has shape {list(data.shape)}: expected four dimensions, or three without "
            "pages, the last head_dim / 2"
        )
    head_dim = 2 * data.shape[-1]
    if head_dim == 0 or head_dim % NVFP4_BLOCK:
        raise ValueError(
            f"{name} has shape {list(data.shape)}, a head_dim of {head_dim}: expected a multiple "
            f"of {NVFP4_BLOCK}"
        )
    wanted = [*data.shape[:-1], head_dim // NVFP4_BLOCK]
    if list(scales.shape) != wanted:
        raise ValueError(
            f"{name}_block_scales has shape {list(scales.shape)}: expected {wanted}, a scale for "
            f"{NVFP4_BLOCK} elements of {name}"
        )
    check_device(f"{name}_block_scales", scales, data.device)
    check_last_stride(name, data)
    check_last_stride(f"{name}_block_scales", scales)
    return data, scales.view(torch.float8_e4m3fn)


def quantize_kv(
    values: Tensor, dtype: torch.dtype | str, *, scale: float | Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what a cache of ``dtype`` stores for ``values``: the definition, on any device.

    Args:
        values: [.., num_kv_heads, head_dim], float16, bfloat16 or float32, any strides.
        dtype: float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or "nvfp4".
        scale: what a stored value is multiplied with: a number, or float32 [], [1] or
            [num_kv_heads]; 1 when None. Refused where the type is not quantised.

    Returns:
        A new tensor like ``values`` of ``dtype``, the same bits where they have that type; for
        "nvfp4" the pair of uint8 [.., head_dim / 2] and float8_e4m3fn [.., head_dim / 16].

    Raises:
        TypeError: ``values`` or ``scale`` is of another type.
        ValueError: ``dtype`` is no type of caches, a shape or device doesn't fit, or ``scale`` is a
            number that is 0 or no finite float32.
    """
    check_tensor("values", values, _VALUES)
    name = _known(dtype)
    scaled = values.float()
    factor = _factor(scale, name, values)
    tiny = torch.finfo(torch.float32).tiny
    if factor is not None and not isinstance(scale, Tensor) and abs(float(factor)) < tiny:
        raise ValueError(f"scale is {scale}: values are divided by it, expected {tiny:.3g} or more")
    if values.dtype is _TORCH.get(name):
        return values.clone()  # nothing is computed, so bits are kept
    if factor is not None:
        scaled = scaled * (1.0 / factor)
    if name == "nvfp4":
        return _to_nvfp4(scaled)
    if name == DType.INT8:
        return scaled.round().clamp(-128, 127).nan_to_num(nan=0.0).to(torch.int8)
    stored = saturated(scaled, _TORCH[name])
    if name not in QUANTISED_DTYPES:
        return stored
    # One NaN: that of the hardware's conversion.
    return stored.view(torch.uint8).masked_fill(scaled.isnan(), 0x7F).view(stored.dtype)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` as numbers of a floating-point type, as the definition says."""
    limits = torch.finfo(dtype)
    return values.clamp(limits.min, limits.max).to(dtype)


def dequantize_kv(
    stored: Tensor,
    *,
    dtype: torch.dtype | str | None = None,
    scale: float | Tensor | None = None,
    block_scales: Tensor | None = None,
) -> Tensor:
    """Return the values that a cache stores, as float32; products with a scale saturate.

    Args:
        stored: [.., num_kv_heads, head_dim]; for NVFP4 uint8 [.., head_dim / 2].
        dtype: the type of bytes: needed when ``stored`` is uint8; of 8 bits then, or "nvfp4".
        scale: as in ``quantize_kv``.
        block_scales: float8_e4m3fn [.., head_dim / 16], for NVFP4 only.

    Raises:
        TypeError: a tensor is of another type.
        ValueError: the type is unknown, or ``block_scales`` or ``scale`` doesn't fit it.
    """
    if not isinstance(stored, Tensor):
        raise TypeError(f"stored is a {type(stored).__name__}: expected a tensor")
    name = _known(stored.dtype if dtype is None else dtype)
    if (block_scales is not None) != (name == "nvfp4"):
        given = "given" if block_scales is not None else "not given"
        raise ValueError(f"block_scales is {given} for values of {name}: NVFP4 has them, alone")
    if block_scales is not None:
        check_tensor("stored", stored, (torch.uint8,))
        _check_block_scales(stored, block_scales)
        values = _from_nvfp4(stored, block_scales)
    else:
        bytes_too = (torch.uint8,) if name in QUANTISED_DTYPES else ()
        check_tensor("stored", stored, (_TORCH[name], *bytes_too))
        values = stored.contiguous().view(_TORCH[name]).float()
    factor = _factor(scale, name, values)
    return values if factor is None else saturated(values * factor, torch.float32)


def _check_block_scales(stored: Tensor, block_scales: Tensor) -> None:
    check_tensor("block_scales", block_scales, (torch.float8_e4m3fn, torch.uint8))
    if stored.dim() == 0 or stored.shape[-1] % (NVFP4_BLOCK // 2):
        raise ValueError(
            f"stored has shape {list(stored.shape)}: expected [.., head_dim / 2], with a head_dim "
            f"that is a multiple of {NVFP4_BLOCK}"
        )
    wanted = [*stored.shape[:-1], 2 * stored.shape[-1] // NVFP4_BLOCK]
    if list(block_scales.shape) != wanted:
        raise ValueError(f"block_scales has shape {list(block_scales.shape)}: expected {wanted}")
    check_device("block_scales", block_scales, stored.device)


def _known(dtype: torch.dtype | str) -> str:
    name = dtype_name(dtype)
    if name not in CACHE_DTYPES:
        raise ValueError(f"dtype is {name}: expected one of {', '.join(CACHE_DTYPES)}")
    return name


def _factor(scale: float | Tensor | None, name: str, values: Tensor) -> float | Tensor | None:
    """Return the scale as it meets [.., num_kv_heads, head_dim]."""
    if scale is None:
        return None
    if name not in QUANTISED_DTYPES:
        raise ValueError(f"scale is given, but {name} is not quantised")
    if not isinstance(scale, Tensor):
        return torch.tensor(scale_value("scale", scale), dtype=torch.float32, device=values.device)
    num_kv_heads = values.shape[-2] if values.dim() > 1 else 1
    check_scale("scale", scale, values.device, num_kv_heads=num_kv_heads)
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, 1)


def _to_nvfp4(scaled: Tensor) -> tuple[Tensor, Tensor]:
    head_dim = scaled.shape[-1] if scaled.dim() else 1
    if head_dim % NVFP4_BLOCK:
        raise ValueError(
            f"values has shape {list(scaled.shape)}: head_dim must be a multiple of {NVFP4_BLOCK}"
        )
    blocks = scaled.reshape(*scaled.shape[:-1], head_dim // NVFP4_BLOCK, NVFP4_BLOCK)
    largest = blocks.abs().amax(dim=-1)  # NaN where one is
    scales = quantize_kv(largest / _LARGEST_E2M1, torch.float8_e4m3fn)
    assert isinstance(scales, Tensor)
    divisors = scales.float().unsqueeze(-1)
    codes = _to_e2m1(blocks / divisors).masked_fill(divisors == 0, 0).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def _to_e2m1(values: Tensor) -> Tensor:
    """Return codes of four bits. A tie goes to the neighbour whose code is even."""
    size = values.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for code, (low, high) in enumerate(itertools.pairwise(_E2M1)):
        middle = (low + high) / 2
        codes += (size >= middle) if code % 2 else (size > middle)
    signs = torch.signbit(values).to(torch.uint8) << 3
    return (codes | signs).masked_fill(values.isnan(), 0)


def _from_nvfp4(data: Tensor, scales: Tensor) -> Tensor:
    numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=data.device)
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    blocks = numbers[codes.long()].reshape(*scales.shape, NVFP4_BLOCK)
    block_scales = scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)
    # A scale that is NaN counts for zeros, too.
    return (blocks * block_scales).flatten(-2)
