"""Quantised caches: codes, scales, dead slots, tables, strides and graphs, for both kernels.

What the bytes of NVFP4 stand for is in test_nvfp4.py.

Values at large are in test_decode.py, test_mixed.py and the random examples.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu.device import DEVICE
from tests.gpu.test_graphs import Layer, captured
from tests.support import harness
from tests.support.cases import (
    BYTE_FAMILIES,
    CACHES_SHARED,
    E4M3,
    E4M3_D256,
    E4M3_FP16,
    E4M3_RAGGED,
    E4M3_SEPARATE,
    E5M2,
    NVFP4,
    NVFP4_D256,
    NVFP4_SEPARATE,
    QUANTISED_FAMILIES,
    SCALES,
    Case,
    of,
    twins_of,
)
from tests.support.inputs import (
    Inputs,
    address_probe,
    is_poison,
    make_inputs,
    random_tokens,
    uniform_probe,
)
from tests.support.layouts import assert_same_through_every_table
from tests.support.scales import (
    FORMS,
    V_SCALES,
    check_k_scale,
    check_v_scale,
    codes,
    every_byte_of_v,
    of_query_heads,
    ones_probe,
    scale_of,
)

Q_LENS = (1, 5, 40)
"""One token, a few for the decode kernel at a group of two, and many for the prefill kernel."""
# Both kernels, splits in both, padding and requests without queries.
PAIRS = (
    *((1, 4097), (1, 1), (3, 0), (1, 16), (0, 255), (64, 6000), (100, 133)),
    *((2, 5000), (90, 90), (5, 3), (1, -1)),
)
on_the_device = pytest.mark.skipif(DEVICE != "cuda", reason="graphs are the device's")


# --- what a byte stands for -----------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("case", BYTE_FAMILIES, ids=str)
def test_every_byte(case: Case, q_len: int) -> None:
    check_every_byte_of_v(case, q_len)
    check_every_byte_of_k(case, q_len)


def check_every_byte_of_v(case: Case, q_len: int) -> None:
    inputs, want = every_byte_of_v(case, q_len, DEVICE)
    torch.testing.assert_close(harness.attend(inputs)[0], want, rtol=0, atol=0, equal_nan=True)


def check_every_byte_of_k(case: Case, q_len: int) -> None:
    """256 requests of one key with one number in it: lse is that times q's number of the column."""
    case = replace(case, num_kv_heads=1, scales=None, causal=False, sm_scale=2.0**-4)
    case = of(case, *[(q_len, 1)] * 256)
    q, k, v = uniform_probe(case, DEVICE)
    column = torch.arange(256, device=DEVICE) * 37 % case.head_dim
    numbers = codes(case, range(256), DEVICE)
    k = k.float().fill_(0.0)
    k[torch.arange(256, device=DEVICE), 0, column] = numbers.float()
    weights = 1 + torch.arange(case.head_dim, device=DEVICE) % 128 / 128  # tell columns apart
    q = weights.to(q.dtype).expand_as(q)
    k = k.to(numbers.dtype)
    _, lse = harness.attend(make_inputs(case, DEVICE, (q, k, v)))
    lse = lse.view(256, -1).double()
    want = (numbers.double() * weights[column].double() / 16)[:, None].expand_as(lse)
    finite = torch.isfinite(want)
    torch.testing.assert_close(lse[finite], want[finite], rtol=1e-5, atol=1e-5)
    assert bool((~torch.isfinite(lse[~finite])).all())


# --- C22: scales that are accepted and ignored ----------------------------------------------------


@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
@pytest.mark.parametrize("length", [40, 9000])  # 9000 tokens are split
def test_c22_v_scale(case: Case, form: str, q_len: int, length: int) -> None:
    check_v_scale(case, form, q_len, length, DEVICE)


@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
def test_c22_k_scale(case: Case, form: str, q_len: int) -> None:
    check_k_scale(case, form, q_len, DEVICE)


