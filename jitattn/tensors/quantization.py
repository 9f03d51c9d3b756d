"""What a cache stores for a value, in torch: the definition that every writer and reader follows.

A stored value times its scale is the value. What is stored is ``value * (1 / scale)``, computed in
float32, as the nearest number of the type, ties to even: numbers of the type come back. Where none
is near enough, infinities included, it is the largest finite one. NaN stays NaN (the byte 0x7f in
both FP8 types); int8 has none and stores 0.

NVFP4 has blocks of 16 elements along head_dim, each with a scale of type e4m3: the largest
magnitude of the block (after ``scale``) divided by 6, to the nearest e4m3. An
element is stored as the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 to its value divided by that, with
its sign, two in a byte. A block whose scale rounds to 0 is 0, and NaN makes its block NaN.

int4 has codes from 0 to 15, two in a byte, in blocks along head_dim ("int4": a row of a token and
head; "int4_g64", "int4_g32": 64 or 32 elements) with a scale and a zero of type float16: a value is
``code * scale + zero``, then times the scale of the cache. Of a block's values (divided by that
scale, limited to +-57344), the zero is the smallest and the scale a fifteenth of the difference to
the largest, both to the nearest float16, a zero of -0 as 0. A code is the nearest to ``(value -
zero) / scale`` in float32, ties to even, from 0 to 15; 0 where the scale is 0. NaN makes the scale
and the zero of its block NaN (0x7fff), the codes 0.

Twin: templates/include/jitattn/convert.cuh.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from jitattn.base.validate import shown
from jitattn.spec.dtype import BLOCK_DTYPES, KV_DTYPES, QUANTISED_DTYPES, DType, dtype_name
from jitattn.tensors.scales import check_scale, scale_value
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor

NVFP4_BLOCK = 16
"""Elements of a block of NVFP4, which share a scale."""

_VALUES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = tuple(dtype.value for dtype in DType if dtype.value in KV_DTYPES)
"""Names of the types that a cache may have."""

_TORCH = {name: DType(name).torch_dtype for name in CACHE_DTYPES if name not in BLOCK_DTYPES}
_BLOCKS = {dtype.value: dtype.blocks for dtype in DType if dtype.blocks is not None}
_SCALES = (torch.float8_e4m3fn, torch.uint8, torch.float16)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_E2M1 = 6.0
_LARGEST_CODE = 15.0
_LARGEST_INT4 = 57344.0  # of a value: with a scale that is rounded up, all are float16


class QuantizedKV:
    """A cache in four bits: K and V, and the scales of their blocks, with zeros of int4.

    Attributes:
        k: uint8 [num_pages, page_size, num_kv_heads, head_dim / 2] (NHD; HND likewise), or without
            pages [num_kv_tokens, num_kv_heads, head_dim / 2]: two elements a byte, the even one in
            the low half. Any strides but the last, which is 1.
        v: likewise; its head_dim may differ.
        k_block_scales: the dimensions before the last as those of ``k``, with strides of their own.
            NVFP4: float8_e4m3fn [.., head_dim / 16]; uint8 is read as the bytes of it.
            int4: float16 [.., blocks, 2], a scale and a zero of each block of a row: one block, or
            head_dim / 64, or head_dim / 32. The last two dimensions are contiguous.
        v_block_scales: likewise of ``v``.
        scale_layout: "linear", as described.
        kv_dtypes: names of the types that this may be a cache of. Several where a row of int4 has
            one block: "int4", and "int4_g64" or "int4_g32" of as many elements.
    """

    __slots__ = ("k", "k_block_scales", "kv_dtypes", "scale_layout", "v", "v_block_scales")

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
            raise ValueError(_why_not(scale_layout))
        self.k, self.k_block_scales = k, _check_blocks("k", k, k_block_scales)
        self.v, self.v_block_scales = v, _check_blocks("v", v, v_block_scales)
        self.scale_layout = scale_layout
        check_device("v", v, k.device)
        kinds = [
            _kinds(data, scales)
            for data, scales in ((k, self.k_block_scales), (v, self.v_block_scales))
        ]
        self.kv_dtypes = tuple(kind for kind in kinds[0] if kind in kinds[1])
        if not self.kv_dtypes:
            raise ValueError(
                f"v_block_scales is of {' or '.join(kinds[1])}: expected "
                f"{' or '.join(kinds[0])}, as k_block_scales"
            )

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            raise AttributeError(f"QuantizedKV.{name} can't be replaced: make another QuantizedKV")
        object.__setattr__(self, name, value)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, the scales of blocks last."""
        return self.k, self.v, self.k_block_scales, self.v_block_scales

    @property
    def kv_dtype(self) -> str:
        """The first of ``kv_dtypes``: what a call that is not told takes it for."""
        return self.kv_dtypes[0]

    @property
    def scale_bytes(self) -> tuple[Tensor, Tensor]:
        """The scales of K and of V as bytes, uint8 [.., bytes of a row]."""
        return bytes_of_scales(self.k_block_scales), bytes_of_scales(self.v_block_scales)

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
    raise ValueError(
        f"kv_cache has {len(tensors)} tensors: expected 1, 2 (K, V), or 4 of a QuantizedKV"
    )


