"""Caches of int4: the definition, what is refused, and the kernels' headers on the CPU."""

from __future__ import annotations

import ctypes
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import jitattn
from jitattn.jit.sources import TEMPLATES
from tests.emulator.attention import begin_of
from tests.emulator.cuda_runtime import (
    CONVERSIONS,
    PAIRS,
    QUALIFIERS,
    TYPES,
    WORDS,
    library_of,
    with_headers,
)
from tests.emulator.device import HOST
from tests.support.examples import examples

KINDS = ("int4", "int4_g64", "int4_g32")


def stored(values: Tensor, dtype: str = "int4") -> tuple[Tensor, Tensor]:
    data, scales = jitattn.quant.quantize_kv(values, dtype)
    return data, scales


def values_of(data: Tensor, scales: Tensor, dtype: str = "int4") -> Tensor:
    return jitattn.quant.dequantize_kv(data, dtype=dtype, block_scales=scales)


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
def test_every_code_stays_itself(dtype: str) -> None:
    """Blocks that hold codes 0 and 15 have the scale and the zero that they were made with."""
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 2, 128), generator=rng)
    codes[..., ::32], codes[..., 1::32] = 0, 15
    data = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    num_blocks = {"int4": 1, "int4_g64": 2, "int4_g32": 4}[dtype]
    exponents = torch.randint(-6, 6, (64, 2, num_blocks, 1), generator=rng)
    scale = 2.0**exponents
    zero = scale * torch.randint(-100, 100, scale.shape, generator=rng)
    scales = torch.cat((scale, zero), -1).half()
    found, found_scales = stored(values_of(data, scales, dtype), dtype)
    assert torch.equal(found_scales, scales)
    assert torch.equal(found, data)


@pytest.mark.parametrize("dtype", KINDS)
def test_errors_are_half_a_step(dtype: str) -> None:
    values = torch.randn(50, 2, 128, generator=torch.Generator().manual_seed(1))
    data, scales = stored(values, dtype)
    steps = scales[..., 0].float().repeat_interleave(128 // scales.shape[-2], -1)
    # Half a step, and what float16 rounds of 15 scales and a zero.
    assert bool(((values_of(data, scales, dtype) - values).abs() <= 0.51 * steps + 0.002).all())


def test_special_values() -> None:
    rows = torch.zeros(6, 16)
    rows[0, 3] = math.nan
    rows[1] = 2.5  # one value
    rows[2, 0], rows[2, 1] = math.inf, -math.inf
    rows[3] = -0.0
    rows[4] = 1e30
    rows[5, 7] = -7.5
    data, scales = stored(rows)
    assert scales.view(torch.int16)[0, 0].tolist() == [0x7FFF, 0x7FFF]
    assert data[[0, 1, 3, 4]].eq(0).all()
    assert scales[1].tolist() == [[0.0, 2.5]]
    assert values_of(data, scales)[2, :2].tolist() == [57316.0, -57344.0]  # a scale of 7644
    assert scales.view(torch.int16)[3].eq(0).all()  # no -0
    assert scales[4].tolist() == [[0.0, 57344.0]]
    assert scales[5].tolist() == [[0.5, -7.5]]
    assert values_of(data, scales)[5].tolist() == [0.0] * 7 + [-7.5] + [0.0] * 8
    assert values_of(data, scales)[0].isnan().all()


def test_scales_of_a_cache_come_first() -> None:
    values = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(2))
    factors = torch.tensor([0.5, 4.0])
    found = jitattn.quant.quantize_kv(values, "int4_g32", scale=factors)
    want = stored(values / factors[:, None], "int4_g32")
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    back = jitattn.quant.dequantize_kv(
        found[0], dtype="int4_g32", block_scales=found[1], scale=factors
    )
    assert torch.equal(back, values_of(*want, "int4_g32") * factors[:, None])


def test_scales_may_be_their_bytes() -> None:
    data, scales = stored(torch.randn(3, 2, 64), "int4_g32")
    rows = scales.flatten(-2).view(torch.uint8)
    assert rows.shape == (3, 2, 8)
    assert torch.equal(values_of(data, rows, "int4_g32"), values_of(data, scales, "int4_g32"))


