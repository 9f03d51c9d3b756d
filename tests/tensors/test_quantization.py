"""What caches store: the definition, and the kernels' header compiled for the CPU."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jitattn
from tests.emulator.cuda_runtime import (
    CONVERSIONS,
    PAIRS,
    QUALIFIERS,
    TYPES,
    WORDS,
    library_of,
    with_headers,
)

FP8 = {"float8_e4m3fn": (448.0, 0x7E), "float8_e5m2": (57344.0, 0x7B)}


def stored(values: Tensor, dtype: str, scale: float | Tensor | None = None) -> Tensor:
    found = jitattn.quant.quantize_kv(values, dtype, scale=scale)
    assert isinstance(found, Tensor)
    return found


def byte_of(values: list[float], dtype: str, scale: float | None = None) -> list[int]:
    return stored(torch.tensor(values), dtype, scale).view(torch.uint8).tolist()


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8)
def test_every_number_of_fp8_stays_itself(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(getattr(torch, dtype)).float()
    finite = values.isfinite()
    assert torch.equal(stored(values, dtype).view(torch.uint8)[finite], codes[finite])


def test_every_number_of_int8_stays_itself() -> None:
    values = torch.arange(-128, 128)
    assert torch.equal(stored(values.float(), "int8").long(), values)


def test_every_number_of_nvfp4_stays_itself() -> None:
    """Blocks that hold a 6 have the scale that they were made with."""
    codes = torch.arange(256).repeat(8, 1).to(torch.uint8)
    codes[:, ::8] = 0x77  # a 6 in each block
    codes[codes == 0x08] = 0
    scales = torch.tensor([2.0**-6, 1.0, 0.875, 448.0, 240.0, 3.5, 0.0625, 1.25])
    scales = scales[:, None].expand(8, 32).to(torch.float8_e4m3fn)
    values = jitattn.quant.dequantize_kv(codes, dtype="nvfp4", block_scales=scales)
    data, block_scales = jitattn.quant.quantize_kv(values, "nvfp4")
    assert torch.equal(block_scales.float(), scales.float())
    assert torch.equal(data, codes)


def test_c25_overflow_saturates() -> None:
    """Finite overflow and infinities become the largest number, NaN stays NaN: 0x7f."""
    values = [448.0, 464.0, 464.0001, 465.0, 1e9, math.inf, -1e9, math.nan, 2.0**-9, 2.0**-10, -0.0]
    want = [0x7E] * 6 + [0xFE, 0x7F, 0x01, 0x00, 0x80]
    assert byte_of(values, "float8_e4m3fn") == want
    assert byte_of([10 * value for value in values], "float8_e4m3fn", 10.0) == want
    assert byte_of([57344.0, 61440.0, 1e9, math.nan], "float8_e5m2") == [0x7B, 0x7B, 0x7B, 0x7F]


def test_c24_bytes_are_those_of_the_type_asked_for() -> None:
    values = [1.0, 2.0, 3.5, 0.25, -1.0]
    assert byte_of(values, "float8_e5m2") == [0x3C, 0x40, 0x43, 0x34, 0xBC]
    assert byte_of(values, "float8_e4m3fn") == [0x38, 0x40, 0x46, 0x28, 0xB8]


def test_int8_rounds_to_even_and_saturates() -> None:
    values = torch.tensor([0.5, 1.5, -0.5, -2.5, 127.5, 200.0, -129.0, math.inf, math.nan])
    assert stored(values, "int8").tolist() == [0, 2, 0, -2, 127, 127, -128, 127, 0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_types_saturate(dtype: str) -> None:
    limit = torch.finfo(getattr(torch, dtype)).max
    values = torch.tensor([3e38, math.inf, -math.inf, math.nan, 1.0])
    found = stored(values.float(), dtype).float()
    want = torch.tensor([min(3e38, limit), limit, -limit, math.nan, 1.0])
    assert torch.equal(found[[1, 2, 4]], want[[1, 2, 4]])
    assert math.isnan(found[3])


def test_nvfp4_blocks() -> None:
    values = torch.zeros(4, 16)
    values[0] = torch.linspace(-6, 6, 16)
    values[1, 3] = math.nan
    values[2] = 1e-5  # its scale is 0
    values[3, 0] = math.inf
    data, scales = jitattn.quant.quantize_kv(values, "nvfp4")
    assert scales.dtype == torch.float8_e4m3fn
    assert data.dtype == torch.uint8
    assert scales[:, 0].view(torch.uint8).tolist() == [0x38, 0x7F, 0x00, 0x7E]
    found = jitattn.quant.dequantize_kv(data, dtype="nvfp4", block_scales=scales)
    assert bool(((found[0] - values[0]).abs() <= 1.0).all())
    assert bool(found[1].isnan().all())
    assert data[2].eq(0).all()
    assert found[3, 0] == 6 * 448


def test_nvfp4_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    values = torch.tensor([[*ties, *(-tie for tie in ties)]])
    data, scales = jitattn.quant.quantize_kv(values, "nvfp4")
    assert scales.float().item() == 1.0
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    found = jitattn.quant.dequantize_kv(data, dtype="nvfp4", block_scales=scales)
    assert found.tolist() == [[*want, *(-value for value in want)]]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "nvfp4"])
def test_scales_of_heads(dtype: str) -> None:
    values = torch.randn(5, 3, 32)
    scale = torch.tensor([0.5, 1.0, 4.0])
    want = jitattn.quant.quantize_kv(values / scale[:, None], dtype)
    found = jitattn.quant.quantize_kv(values, dtype, scale=scale)
    pairs = zip(want, found, strict=True) if isinstance(found, tuple) else [(want, found)]
    for a, b in pairs:
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


REFUSED = {
    "type": (lambda: jitattn.quant.quantize_kv(torch.zeros(1, 16), "float64"), "dtype is float64"),
    "unquantised": (
        lambda: jitattn.quant.quantize_kv(torch.zeros(1, 16), "bfloat16", scale=2.0),
        "scale is given, but bfloat16",
    ),
    "integers": (
        lambda: jitattn.quant.quantize_kv(torch.zeros(4, 16).int(), "int8"),
        "values.*int32",
    ),
    "head_dim": (lambda: jitattn.quant.quantize_kv(torch.zeros(4, 24), "nvfp4"), "multiple of 16"),
    "heads": (
        lambda: jitattn.quant.quantize_kv(torch.zeros(4, 3, 16), "int8", scale=torch.ones(2)),
        r"scale has shape \[2\]: expected \[\], \[1\] or \[3\]",
    ),
    "block scales": (
        lambda: jitattn.quant.dequantize_kv(torch.zeros(4, 8, dtype=torch.uint8), dtype="nvfp4"),
        "block_scales is not given",
    ),
    "no scale": (
        lambda: jitattn.quant.quantize_kv(torch.zeros(1, 16), "int8", scale=0.0),
        "scale is 0",
    ),
    "a scale that is text": (
        lambda: jitattn.quant.dequantize_kv(torch.zeros(1, 16).to(torch.int8), scale="1"),  # type: ignore[arg-type]
        "scale is a str",
    ),
    "a scale elsewhere": (
        lambda: jitattn.quant.quantize_kv(
            torch.zeros(1, 16), "int8", scale=torch.ones(1, device="meta")
        ),
        "scale is on meta",
    ),
    "a list": (lambda: jitattn.quant.dequantize_kv([1]), "stored is a list"),  # type: ignore[arg-type]
    "bytes of 16 bits": (
        lambda: jitattn.quant.dequantize_kv(torch.zeros(4, 8, dtype=torch.uint8), dtype="bfloat16"),
        "stored has dtype uint8",
    ),
    "block scales of another shape": (
        lambda: jitattn.quant.dequantize_kv(
            torch.zeros(4, 8, dtype=torch.uint8),
            dtype="nvfp4",
            block_scales=torch.zeros(4, 2).to(torch.float8_e4m3fn),
        ),
        r"block_scales has shape \[4, 2\]: expected \[4, 1\]",
    ),
    "a number in NVFP4": (
        lambda: jitattn.quant.quantize_kv(torch.zeros(()), "nvfp4"),
        "multiple of 16",
    ),
    "bytes of no type": (
        lambda: jitattn.quant.dequantize_kv(torch.zeros(4, 8, dtype=torch.uint8)),
        "dtype is uint8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, match = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def test_values_of_the_type_keep_their_bits() -> None:
    values = torch.tensor([0x7C00, 0x7E01, 0x3C00], dtype=torch.int16).view(torch.float16)
    stored = jitattn.quant.quantize_kv(values, "float16")
    assert isinstance(stored, torch.Tensor)
    assert torch.equal(stored.view(torch.int16), values.view(torch.int16))
    assert stored.data_ptr() != values.data_ptr()


# --- QuantizedKV ----------------------------------------------------------------------------------


def nvfp4_cache(**others: object) -> jitattn.QuantizedKV:
    data = torch.zeros(3, 4, 2, 32, dtype=torch.uint8)
    scales = torch.zeros(3, 4, 2, 4).to(torch.float8_e4m3fn)
    given = {"k": data, "v": data, "k_block_scales": scales, "v_block_scales": scales}
    return jitattn.QuantizedKV(**(given | others))  # type: ignore[arg-type]


def test_quantized_kv_holds_its_tensors() -> None:
    data = torch.zeros(3, 4, 2, 32, dtype=torch.uint8)
    cache = nvfp4_cache(k=data, k_block_scales=torch.zeros(3, 4, 2, 4, dtype=torch.uint8))
    assert cache.k is data
    assert cache.k_block_scales.dtype == torch.float8_e4m3fn
    assert cache.scale_layout == "linear"
    with pytest.raises(AttributeError, match="can't be replaced"):
        cache.k = data


@pytest.mark.parametrize(
    ("others", "match"),
    [
        ({"scale_layout": "interleaved"}, "scale_layout is 'interleaved'"),
        ({"k": torch.zeros(3, 4, 2, 32)}, "k has dtype float32"),
        ({"k": torch.zeros(2, 32, dtype=torch.uint8)}, "four dimensions, or three without pages"),
        ({"v": torch.zeros(3, 4, 2, 12, dtype=torch.uint8)}, "head_dim of 24"),
        ({"v_block_scales": torch.zeros(3, 4, 2, 2, dtype=torch.uint8)}, "v_block_scales has sh"),
        ({"v_block_scales": torch.zeros(3, 4, 2, 4)}, "v_block_scales has dtype float32"),
        ({"v": torch.zeros(3, 4, 32, 2, dtype=torch.uint8).transpose(2, 3)}, "contiguous"),
    ],
)
def test_quantized_kv_refuses(others: dict[str, object], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        nvfp4_cache(**others)


# --- the kernels' header --------------------------------------------------------------------------

HOST = f"{QUALIFIERS}{WORDS}namespace jitattn {{{PAIRS}{TYPES}{CONVERSIONS}}}"
CONVERT = '#include "jitattn/convert.cuh"\n'
CALL = """
using namespace jitattn;
extern "C" void convert(int type, const float* values, int64_t count, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = values[i];
    out[i] = type == 0   ? pack_saturated<Float8E4M3>(x, x) & 0xff
             : type == 1 ? pack_saturated<Float8E5M2>(x, x) >> 8
             : type == 2 ? pack_saturated<Int8>(x, x) & 0xff
             : type == 3 ? pack_e2m1(x, 0.f, 1.f)
             : type == 4 ? block_scale(x)
                         : __float_as_uint(0.f);
  }
}
extern "C" float to_float(int type, uint32_t code) {
  return type == 0   ? e4m3_to_float(code)
         : type == 1 ? e5m2_to_float(code)
         : type == 2 ? int8_to_float(code)
                     : e2m1_to_float(code);
}
"""
Convert = Callable[[str, Tensor], Tensor]
TYPES = ["float8_e4m3fn", "float8_e5m2", "int8", "e2m1", "block scale"]


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = library_of(
        with_headers(CONVERT, ("prelude", "ptx", "types", "fp8")) + CALL, begin=HOST
    )
    loaded.to_float.restype = ctypes.c_float
    return loaded


def converted(header: ctypes.CDLL, kind: str, values: Tensor) -> Tensor:
    out = torch.empty(len(values), dtype=torch.int32)
    header.convert(
        TYPES.index(kind),
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_int64(len(values)),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def every_kind_of_float() -> Tensor:
    """Random bits, all floats that have 12 significant bits, and ties with their neighbours."""
    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=rng).to(torch.int32)
    short = (torch.arange(2**20) << 12).to(torch.int32)
    numbers = torch.cat([bits.view(torch.float32), short.view(torch.float32)])
    halves = torch.arange(2**16).to(torch.int16).view(torch.float16).float()
    near = torch.cat([halves, halves.nextafter(torch.tensor(9e9)), halves / 3])
    return torch.cat([numbers, near, -near, torch.randn(50_000, generator=rng) * 3])


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_header_has_the_bytes_of_the_definition(header: ctypes.CDLL, kind: str) -> None:
    values = every_kind_of_float()
    want = stored(values, kind).view(torch.uint8).int()
    assert torch.equal(converted(header, kind, values), want)


def test_header_has_the_blocks_of_the_definition(header: ctypes.CDLL) -> None:
    values = every_kind_of_float()
    values = values[values.abs() <= 6]
    blocks = torch.zeros(len(values), 16)
    blocks[:, 0], blocks[:, 1] = values, 6.0
    data, scales = jitattn.quant.quantize_kv(blocks, "nvfp4")
    assert bool((scales.float() == 1).all())
    assert torch.equal(converted(header, "e2m1", values) & 15, (data[:, 0] & 15).int())


def test_header_has_the_block_scales_of_the_definition(header: ctypes.CDLL) -> None:
    values = every_kind_of_float().abs()
    _, scales = jitattn.quant.quantize_kv(values[:, None].expand(-1, 16), "nvfp4")
    found = converted(header, "block scale", values.contiguous())
    assert torch.equal(found, scales[:, 0].view(torch.uint8).int())


def test_header_reads_what_it_writes(header: ctypes.CDLL) -> None:
    for kind, dtype in enumerate(("float8_e4m3fn", "float8_e5m2", "int8")):
        codes = torch.arange(256, dtype=torch.uint8)
        want = jitattn.quant.dequantize_kv(codes, dtype=dtype)
        found = torch.tensor([header.to_float(kind, ctypes.c_uint32(code)) for code in range(256)])
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    ones = torch.ones(1, 1).to(torch.float8_e4m3fn)
    for low, high in itertools.product(range(16), repeat=2):
        byte = torch.full((1, 8), low | high << 4, dtype=torch.uint8)
        want = jitattn.quant.dequantize_kv(byte, dtype="nvfp4", block_scales=ones)[0, :2]
        found = torch.tensor([header.to_float(3, ctypes.c_uint32(code)) for code in (low, high)])
        assert torch.equal(found, want)
