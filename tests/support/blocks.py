"""Tokens of caches of four bits, as tests hold them: bytes of a row's numbers, then its scales."""

from __future__ import annotations

import torch
from torch import Tensor

import jitattn
from jitattn.spec.dtype import BlockFormat, DType
from jitattn.tensors.quantization import _to_e2m1, bytes_of_scales

Pair = tuple[Tensor, Tensor]

# Query tokens and tokens of requests, with which a card reads every code.
PAIRS = ((1, 4097), (1, 1), (3, 0), (0, 255), (64, 3000), (100, 133), (2, 5000), (5, 3), (1, -1))


def format_of(kv_dtype: str | None) -> BlockFormat | None:
    """The blocks of a type of caches; None where it has none."""
    return None if kv_dtype is None else DType(kv_dtype).blocks


def in_blocks(numbers: Tensor, kv_dtype: str) -> Tensor:
    """Tokens [.., D / 2 + bytes of scales]: exact where scales of powers of two can do it.

    Else of NVFP4 the nearest, and of int4 the nearest whose values every 16-bit type has.
    """
    kind = format_of(kv_dtype)
    assert kind is not None
    numbers = numbers.float()
    dims = kind.dims or numbers.shape[-1]
    blocks = numbers.unflatten(-1, (-1, dims))
    codes, scales = _affine(blocks) if kind.has_zeros else _symmetric(blocks)
    codes = codes.flatten(-2)
    data = codes[..., ::2] | codes[..., 1::2] << 4
    exact = jitattn.quant.dequantize_kv(data, dtype=kv_dtype, block_scales=scales)
    if not kind.has_zeros and not torch.equal(exact, numbers):
        data, scales = jitattn.quant.quantize_kv(numbers, kv_dtype)
    return torch.cat((data, bytes_of_scales(scales)), -1)


def _symmetric(blocks: Tensor) -> Pair:
    # The largest magnitude of a block becomes 4 or 6 where it is a number of four bits.
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = torch.exp2((largest / 6).log2().ceil()).clamp(2.0**-9, 2.0**8)
    return _to_e2m1(blocks / scales), scales[..., 0].to(torch.float8_e4m3fn)


def _affine(blocks: Tensor) -> Pair:
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    tight = torch.exp2(((high - low) / 15).log2().ceil()).clamp(2.0**-14, 2.0**12)
    is_exact = ((blocks - low) / tight).frac().eq(0).all(-1, keepdim=True)
    # Else zeros are multiples of scales, too: sums have few bits.
    wide = torch.exp2(((high - low) / 14).log2().ceil()).clamp(2.0**-14, 2.0**12)
    scale = torch.where(is_exact, tight, wide)
    zero = torch.where(is_exact, low, (low / wide).floor() * wide)
    codes = ((blocks - zero) / scale).round().clamp(0, 15).to(torch.uint8)
    return codes, torch.cat((scale, zero), -1).half()


def split_blocks(tokens: Tensor, kv_dtype: str = "nvfp4") -> Pair:
    """The numbers and the scales of tokens, these as ``QuantizedKV`` takes them."""
    size = head_dim_of(tokens, kv_dtype) // 2
    kind = format_of(kv_dtype)
    assert kind is not None
    scales = tokens[..., size:]
    if kind.has_zeros:
        return tokens[..., :size], scales.contiguous().view(torch.float16).unflatten(-1, (-1, 2))
    return tokens[..., :size], scales.view(torch.float8_e4m3fn)


def head_dim_of(tokens: Tensor, kv_dtype: str) -> int:
    """The elements of a row of so many bytes."""
    kind, size = format_of(kv_dtype), tokens.shape[-1]
    assert kind is not None
    dims = range(kind.multiple, 513, kind.multiple)
    return next(dim for dim in dims if dim // 2 + kind.row_bytes(dim) == size)


def values_of_blocks(tokens: Tensor, kv_dtype: str) -> Tensor:
    """What stored tokens stand for, as float32."""
    data, scales = split_blocks(tokens, kv_dtype)
    return jitattn.quant.dequantize_kv(data, dtype=kv_dtype, block_scales=scales)