# --- QuantizedKV ----------------------------------------------------------------------------------


def cache(head_dim: int, k_blocks: int, v_blocks: int, **others: object) -> jitattn.QuantizedKV:
    data = torch.zeros(3, 4, 2, head_dim // 2, dtype=torch.uint8)
    k, v = (torch.zeros(3, 4, 2, n, 2, dtype=torch.float16) for n in (k_blocks, v_blocks))
    given = {"k": data, "v": data, "k_block_scales": k, "v_block_scales": v}
    return jitattn.QuantizedKV(**(given | others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "num_blocks", "kv_dtypes"),
    [
        (128, 1, ("int4",)),
        (128, 2, ("int4_g64",)),
        (128, 4, ("int4_g32",)),
        (64, 1, ("int4", "int4_g64")),
        (32, 1, ("int4", "int4_g32")),
        (80, 1, ("int4",)),
        (96, 3, ("int4_g32",)),
    ],
)
def test_shapes_say_the_type(head_dim: int, num_blocks: int, kv_dtypes: tuple[str, ...]) -> None:
    kv = cache(head_dim, num_blocks, num_blocks)
    assert kv.kv_dtypes == kv_dtypes
    for kv_dtype in kv_dtypes:
        planner = jitattn.AttentionPlanner(
            num_qo_heads=2, num_kv_heads=2, head_dim=head_dim, page_size=4, kv_dtype=kv_dtype,
            device="cpu",
        )  # fmt: skip
        planner.bind(kv)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: cache(128, 1, 4), "v_block_scales is of int4_g32: expected int4, as k_block_sca"),
        (lambda: cache(128, 3, 1), r"k_block_scales has shape .*: expected \[3, 4, 2, 1, 2\] or"),
        (lambda: cache(80, 2, 1), r"expected \[3, 4, 2, 1, 2\], a scale and a zero for each bl"),
        (lambda: cache(24, 1, 1), "a head_dim of 24: expected a multiple of 16"),
        (
            lambda: cache(128, 2, 2, k_block_scales=torch.zeros(3, 4, 2, 4, 2).half()[..., ::2, :]),
            "k_block_scales has strides .*: the scales and zeros of a row must be contiguous",
        ),
        (
            lambda: cache(128, 1, 1, v_block_scales=torch.zeros(3, 4, 2, 8, dtype=torch.uint8)),
            "v_block_scales is of nvfp4: expected int4",
        ),
        (lambda: cache(128, 1, 1, scale_layout="channel"), "KIVI's scales of K, of a channel and"),
        (lambda: stored(torch.zeros(3, 2, 48), "int4_g32"), "must be a multiple of 32"),
        (lambda: values_of(torch.zeros(3, 16).byte(), torch.zeros(3, 2, 2).half()), "block_scales"),
    ],
)
def test_what_does_not_fit(make: object, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kv_dtype": "int4_g64", "head_dim": 96}, "head_dim=96 does not fit kv_dtype"),
        ({"kv_dtype": "int4_g32", "head_dim_vo": 80}, "head_dim_vo=80 does not fit kv_dtype"),
        ({"kv_dtype": "int4_g32"}, "a QuantizedKV of int4: the planner has kv_dtype=int4_g32"),
        ({"kv_dtype": "nvfp4"}, "a QuantizedKV of int4: the planner has kv_dtype=nvfp4"),
    ],
)
def test_planners_that_do_not_fit(arguments: dict[str, object], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        planner = jitattn.AttentionPlanner(
            **({"num_qo_heads": 2, "num_kv_heads": 2, "page_size": 4} | arguments), device="cpu"
        )
        planner.bind(cache(128, 1, 1))


# --- the kernels' headers -------------------------------------------------------------------------

WRITER = """
#include "jitattn/convert.cuh"
using namespace jitattn;
extern "C" uint32_t encode(const float* values, int count, uint8_t* codes) {
  float top = values[0], negated = -values[0];
  for (int i = 1; i < count; ++i) {
    const float x = values[i];
    top = top != top || x != x ? NAN : fmaxf(top, x);
    negated = negated != negated || x != x ? NAN : fmaxf(negated, -x);
  }
  const uint32_t pair = affine_scale(top, negated);
  const float scale = Half::to_float(pair), zero = Half::to_float(pair >> 16);
  for (int i = 0; i < count / 2; ++i) {
    codes[i] = pack_int4(values[2 * i], values[2 * i + 1], scale, zero);
  }
  return pair;
}
"""
FLOATS = st.floats(width=32) | st.floats(-8, 8, width=32) | st.sampled_from((0.0, -0.0, 1.0))


@pytest.fixture(scope="module")
def writer() -> ctypes.CDLL:
    begin = f"{QUALIFIERS}{WORDS}namespace jitattn {{{PAIRS}{TYPES}{CONVERSIONS}}}"
    return library_of(with_headers(WRITER, ("prelude", "ptx", "types", "fp8")), begin=begin)


@examples(300)
@given(block=st.lists(FLOATS, min_size=16, max_size=16), factor=st.sampled_from((1.0, 1e-6, 3e4)))
def test_header_writes_the_definition(
    writer: ctypes.CDLL, block: list[float], factor: float
) -> None:
    """Bit for bit, whatever a block holds."""
    values = torch.tensor(block) * factor
    data, scales = stored(values)
    codes = torch.empty(8, dtype=torch.uint8)
    pair = writer.encode(ctypes.c_void_p(values.data_ptr()), 16, ctypes.c_void_p(codes.data_ptr()))
    bits = scales.view(torch.int16).int() & 0xFFFF
    assert [pair & 0xFFFF, pair >> 16 & 0xFFFF] == bits.flatten().tolist()
    assert torch.equal(codes, data)


READER = """
using namespace jitattn;
extern "C" void decode(int is_half, uint32_t word, uint32_t pair, float* values) {
  const uint4 eight = is_half ? affine_eight<Half>(word, pair) : affine_eight<BFloat16>(word, pair);
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = words[i / 2];
    values[i] = is_half ? (i % 2 ? Half::high(word) : Half::low(word))
                        : (i % 2 ? BFloat16::high(word) : BFloat16::low(word));
  }
}
"""


@pytest.mark.parametrize("is_half", [True, False], ids=["fp16", "bf16"])
def test_header_reads_every_code(is_half: bool) -> None:
    """In each place of a word, with any scale and zero, rounded once to float16."""
    headers = [
        (TEMPLATES / f"include/jitattn/{name}.cuh").read_text() for name in ("blocks", "int4")
    ]
    text = re.sub("#include|#pragma", "//", "".join(headers))
    decode = library_of(HOST + begin_of("sm_80") + text + READER).decode
    rng = torch.Generator().manual_seed(3)
    codes = torch.arange(16).repeat(8, 1)
    codes = ((codes + torch.arange(8)[:, None] * 3) % 16).T  # all codes in each of eight places
    data = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).contiguous()
    words = data.view(torch.int32).flatten().tolist()
    pairs = torch.randn(24, 1, 2, generator=rng).half() * 10
    pairs[0], pairs[1], pairs[2] = 0.0, torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan])
    pairs[3] = torch.tensor([2.0**-24, -(2.0**-20)])  # subnormal
    room = (ctypes.c_float * 8)()
    for pair in pairs:
        bits = int(pair.view(torch.int32)) & 0xFFFFFFFF
        for row, word in enumerate(words):
            decode(int(is_half), ctypes.c_uint32(word & 0xFFFFFFFF), ctypes.c_uint32(bits), room)
            scale, zero = pair[0].double()
            want = (codes[row].double() * scale + zero).half()
            want = (want if is_half else want.bfloat16()).float()
            torch.testing.assert_close(torch.tensor(room), want, rtol=0, atol=0, equal_nan=True)