def tensors_of(kv_cache: KVCache) -> tuple[Tensor, ...]:
    """Return the tensors of a cache: one, K and V, or those of a QuantizedKV, scales last."""
    if isinstance(kv_cache, Tensor):
        return (kv_cache,)
    if isinstance(kv_cache, QuantizedKV):
        return kv_cache.tensors
    return tuple(kv_cache)


"""A cache as callers give it: K and V in one tensor, a pair of them, or a QuantizedKV."""


def _why_not(scale_layout: object) -> str:
    """Return why there is no such layout."""
    why = "TensorRT-LLM interleaves the scales of V by 4 tokens, which is not built"
    if scale_layout == "channel":
        why = (
            "KIVI's scales of K, of a channel and a group of tokens, are not built: they are known "
            "when the last token of a group is, and tokens are written one by one"
        )
    return (
        f"scale_layout is {shown(scale_layout)}: expected 'linear', the blocks of a row beside "
        f"each other and rows in the order of the cache ({why})"
    )


def bytes_of_scales(scales: Tensor) -> Tensor:
    """Return the scales of blocks, and zeros, as uint8 [.., bytes of a row], a view."""
    rows = scales.flatten(-2) if scales.dtype is torch.float16 else scales
    return rows.view(torch.uint8)


def _check_blocks(name: str, data: Tensor, scales: Tensor) -> Tensor:
    """Check K or V and its scales, and return these in their type."""
    check_tensor(name, data, (torch.uint8,))
    check_tensor(f"{name}_block_scales", scales, _SCALES)
    if data.dim() not in (3, 4):
        raise ValueError(
            f"{name} has shape {list(data.shape)}: expected four dimensions, or three without "
            "pages, the last head_dim / 2"
        )
    _check_scales(name, data, f"{name}_block_scales", scales)
    check_last_stride(name, data)
    check_last_stride(f"{name}_block_scales", scales)
    if scales.dtype is not torch.float16:
        return scales.view(torch.float8_e4m3fn)
    if scales.shape[-2] > 1 and scales.stride(-2) != 2:
        raise ValueError(
            f"{name}_block_scales has strides {list(scales.stride())}: the scales and zeros of a "
            "row must be contiguous"
        )
    return scales


def _check_scales(data_name: str, data: Tensor, name: str, scales: Tensor) -> None:
    """Check that scales [.., head_dim / 16] or [.., blocks, 2] are those of ``data``."""
    head_dim, has_zeros = 2 * data.shape[-1], scales.dtype is torch.float16
    if head_dim == 0 or head_dim % NVFP4_BLOCK:
        raise ValueError(
            f"{data_name} has shape {list(data.shape)}, a head_dim of {head_dim}: expected a "
            f"multiple of {NVFP4_BLOCK}"
        )
    kinds = [kind for kind in _BLOCKS.values() if kind.has_zeros is has_zeros]
    counts = sorted({kind.count(head_dim) for kind in kinds if head_dim % kind.multiple == 0})
    pair = (2,) if has_zeros else ()
    if tuple(scales.shape) not in [(*data.shape[:-1], count, *pair) for count in counts]:
        wanted = " or ".join(str([*data.shape[:-1], count, *pair]) for count in counts)
        what = (
            "a scale and a zero for each block"
            if has_zeros
            else f"a scale for {NVFP4_BLOCK} elements"
        )
        raise ValueError(
            f"{name} has shape {list(scales.shape)}: expected {wanted}, {what} of {data_name}"
        )
    check_device(name, scales, data.device)


def _kinds(data: Tensor, scales: Tensor) -> list[str]:
    """Return the types that ``data`` may be of, with these scales of its blocks."""
    head_dim, has_zeros = 2 * data.shape[-1], scales.dtype is torch.float16
    return [
        name
        for name, kind in _BLOCKS.items()
        if kind.has_zeros is has_zeros
        and head_dim % kind.multiple == 0
        and kind.row_bytes(head_dim) == bytes_of_scales(scales).shape[-1]
    ]


