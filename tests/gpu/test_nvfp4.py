"""NVFP4 caches: what each code stands for under each scale of a block, and where both lie.

Scales of K and V, dead slots, tables and graphs are in test_fp8.py; values at large in
test_decode.py, test_mixed.py and the random examples.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.blocks import PAIRS, split_blocks
from tests.support.cases import BLOCK_FAMILIES, CACHES_SHARED, NVFP4, NVFP4_D256, Case, of
from tests.support.inputs import (
    address_probe,
    make_inputs,
    random_tokens,
    values,
    zeros_of,
)


def tokens_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Tokens as the cache stores them, of codes [.., D] and bytes of scales [.., D / 16]."""
    data = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.cat((data, scales), -1).to(torch.uint8)


@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("case", BLOCK_FAMILIES, ids=str)
def test_every_code_and_scale_of_v(case: Case, q_len: int) -> None:
    check_every_code_of_v(case, q_len)


@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("case", BLOCK_FAMILIES, ids=str)
def test_every_code_and_scale_of_k(case: Case, q_len: int) -> None:
    check_every_code_of_k(case, q_len)


def check_every_code_of_v(case: Case, q_len: int) -> None:
    """256 requests of one key, each block with all codes: out is the row of V, bit for bit."""
    case = of(replace(case, num_kv_heads=1, scales=None, causal=False), *[(q_len, 1)] * 256)
    q, k, _ = random_tokens(case, DEVICE)
    request = torch.arange(256, device=DEVICE)[:, None, None]
    column = torch.arange(case.value_dim, device=DEVICE)
    block = torch.arange(case.value_dim // 16, device=DEVICE)
    v = tokens_of((request + column * 7) % 16, (request + block * 37) % 256)
    inputs = make_inputs(case, DEVICE, (torch.zeros_like(q), torch.zeros_like(k), v))
    out, lse = harness.attend(inputs)
    want = values(v, None).to(out.dtype).repeat_interleave(q_len, 0).expand_as(out)
    is_nan = torch.isnan(want)
    assert bool(is_nan.any())
    assert torch.equal(torch.isnan(out), is_nan)
    assert torch.equal(out[~is_nan], want[~is_nan])
    assert bool((lse == 0).all())


def check_every_code_of_k(case: Case, q_len: int) -> None:
    """A request of one key for each code and scale: lse is that times q's number of the column."""
    case = replace(case, num_kv_heads=1, scales=None, causal=False, sm_scale=2.0**-4)
    case = of(case, *[(q_len, 1)] * 4096)
    q, k, v = random_tokens(case, DEVICE)
    request = torch.arange(4096, device=DEVICE)
    column = request * 37 % case.head_dim
    codes = torch.zeros(4096, 1, case.head_dim, dtype=torch.int64, device=DEVICE)
    codes[request, 0, column] = request % 16
    scales = torch.zeros(4096, 1, case.head_dim // 16, dtype=torch.int64, device=DEVICE)
    scales[request, 0, column // 16] = request // 16
    k = tokens_of(codes, scales)
    numbers = values(k, None)[request, 0, column].double()
    weights = 1 + torch.arange(case.head_dim, device=DEVICE) % 128 / 128  # tell columns apart
    q = weights.to(q.dtype).expand_as(q)
    _, lse = harness.attend(make_inputs(case, DEVICE, (q, k, v)))
    lse = lse.view(4096, -1).double()
    want = (numbers * weights[column].double() / 16)[:, None].expand_as(lse)
    is_nan = torch.isnan(want)
    assert int(is_nan.any(1).sum()) == 32  # two scales, with zeros as well
    assert torch.equal(torch.isnan(lse), is_nan)
    torch.testing.assert_close(lse[~is_nan], want[~is_nan], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_cache", CACHES_SHARED)
@pytest.mark.parametrize("case", [NVFP4, *BLOCK_FAMILIES[4:6]], ids=str)
def test_strides_of_scales(case: Case, block_cache: str, kv_layout: str) -> None:
    """Wherever the scales lie, and however far apart: the same bits."""
    case = of(case, *PAIRS, num_kv_heads=1 if block_cache == "size_1" else 2)
    tokens = random_tokens(case, DEVICE)
    want = harness.attend(make_inputs(case, DEVICE, tokens))
    strange = replace(case, block_cache=block_cache, kv_layout=kv_layout)
    harness.assert_same(harness.attend(make_inputs(strange, DEVICE, tokens)), want)


@pytest.mark.parametrize("q_len", [1, 5, 32])
@pytest.mark.parametrize("target", [3, 16])
def test_c07_high_page_ids(large_pool: Tensor, target: int, q_len: int) -> None:
    """The bf16 pool as one of bytes: in each row 128 of numbers, then 16 of scales."""
    count = len(harness.HIGH_PAGES)
    case = replace(of(NVFP4_D256, *[(q_len, 32)] * count), num_kv_heads=8, causal=False)
    q, k, v = address_probe(case, DEVICE, [target] * count)
    inputs = make_inputs(case, DEVICE, (q, k, v))
    room = large_pool.view(torch.uint8)[..., :144]
    harness.move_to_high_pages(inputs, room, k, v)
    parts = [split_blocks(room[:, which]) for which in range(2)]
    inputs.cache = (parts[0][0], parts[1][0])
    inputs.blocks = (parts[0][1], parts[1][1])
    found = harness.check_addresses(inputs, harness.attend(inputs)[0], [target] * count)
    assert found == q_len * count


def test_caches_in_turn() -> None:
    """Layers of one plan: each has its own numbers, scales and strides, bound or not."""
    layers = []
    for i, block_cache in enumerate(("pair_nhd", "pair_hnd", "odd_base", "pair_nhd")):
        case = replace(of(NVFP4, (1, 700), (3, 40), (40, 90)), scales=None, block_cache=block_cache)
        q, k, v = random_tokens(case, DEVICE)
        layers.append(make_inputs(case, DEVICE, (q, k.roll(i, 0), v.roll(i, 0))))
    planner = harness.planner_for(layers[0].case, DEVICE)
    plan, q = harness.plan_of(layers[0], planner), layers[0].q
    bound = [layer.bind(planner) for layer in layers]
    wants = [harness.plan_of(layers[0], planner).run(q, kv, return_lse=True) for kv in bound]
    for layer, want in zip(layers, wants, strict=True):
        harness.check(layer.case, *want, harness.expected(layer))
    for _ in range(3):
        for layer, kv, (want, lse) in zip(layers, bound, wants, strict=True):
            harness.assert_same((plan.run(q, kv, out=torch.empty_like(want)), lse), (want, lse))
            harness.assert_same((plan.run(q, layer.given), lse), (want, lse))


def test_what_quantize_kv_stores() -> None:
    """A cache that the definition wrote, given to run as it is."""
    case = of(NVFP4, (1, 700), (3, 40), (40, 90), scales=None)
    q, k, v = random_tokens(case, DEVICE)
    numbers = [torch.randn_like(zeros_of(x)) for x in (k, v)]
    stored = [
        torch.cat((data, scales.view(torch.uint8)), -1)
        for data, scales in (jitattn.quant.quantize_kv(x, "nvfp4") for x in numbers)
    ]
    inputs = make_inputs(case, DEVICE, (q, stored[0], stored[1]))
    planner = harness.planner_for(case, DEVICE)
    out, lse = harness.plan_of(inputs, planner).run(inputs.q, inputs.given, return_lse=True)
    harness.check(case, out, lse, harness.expected(inputs))
