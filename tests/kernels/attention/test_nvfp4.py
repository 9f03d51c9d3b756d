"""NVFP4 caches in planners: what is refused, how launches take them, and the kernels' header."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.jit.sources import TEMPLATES
from jitattn.kernels.common.params import ATTENTION_OFFSET
from jitattn.spec.params import BlockScales
from tests.emulator import launch_recorder
from tests.emulator.attention import begin_of
from tests.emulator.cuda_runtime import library_of
from tests.emulator.device import HOST

D_DATA, D_SCALES = 64, 8  # of 128 elements


def blocks(**others: object) -> jitattn.QuantizedKV:
    data = torch.zeros(3, 16, 2, D_DATA, dtype=torch.uint8)
    scales = torch.zeros(3, 16, 2, D_SCALES, dtype=torch.uint8)
    given = {"k": data, "v": data, "k_block_scales": scales, "v_block_scales": scales}
    return jitattn.QuantizedKV(**(given | others))  # type: ignore[arg-type]


def short(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


NVFP4_ARGUMENTS = {"num_qo_heads": 4, "num_kv_heads": 2, "kv_dtype": "nvfp4"}
REFUSED: dict[str, tuple[dict[str, object], Callable[[], object], str]] = {
    "a tensor": ({}, lambda: short(3, 2, 16, 2, 64), "a Tensor: with kv_dtype=nvfp4 expected a Q"),
    "a pair": ({}, lambda: (short(3, 16, 2, 64),) * 2, "expected a QuantizedKV"),
    "another kv_dtype": ({"kv_dtype": "int8"}, blocks, "planner has kv_dtype=int8"),
    "bf16": ({"kv_dtype": "bfloat16"}, blocks, "planner has kv_dtype=bfloat16"),
    "head_dim": ({"head_dim": 64}, blocks, r"kv_cache.k has .* expected \[16, 2, 32\]"),
    "head_dim_vo": ({"head_dim_vo": 64}, blocks, r"kv_cache.v has .* expected \[16, 2, 32\]"),
    "page_size": ({"page_size": 8}, blocks, r"kv_cache.k has .* expected \[8, 2, 64\]"),
    "heads": ({"num_kv_heads": 4}, blocks, r"kv_cache.k has .* expected \[16, 4, 64\]"),
    "layout": ({"kv_layout": "HND"}, blocks, "kv_cache.k has shape .* with kv_layout=HND"),
    "ragged": (
        {"page_table": "ragged", "page_size": None},
        blocks,
        r"kv_cache.k has shape .* expected \[num_kv_tokens, num_kv_heads, head_dim / 2\]",
    ),
    "no pages": (
        {},
        lambda: blocks(
            k=short(9, 2, 64),
            v=short(9, 2, 64),
            k_block_scales=short(9, 2, 8),
            v_block_scales=short(9, 2, 8),
        ),
        r"kv_cache.k has shape \[9, 2, 64\]: expected \[num_pages",
    ),
    "fewer pages of V": (
        {},
        lambda: blocks(v=short(2, 16, 2, 64), v_block_scales=short(2, 16, 2, 8)),
        "kv_cache.k has 3 pages and kv_cache.v 2",
    ),
    "shape of scales": (
        {},
        lambda: blocks(v_block_scales=short(3, 16, 2, 4)),
        r"v_block_scales has shape \[3, 16, 2, 4\]: expected \[3, 16, 2, 8\]",
    ),
    "dtype of scales": (
        {},
        lambda: blocks(k_block_scales=torch.zeros(3, 16, 2, 8)),
        "k_block_scales has dtype float32",
    ),
    "strides of scales": (
        {},
        lambda: blocks(k_block_scales=short(3, 16, 2, 16)[..., ::2]),
        "k_block_scales has strides .* must be contiguous",
    ),
    "missing scales": ({}, lambda: blocks(v_block_scales=None), "v_block_scales is a NoneType"),
    "device of scales": (
        {},
        lambda: blocks(v_block_scales=torch.zeros(3, 16, 2, 8, dtype=torch.uint8, device="meta")),
        "v_block_scales is on meta",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nvfp4_caches_that_do_not_fit(name: str) -> None:
    arguments, make, match = REFUSED[name]
    planner = jitattn.AttentionPlanner(**(NVFP4_ARGUMENTS | arguments), device="cpu")
    with pytest.raises((TypeError, ValueError), match=match):
        planner.bind(make())  # type: ignore[arg-type]


def test_nvfp4_scales_are_those_of_a_quantised_cache() -> None:
    planner = jitattn.AttentionPlanner(**NVFP4_ARGUMENTS, device="cpu")
    kv = planner.bind(blocks(), k_scale=0.5, v_scale=torch.ones(2))
    assert kv.k_scale is not None
    assert kv.k_scale.value == 0.5
    with pytest.raises(ValueError, match=r"v_scale has shape \[3\]"):
        planner.bind(blocks(), v_scale=torch.ones(3))


# --- launches -------------------------------------------------------------------------------------


def cache_of(head_dim: int, *, room: int = 0, scale_room: int = 0) -> jitattn.QuantizedKV:
    """Rows so many bytes apart beyond their own."""
    data = short(3, 16, 2, head_dim // 2 + room)[..., : head_dim // 2]
    scales = short(3, 16, 2, head_dim // 16 + scale_room)[..., : head_dim // 16]
    return jitattn.QuantizedKV(data, data, scales, scales)


@pytest.mark.parametrize(
    ("head_dim", "room", "scale_room", "loader"),
    [
        (128, 0, 0, "vector"),
        (128, 16, 8, "vector"),
        (128, 8, 0, "plain"),
        (128, 0, 4, "plain"),
        (64, 0, 0, "vector"),
        (64, 0, 2, "plain"),
        (256, 0, 0, "vector"),
        (256, 0, 8, "plain"),
        (48, 0, 0, "vector"),  # rows of 24 bytes, whose scales are copied one by one
        (48, 8, 1, "vector"),
        (48, 4, 0, "plain"),
    ],
)
def test_loader_goes_by_numbers_and_scales(
    head_dim: int, room: int, scale_room: int, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = launch_recorder.install(monkeypatch)
    planner = cuda.planner(**NVFP4_ARGUMENTS, head_dim=head_dim)
    kv = planner.bind(cache_of(head_dim, room=room, scale_room=scale_room))
    assert kv.kernels.decode.load().symbol.endswith(loader)  # type: ignore[attr-defined]


def test_launches_have_the_scales_of_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every cache in turn, also where a call is repeated with other addresses."""
    cuda = launch_recorder.install(monkeypatch)
    planner = cuda.planner(**NVFP4_ARGUMENTS)
    table = jitattn.BlockTable(torch.zeros(2, 4, dtype=torch.int32))
    plan = planner.plan(table, torch.ones(2, dtype=torch.int32))
    caches = [cache_of(128), cache_of(128), cache_of(128, scale_room=8)]
    bound = [planner.bind(cache) for cache in caches]
    q = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    for cache, kv in [*zip(caches, bound, strict=True)] * 2:
        plan.run(q, kv, out=torch.zeros_like(q))
        raw = bytes(cuda.last().params)[:ATTENTION_OFFSET]
        half = ATTENTION_OFFSET // 2
        for part, scales in (
            (raw[:half], cache.k_block_scales),
            (raw[half:], cache.v_block_scales),
        ):
            found = BlockScales.from_buffer_copy(part)
            assert found.scales == scales.data_ptr()
            strides = found.page_stride, found.token_stride, found.head_stride
            assert strides == scales.stride()[:3]