@on_the_device
@pytest.mark.parametrize("form", ["0-d", "[1]", "heads", "heads-column"])
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("case", [E4M3, NVFP4], ids=str)
def test_c22_a_scale_changed_between_replays_takes_effect(
    case: Case, form: str, q_len: int
) -> None:
    """V is 1 everywhere: each replay's out is what v_scale holds then, to the bit."""
    case = of(replace(case, scales=None, group_size=2, num_kv_heads=4), (q_len, 40))
    inputs = make_inputs(case, DEVICE, ones_probe(case, DEVICE))
    inputs.v_scale = scale_of(form, V_SCALES[0], DEVICE)
    assert isinstance(inputs.v_scale, Tensor)
    layer = Layer.of(inputs)
    graph = captured(layer)
    for scales in V_SCALES:
        inputs.v_scale.copy_(scale_of(form, scales, DEVICE))
        layer.forget()
        graph.replay()
        want = of_query_heads(form, scales, DEVICE)[None, :, None].to(layer.out.dtype)
        assert torch.equal(layer.out, want.expand_as(layer.out))


@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
def test_c22_every_share_of_the_card(case: Case) -> None:
    """However often a request is split, each scale counts once."""
    case = of(case, *PAIRS, scales="heads", sinks="float32")
    inputs = make_inputs(case, DEVICE)
    want = harness.expected(inputs)
    for num_sms in (1, 3, 40, 1000):
        harness.check(
            case, *harness.attend(inputs, harness.planner_for(case, DEVICE, num_sms=num_sms)), want
        )


@pytest.mark.parametrize("case", [E4M3, NVFP4], ids=str)
def test_a_scale_counts_for_its_cache_alone(case: Case) -> None:
    """One plan, caches with and without scales in turn."""
    case = of(case, *PAIRS)
    inputs = [make_inputs(replace(case, scales=form), DEVICE) for form in SCALES]
    planner = harness.planner_for(case, DEVICE)
    plan = harness.plan_of(inputs[0], planner)
    bound = [one.bind(planner) for one in inputs]
    for one, kv in zip(inputs * 2, bound * 2, strict=True):
        result = plan.run(one.q, kv, pages=one.pages(), return_lse=True)
        harness.check(one.case, *result, harness.expected(one))


# --- tables, strides, dead slots: the same bits ---------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window_left", [-1, 500])
@pytest.mark.parametrize("case", [E4M3, NVFP4], ids=str)
def test_every_table_layout(case: Case, window_left: int, batch_invariant: bool) -> None:
    case = of(case, *PAIRS, window_left=window_left, batch_invariant=batch_invariant, rows="int32")
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    harness.check(case, *want, harness.expected(inputs))
    assert_same_through_every_table(inputs, want)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", [*CACHES_SHARED, "twice"])
@pytest.mark.parametrize(
    "case",
    [E4M3, E4M3_SEPARATE, E5M2, E4M3_D256, NVFP4, NVFP4_SEPARATE, NVFP4_D256],
    ids=str,
)
def test_cache_strides(case: Case, cache: str, kv_layout: str) -> None:
    """Whatever the memory order and its alignment: the loaders differ, the sums don't."""
    if cache == "twice" and case.page_table == "shared":
        pytest.skip("one tensor passed twice needs two rows of ids")
    case = of(case, *PAIRS, num_kv_heads=1 if cache == "size_1" else 2)
    tokens = random_tokens(case, DEVICE)
    want = harness.attend(make_inputs(case, DEVICE, tokens))
    strange = replace(case, cache=cache, kv_layout=kv_layout)
    harness.assert_same(harness.attend(make_inputs(strange, DEVICE, tokens)), want)


@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
def test_c14_dead_slots(case: Case, window_left: int) -> None:
    """Zeros in every slot that no request owns, then NaN, Inf where there is one, and a number."""
    case = replace(of(case, *PAIRS), window_left=window_left)
    inputs = make_inputs(case, DEVICE)
    assert all(bool(is_poison(cache).any()) for cache in inputs.poisoned)
    poisons = (127.0, -128.0) if case.kv_dtype == "int8" else (math.nan, math.inf, 448.0)
    want = harness.assert_dead_slots_do_not_count(inputs, *poisons)
    harness.check(case, *want, harness.expected(inputs))


