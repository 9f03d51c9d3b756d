"""int4 caches: what each code stands for under scales and zeros, and who writes and moves them.

Tokens into caches are in test_append.py and test_preprocess.py too, values out of them in
test_gather.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.tensors.quantization import bytes_of_scales
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.blocks import PAIRS
from tests.support.cases import CACHES_SHARED, INT4, INT4_FAMILIES, INT4_FP16, Case, of
from tests.support.inputs import (
    address_probe,
    is_poison,
    make_inputs,
    random_tokens,
    values,
    zeros_of,
)


def tokens_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Tokens as tests hold them, of codes [.., D] and scales and zeros [.., blocks, 2]."""
    data = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return torch.cat((data, bytes_of_scales(scales.half().contiguous())), -1)


def num_blocks(case: Case, dim: int) -> int:
    assert case.blocks is not None
    return case.blocks.count(dim)


@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("case", INT4_FAMILIES, ids=str)
def test_every_code_of_v(case: Case, q_len: int) -> None:
    """256 requests of one key, all codes, scales and zeros: out is the row of V, bit for bit."""
    case = of(replace(case, num_kv_heads=1, scales=None, causal=False), *[(q_len, 1)] * 256)
    q, k, _ = random_tokens(case, DEVICE)
    request = torch.arange(256, device=DEVICE)[:, None, None]
    column = torch.arange(case.value_dim, device=DEVICE)
    block = torch.arange(num_blocks(case, case.value_dim), device=DEVICE)
    scale = 2.0 ** ((request + block * 5) % 13 - 6)
    zero = scale * ((request * 7 + block) % 121 - 60)
    scale[3], zero[5] = math.nan, math.nan
    v = tokens_of((request + column * 7) % 16, torch.stack((scale, zero), -1))
    inputs = make_inputs(case, DEVICE, (torch.zeros_like(q), torch.zeros_like(k), v))
    out, lse = harness.attend(inputs)
    want = values(v, None, case.kv_dtype).to(out.dtype).repeat_interleave(q_len, 0).expand_as(out)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
    assert bool((lse == 0).all())