# --- the kernels' header --------------------------------------------------------------------------

CONVERT = """
using namespace jitattn;
template <typename Type>
void convert(uint32_t word, uint32_t scale, float* values) {
  const BlockPairs<Type> pairs(word, low_twice(block_scale_pair<Type>(scale | 0x5500)));
  for (int i = 0; i < 4; ++i) {
    values[i] = Type::low(pairs.words[i]) * kBlockFactor<Type>;
    values[i + 4] = Type::high(pairs.words[i]) * kBlockFactor<Type>;
  }
}
// The same, in the order of the elements.
template <typename Type>
bool is_in_order(uint32_t word, uint32_t scale, const float* values) {
  const uint4 eight = block_eight<Type>(word, low_twice(block_scale_pair<Type>(scale)));
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair = words[i / 2];
    const float value = (i % 2 ? Type::high(pair) : Type::low(pair)) * kBlockFactor<Type>;
    if (value != values[i] && value == value) return false;
  }
  return true;
}
extern "C" bool in_order(int is_half, uint32_t word, uint32_t scale, const float* values) {
  return is_half ? is_in_order<Half>(word, scale, values)
                 : is_in_order<BFloat16>(word, scale, values);
}
extern "C" void convert(int is_half, uint32_t word, uint32_t scale, float* values) {
  is_half ? convert<Half>(word, scale, values) : convert<BFloat16>(word, scale, values);
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("is_half", [True, False], ids=["fp16", "bf16"])
def test_every_code_under_every_scale(is_half: bool, arch: str, tmp_path: Path) -> None:
    """In each place of a word, to the bit, NaN and signs of zeros included."""
    headers = [
        (TEMPLATES / f"include/jitattn/{name}.cuh").read_text() for name in ("blocks", "nvfp4")
    ]
    header = re.sub("#include|#pragma", "//", "".join(headers))
    functions = library_of(HOST + begin_of(arch) + header + CONVERT)
    convert, in_order = functions.convert, functions.in_order
    in_order.restype = ctypes.c_bool
    codes = torch.arange(16).repeat(8, 1)
    codes = (codes + torch.arange(8)[:, None] * 3) % 16  # all codes in each of eight places
    data = (codes[::2] | codes[1::2] << 4).T.contiguous().to(torch.uint8)  # 16 words
    scales = torch.arange(256, dtype=torch.uint8)
    found = torch.zeros(256, 16, 8)
    room = (ctypes.c_float * 8)()
    for scale in range(256):
        for i, word in enumerate(data.view(torch.int32).flatten().tolist()):
            given = int(is_half), ctypes.c_uint32(word & 0xFFFFFFFF), ctypes.c_uint32(scale), room
            convert(*given)
            assert in_order(*given)
            found[scale, i] = torch.tensor(list(room))
    rows = torch.cat((data, data), -1).expand(256, 16, 8).contiguous()
    blocks_of = scales[:, None, None].expand(256, 16, 1).contiguous()
    want = jitattn.quant.dequantize_kv(
        rows, dtype="nvfp4", block_scales=blocks_of.view(torch.float8_e4m3fn)
    )[..., :8]
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    is_number = ~torch.isnan(want)
    assert torch.equal(torch.signbit(found)[is_number], torch.signbit(want)[is_number])