@pytest.mark.parametrize("case", [*QUANTISED_FAMILIES, *twins_of(E4M3), *twins_of(NVFP4)], ids=str)
def test_mixed_batches(case: Case) -> None:
    harness.check_case(of(case, *PAIRS), DEVICE)


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("q_len", [1, 2, 4, 7, 8, 9, 16, 17, 65])
@pytest.mark.parametrize("case", [E4M3, E5M2, NVFP4], ids=str)
def test_group_sizes(case: Case, q_len: int, group_size: int) -> None:
    pairs = [(q_len, 40), (q_len, 700), (q_len, 3)]
    harness.check_case(replace(of(case, *pairs), group_size=group_size, num_kv_heads=3), DEVICE)


@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
def test_every_address_of_a_long_request(case: Case, q_len: int) -> None:
    edges = (0, 1, 15, 16, 17, 31, 63, 64, 127, 128, 255, 256, 1023, 4095, 4096, 8191, 12344)
    case = of(replace(case, num_kv_heads=1, causal=False), *[(q_len, 12345)] * len(edges))
    inputs = make_inputs(case, DEVICE, address_probe(case, DEVICE, list(edges)))
    assert harness.check_addresses(inputs, harness.attend(inputs)[0], edges) == q_len * len(edges)


@pytest.mark.parametrize("case", [E4M3, E5M2, E4M3_RAGGED, E4M3_FP16], ids=str)
def test_bytes_are_fp8(case: Case) -> None:
    """A pool of uint8, whose type the planner's kv_dtype names."""
    inputs = make_inputs(of(case, *PAIRS), DEVICE)
    want = harness.attend(inputs)
    inputs.cache = tuple(cache.view(torch.uint8) for cache in inputs.cache)
    harness.assert_same(harness.attend(inputs), want)


@pytest.mark.parametrize("q_len", [1, 5, 32])
@pytest.mark.parametrize("target", [3, 16])
def test_c07_high_page_ids(large_pool: Tensor, target: int, q_len: int) -> None:
    """The bf16 pool of head_dim 128 as one of bytes."""
    case = replace(E4M3_D256, causal=False)
    found = harness.check_high_pages(case, target, q_len, large_pool.view(torch.uint8))
    assert found == q_len * len(harness.HIGH_PAGES)


# --- graphs ---------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("form", ["0-d", "[1]", "heads", "heads-column"])
@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
def test_replays_read_the_scales(case: Case, form: str) -> None:
    """Scales, lengths and cache change in place between replays."""
    case = of(replace(case, scales=form), *PAIRS)
    inputs = make_inputs(case, DEVICE)
    layer = Layer.of(inputs)
    graph = captured(layer)
    assert isinstance(inputs.k_scale, Tensor)
    assert isinstance(inputs.v_scale, Tensor)
    for factor in (1.0, 0.5, 1.75, 0.0):
        inputs.k_scale.mul_(factor)
        inputs.v_scale.mul_(2 * factor)
        layer.forget()
        graph.replay()
        harness.assert_same((layer.out, layer.lse), layer.eager())
        assert factor == 0.0 or bool((layer.out[0] != 0).any())


@on_the_device
def test_a_number_is_fixed_when_it_is_captured() -> None:
    case = of(replace(E4M3, scales="float"), *PAIRS)
    inputs = make_inputs(case, DEVICE)
    layer = Layer.of(inputs)
    want = layer.eager()
    graph = captured(layer)
    other = replace_scales(inputs, 0.125, 0.125)
    layer.plan.run(other.q, other.bind(layer.planner), **harness.extras(other))
    layer.forget()
    graph.replay()
    harness.assert_same((layer.out, layer.lse), want)


def replace_scales(inputs: Inputs, k_scale: float, v_scale: float) -> Inputs:
    return replace(inputs, k_scale=k_scale, v_scale=v_scale)
