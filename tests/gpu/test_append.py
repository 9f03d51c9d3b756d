"""append_kv on a card: C24, C25 and C50 of the cases from bug reports, and its own layouts.

That nothing is computed on the way makes every comparison one of bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.support.token_cases import CACHE_DTYPES, MEMORY, POISON, check_tokens, make_token_inputs
from tests.support.token_sets import APPENDS

pytestmark = pytest.mark.gpu
BASE = APPENDS["append bfloat16"]


@pytest.mark.parametrize("qkv", ["packed", "strided"])
@pytest.mark.parametrize("name", APPENDS)
def test_kinds(name: str, qkv: str) -> None:
    for seed, wide in itertools.product(range(2), (False, True)):
        check_tokens(replace(APPENDS[name], qkv=qkv, seed=seed, wide_integers=wide), DEVICE)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
def test_c50_pools(kv_dtype: str, kv_layout: str, memory: str) -> None:
    """Tokens at 0, 15, 16, 17 and around, padding with NaN: exactly their bytes change."""
    pairs = ((1, 1), (2, 17), (1, 16), (17, 17), (40, 57), (1, 0), (2, 17), (1, -1), (1, 18))
    scales = "none" if kv_dtype in ("bfloat16", "float16") else "heads"
    case = replace(BASE, kv_dtype=kv_dtype, kv_layout=kv_layout, memory=memory, scales=scales)
    check_tokens(replace(case, pairs=pairs, extra_rows=5), DEVICE)


def test_c50_one_launch_or_many_and_any_order() -> None:
    """Slots with gaps of -1, and tokens in another order: the same pool."""
    case = replace(APPENDS["append slots"], pairs=((17, 17), (2, 17), (1, 40)))
    inputs = make_token_inputs(case)
    whole = inputs.to(DEVICE)
    whole.run()
    order = torch.randperm(case.num_tokens)
    turned, parts = inputs.to(DEVICE), inputs.to(DEVICE)
    for other, rows in ((turned, [order]), (parts, order.split(4))):
        for some in rows:
            names = {name: inputs.arguments[name][some].to(DEVICE) for name in ("k", "v", "slots")}
            jitattn.append_kv(kv_cache=other.arguments["kv_cache"], **names)
        for a, b in zip(whole.pools, other.pools, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(whole.pools[0], torch.full_like(whole.pools[0], POISON))


def test_c50_latent_rows() -> None:
    """MLA: 512 bytes of latent, 16 of scales and 64 elements of rotary part in one row."""
    num_tokens, page = 37, 64
    pool = torch.full((3, page, 1, 528 + 128), POISON, dtype=torch.uint8, device=DEVICE)
    latent = pool[..., :512].view(torch.float8_e4m3fn)
    rotary = pool[..., 528:].view(torch.bfloat16)
    fused = torch.randn(num_tokens, 1, 576 + 8, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.randperm(3 * page, device=DEVICE)[:num_tokens]
    with pytest.raises(TypeError, match="v_cache has dtype bfloat16"):
        jitattn.append_kv(fused[..., :512], fused[..., 520:], (latent, rotary), slots=slots)
    row = torch.full((3, page, 1, 512 + 64 + 16), math.nan, dtype=torch.bfloat16, device=DEVICE)
    caches = row[..., :512], row[..., 528:]
    before = row.clone()
    jitattn.append_kv(fused[..., :512], fused[..., 520:], caches, slots=slots)
    want = before.view(3 * page, -1)
    want[slots, :512] = fused[:, 0, :512]
    want[slots, 528:] = fused[:, 0, 520:]
    assert torch.equal(row.view(torch.int16).view(3 * page, -1), want.view(torch.int16))


SPECIAL = {
    "float8_e4m3fn": [448, 464, 464.0001, 465, 1e9, math.inf, -1e9, math.nan, 2**-9, 2**-10, -0.0],
    "float8_e5m2": [57344, 61440, 1e9, math.nan, 1.0, 2.0, 3.5, 0.25, -1.0, -math.inf, 2**-16],
    "int8": [0.5, 1.5, -2.5, 127.5, 200, -128, -129, math.inf, -math.inf, math.nan, 3.49],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", SPECIAL)
def test_c24_c25_bytes(kv_dtype: str, dtype: str) -> None:
    """Saturation, rounding and NaN are those of the definition; so through a scale of 10."""
    if dtype == "float16" and kv_dtype != "float8_e4m3fn":
        pytest.skip("of another kernel")
    for scale in (None, 10.0, 0.3):
        values = torch.zeros(2, 2, 128)
        values[0, 0, :11] = torch.tensor(SPECIAL[kv_dtype])
        values[0, 1] = torch.linspace(-600, 600, 128)
        values[1] = torch.randn(2, 128) * 100
        values = (values * (scale or 1.0)).to(getattr(torch, dtype))
        cache = torch.zeros(1, 2, 16, 2, 128, dtype=getattr(torch, kv_dtype), device=DEVICE)
        ids = torch.zeros(1, 16, dtype=torch.int32, device=DEVICE)
        table = jitattn.TokenTable(torch.arange(16).int()[None].to(DEVICE))
        pages = table if dtype == "float16" else jitattn.BlockTable(ids[:, :1])
        tokens = values.to(DEVICE)
        lengths, ends = (torch.tensor(n, device=DEVICE).int() for n in ([2], [0, 2]))
        jitattn.append_kv(
            *(tokens, tokens, cache),
            pages=pages,
            seq_lens=lengths,
            qo_indptr=ends,
            k_scale=scale,
            v_scale=None if scale is None else torch.tensor([scale], device=DEVICE),
        )
        want = jitattn.quant.quantize_kv(values, kv_dtype, scale=scale)
        assert isinstance(want, torch.Tensor)
        for side in range(2):
            found = cache[0, side, :2].cpu()
            assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def test_16_bits_saturate() -> None:
    values = torch.zeros(1, 2, 128)
    values[0, 0, :9] = torch.tensor([3e38, -3e38, 65504, 65519, 65520, 1e5, math.inf, 1, 1e-9])
    values[0, 1, :3] = torch.tensor([math.nan, -math.inf, 2**-24])
    tokens = values.bfloat16()
    cache = torch.zeros(1, 2, 16, 2, 128, dtype=torch.float16, device=DEVICE)
    jitattn.append_kv(
        *(tokens.to(DEVICE), tokens.to(DEVICE), cache),
        pages=jitattn.BlockTable(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)),
        seq_lens=torch.tensor([1], device=DEVICE),
    )
    want = jitattn.quant.quantize_kv(tokens[0], "float16")
    assert isinstance(want, torch.Tensor)
    for side in range(2):
        torch.testing.assert_close(cache[0, side, 0].cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_bytes_are_of_the_type_that_is_named() -> None:
    case = replace(APPENDS["append float8_e5m2"], scales="heads")
    inputs = make_token_inputs(case)
    want, found = inputs.to(DEVICE), inputs.to(DEVICE)
    want.run()
    found.arguments["kv_cache"] = tuple(
        side.view(torch.uint8) for side in found.arguments["kv_cache"]
    )
    with pytest.raises(ValueError, match="say what its bytes are"):
        found.run()
    found.arguments["kv_dtype"] = "float8_e5m2"
    found.run()
    for a, b in zip(want.pools, found.pools, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "nvfp4"])
def test_tails_become_zero(kv_dtype: str) -> None:
    case = replace(APPENDS[f"append {kv_dtype}"], zero_tail=True, page_size=16)
    check_tokens(case, DEVICE)
    check_tokens(replace(case, pairs=((1, 16), (16, 16), (3, 35), (1, 0))), DEVICE)


@pytest.mark.parametrize("num_tokens", [64, 8192])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "nvfp4"])
def test_many_tokens(kv_dtype: str, num_tokens: int) -> None:
    pairs = ((num_tokens // 2, num_tokens), (num_tokens // 4, num_tokens // 4))
    pairs += ((1, 7),) * (num_tokens // 4)
    case = replace(APPENDS[f"append {kv_dtype}"], pairs=pairs, num_kv_heads=8)
    check_tokens(case, DEVICE)