def quantize_kv(
    values: Tensor, dtype: torch.dtype | str, *, scale: float | Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what a cache of ``dtype`` stores for ``values``: the definition, on any device.

    Args:
        values: [.., num_kv_heads, head_dim], float16, bfloat16 or float32, any strides.
        dtype: float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, "nvfp4", "int4",
            "int4_g64" or "int4_g32".
        scale: what a stored value is multiplied with: a number, or float32 [], [1] or
            [num_kv_heads]; 1 when None. Refused where the type is not quantised.

    Returns:
        A new tensor like ``values`` of ``dtype``, the same bits where they have that type; for
        four bits a pair: uint8 [.., head_dim / 2], and of "nvfp4" float8_e4m3fn [..,
        head_dim / 16], of int4 float16 [.., blocks, 2], scales and zeros.

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
    if name in _BLOCKS:
        return _to_blocks(scaled, name)
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
        stored: [.., num_kv_heads, head_dim]; of four bits uint8 [.., head_dim / 2].
        dtype: the type of bytes: needed when ``stored`` is uint8; of 8 or 4 bits then.
        scale: as in ``quantize_kv``.
        block_scales: of four bits, as in ``QuantizedKV``, or their bytes, uint8 [.., bytes of a
            row].

    Raises:
        TypeError: a tensor is of another type.
        ValueError: the type is unknown, or ``block_scales`` or ``scale`` doesn't fit it.
    """
    if not isinstance(stored, Tensor):
        raise TypeError(f"stored is a {type(stored).__name__}: expected a tensor")
    name = _known(stored.dtype if dtype is None else dtype)
    if (block_scales is not None) != (name in _BLOCKS):
        given = "given" if block_scales is not None else "not given"
        raise ValueError(
            f"block_scales is {given} for values of {name}: {', '.join(BLOCK_DTYPES)} have them, "
            "alone"
        )
    if block_scales is not None:
        check_tensor("stored", stored, (torch.uint8,))
        scales = _typed_scales(stored, block_scales, name)
        values = _from_nvfp4(stored, scales) if name == "nvfp4" else _from_int4(stored, scales)
    else:
        bytes_too = (torch.uint8,) if name in QUANTISED_DTYPES else ()
        check_tensor("stored", stored, (_TORCH[name], *bytes_too))
        values = stored.contiguous().view(_TORCH[name]).float()
    factor = _factor(scale, name, values)
    return values if factor is None else saturated(values * factor, torch.float32)


def _typed_scales(stored: Tensor, block_scales: Tensor, name: str) -> Tensor:
    """Return the scales of ``stored``, checked, in their type."""
    kind = _BLOCKS[name]
    wanted_dtype = torch.float16 if kind.has_zeros else torch.float8_e4m3fn
    check_tensor("block_scales", block_scales, (wanted_dtype, torch.uint8))
    if stored.dim() == 0 or 2 * stored.shape[-1] % kind.multiple:
        raise ValueError(
            f"stored has shape {list(stored.shape)}: expected [.., head_dim / 2], with a head_dim "
            f"that is a multiple of {kind.multiple}"
        )
    head_dim = 2 * stored.shape[-1]
    has_pairs = block_scales.dtype is torch.float16
    wanted = [
        *stored.shape[:-1],
        *((kind.count(head_dim), 2) if has_pairs else (kind.row_bytes(head_dim),)),
    ]
    if list(block_scales.shape) != wanted:
        raise ValueError(f"block_scales has shape {list(block_scales.shape)}: expected {wanted}")
    check_device("block_scales", block_scales, stored.device)
    if has_pairs or not kind.has_zeros:
        return block_scales.view(wanted_dtype)
    pairs = block_scales.contiguous().view(torch.float16)
    return pairs.view(*stored.shape[:-1], kind.count(head_dim), 2)


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


def _to_blocks(scaled: Tensor, name: str) -> tuple[Tensor, Tensor]:
    kind = _BLOCKS[name]
    head_dim = scaled.shape[-1] if scaled.dim() else 1
    if head_dim % kind.multiple:
        raise ValueError(
            f"values has shape {list(scaled.shape)}: head_dim must be a multiple of {kind.multiple}"
        )
    dims = kind.dims or max(head_dim, 1)
    blocks = scaled.reshape(*scaled.shape[:-1], head_dim // dims, dims)
    codes, scales = _to_int4(blocks) if kind.has_zeros else _to_nvfp4(blocks)
    codes = codes.flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def _to_int4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [.., blocks, dims], and scales and zeros [.., blocks, 2]."""
    low, high = (
        x.clamp(-_LARGEST_INT4, _LARGEST_INT4) for x in (blocks.amin(dim=-1), blocks.amax(dim=-1))
    )
    # A zero of -0 becomes 0.
    scales = torch.stack(((high - low) / _LARGEST_CODE, low + 0.0), dim=-1).half()
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    codes = ((blocks - zero) / scale).round().clamp(0, _LARGEST_CODE)
    codes = codes.where(scale > 0, 0.0).to(torch.uint8)  # no NaN, either
    bits = scales.view(torch.int16).masked_fill(low.isnan().unsqueeze(-1), 0x7FFF)
    return codes, bits.view(torch.float16)


def _from_int4(data: Tensor, scales: Tensor) -> Tensor:
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    num_blocks = scales.shape[-2]
    dims = codes.shape[-1] // max(num_blocks, 1)
    blocks = codes.float().reshape(*codes.shape[:-1], num_blocks, dims)
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    return (blocks * scale + zero).flatten(-2)


def _to_nvfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [.., blocks, dims] and scales [.., blocks]."""
    largest = blocks.abs().amax(dim=-1)  # NaN where one is
    scales = quantize_kv(largest / _LARGEST_E2M1, torch.float8_e4m3fn)
    assert isinstance(scales, Tensor)
    divisors = scales.float().unsqueeze(-1)
    return _to_e2m1(blocks / divisors).masked_fill(divisors == 0, 0), scales


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