@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("case", INT4_FAMILIES, ids=str)
def test_every_code_of_k(case: Case, q_len: int) -> None:
    """A request of one key for each code and scale: lse is q times K, in float64."""
    case = replace(case, num_kv_heads=1, scales=None, causal=False, sm_scale=2.0**-8)
    case = of(case, *[(q_len, 1)] * 1024)
    q, k, v = random_tokens(case, DEVICE)
    request = torch.arange(1024, device=DEVICE)[:, None, None]
    column = torch.arange(case.head_dim, device=DEVICE)
    block = torch.arange(num_blocks(case, case.head_dim), device=DEVICE)
    scale = 2.0 ** ((request // 16 + block * 3) % 7 - 6)
    zero = scale * ((request // 16 * 5 + block) % 41 - 20)
    k = tokens_of((request + column * 3) % 16, torch.stack((scale, zero), -1))
    weights = 1 + column % 128 / 128  # tell columns apart
    q = weights.to(q.dtype).expand_as(q)
    _, lse = harness.attend(make_inputs(case, DEVICE, (q, k, v)))
    scores = (values(k, None, case.kv_dtype).double() * weights.double()).sum(-1) * 2.0**-8
    if cap := case.logits_soft_cap:
        scores = cap * torch.tanh(scores / cap)
    want = scores.view(1024, 1).expand(1024, lse.numel() // 1024)
    atol = 1e-4 + 6e-6 * cap  # by which a tanh is off
    torch.testing.assert_close(lse.view(1024, -1).double(), want, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("case", INT4_FAMILIES, ids=str)
def test_mixed_batches_and_dead_slots(case: Case) -> None:
    """NaN, infinities and numbers in every slot that no request owns change no bit."""
    inputs = make_inputs(of(case, *PAIRS), DEVICE)
    assert all(bool(is_poison(cache).any()) for cache in inputs.poisoned)
    want = harness.assert_dead_slots_do_not_count(inputs, math.nan, math.inf, 448.0)
    harness.check(inputs.case, *want, harness.expected(inputs))


@pytest.mark.parametrize("block_cache", CACHES_SHARED)
def test_strides_of_scales(block_cache: str) -> None:
    """Wherever scales and zeros lie, and however far apart: the same bits."""
    num_kv_heads = 1 if block_cache == "size_1" else 2
    for base in (INT4, INT4_FAMILIES[2]):
        case = of(base, *PAIRS, num_kv_heads=num_kv_heads)
        tokens = random_tokens(case, DEVICE)
        want = harness.attend(make_inputs(case, DEVICE, tokens))
        for kv_layout in ("NHD", "HND"):
            strange = replace(case, block_cache=block_cache, kv_layout=kv_layout)
            harness.assert_same(harness.attend(make_inputs(strange, DEVICE, tokens)), want)


@pytest.mark.parametrize("q_len", [1, 30])
def test_every_address_of_a_long_request(q_len: int) -> None:
    edges = (0, 1, 15, 16, 17, 31, 63, 64, 127, 128, 255, 256, 1023, 4095, 4096, 8191, 12344)
    case = of(replace(INT4, num_kv_heads=1, causal=False), *[(q_len, 12345)] * len(edges))
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, list(edges)))
    assert harness.check_addresses(inputs, harness.attend(inputs)[0], edges) == q_len * len(edges)


def test_caches_in_turn() -> None:
    """Layers of one plan: each has its own numbers, scales and strides, bound or not."""
    layers = []
    for block_cache in ("pair_nhd", "pair_hnd", "odd_base", "pair_nhd"):
        case = replace(of(INT4, (1, 700), (3, 40), (40, 90)), scales=None, block_cache=block_cache)
        layers.append(make_inputs(case, DEVICE))
    planner = harness.planner_for(layers[0].case, DEVICE)
    plan, q = harness.plan_of(layers[0], planner), layers[0].q
    bound = [layer.bind(planner) for layer in layers]
    wants = [harness.plan_of(layers[0], planner).run(q, kv, return_lse=True) for kv in bound]
    for layer, kv, (want, lse) in zip(layers, bound, wants, strict=True):
        harness.assert_same((plan.run(q, kv, out=torch.empty_like(want)), lse), (want, lse))
        harness.assert_same((plan.run(q, layer.given), lse), (want, lse))


@pytest.mark.parametrize("family", [INT4_FP16, INT4_FAMILIES[1]], ids=str)
def test_what_quantize_kv_stores(family: Case) -> None:
    """A cache that the definition wrote: kernels round its values once to float16."""
    case = of(replace(family, scales=None), (1, 700), (3, 40), (40, 90))
    kv_dtype = str(case.kv_dtype)
    q, *tokens = random_tokens(case, DEVICE)
    stored = []
    for x in tokens:
        parts = jitattn.quant.quantize_kv(torch.randn_like(zeros_of(x, kv_dtype)), kv_dtype)
        stored.append(torch.cat((parts[0], bytes_of_scales(parts[1])), -1))
    inputs = make_inputs(case, DEVICE, (q, stored[0], stored[1]))
    inputs.k, inputs.v = inputs.k.half().double(), inputs.v.half().double()
    harness.check(case, *harness.attend(inputs), harness.expected(inputs))


@pytest.mark.parametrize("kv_dtype", ["int4", "int4_g32"])
def test_what_is_written_is_what_is_gathered(kv_dtype: str) -> None:
    """append_kv, then gather_kv: what the definition stores, bit for bit, also by way of a copy."""
    num_blocks = {"int4": 1, "int4_g32": 4}[kv_dtype]
    k, v = torch.randn(2, 100, 3, 128, device=DEVICE).bfloat16() * 5
    codes = torch.zeros(2, 9, 16, 3, 64, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(2, 9, 16, 3, num_blocks, 2, dtype=torch.float16, device=DEVICE)
    cache = jitattn.QuantizedKV(codes[0], codes[1], scales[0], scales[1])
    slots = torch.randperm(7 * 16, device=DEVICE)[:100]
    jitattn.append_kv(k, v, cache, slots=slots, kv_dtype=kv_dtype)
    pairs = torch.tensor([[0, 8]], dtype=torch.int32, device=DEVICE)
    jitattn.copy_pages(cache.tensors, cache.tensors, pairs)
    ids = torch.tensor([[8, 1, 2, 3, 4, 5, 6]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([7 * 16], dtype=torch.int32, device=DEVICE)
    found = jitattn.gather_kv(cache, jitattn.BlockTable(ids), lens, out_dtype="float32")
    for numbers, got in zip((k, v), found[:2], strict=True):
        data, block_scales = jitattn.quant.quantize_kv(numbers, kv_dtype)
        want = jitattn.quant.dequantize_kv(data, dtype=kv_dtype, block_scales=block_scales)
        assert torch.equal(got[slots], want)
