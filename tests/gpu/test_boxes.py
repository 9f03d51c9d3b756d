"""K and V through tensor maps: boxes that hold more than a request has, and caches that move."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.spec.layout import Loader
from tests.gpu.device import DEVICE
from tests.support import harness
from tests.support.cases import BOX_DIMS, BOX_PAGES, D64, D128, E4M3, Case, loader_of, of
from tests.support.inputs import Inputs, make_inputs, random_tokens


def boxed(case: Case) -> Case:
    """The case, of which it is sure that a card of compute capability 9.0 has boxes for it."""
    assert loader_of(case) is Loader.TENSOR
    return case


def attend_in_boxes(inputs: Inputs) -> tuple[Tensor, Tensor]:
    kv = inputs.bind(harness.planner_for(inputs.case, DEVICE))
    if DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert kv.tensor_maps is not None
    return harness.attend(inputs)


@pytest.mark.parametrize("window_left", [7, 300])
@pytest.mark.parametrize("case", BOX_PAGES, ids=str)
def test_windows_begin_in_every_place_of_a_page(case: Case, window_left: int) -> None:
    """Around the window, and past the end of the last page, K and V are NaN."""
    lengths = tuple(range(701, 701 + case.page_size))
    case = boxed(replace(case, lengths=lengths, num_kv_heads=1, window_left=window_left))
    inputs = make_inputs(case, DEVICE)
    harness.check(case, *attend_in_boxes(inputs), harness.expected(inputs))


@pytest.mark.parametrize("case", BOX_PAGES, ids=str)
def test_requests_end_in_every_place_of_a_page(case: Case) -> None:
    lengths = (*range(1, 2 * case.page_size + 1), 130, 5000)
    case = boxed(replace(case, lengths=lengths, num_kv_heads=1))
    inputs = make_inputs(case, DEVICE)
    poisons = (math.nan, math.inf, -math.inf, torch.finfo(torch.bfloat16).max)
    want = harness.assert_dead_slots_do_not_count(inputs, *poisons)
    harness.check(case, *want, harness.expected(inputs))


@pytest.mark.parametrize("cache", ["one_nhd", "one_hnd", "cross_layer", "packed", "layer_inside"])
@pytest.mark.parametrize("case", BOX_DIMS, ids=str)
def test_what_boxes_hold(case: Case, cache: str) -> None:
    case = boxed(
        replace(case, cache=cache, lengths=(4097, 1, 0, 16, 255, 33), sinks="float32", seed=3)
    )
    inputs = make_inputs(case, DEVICE)
    harness.check(case, *attend_in_boxes(inputs), harness.expected(inputs))


@pytest.mark.parametrize("case", [D128, D64, E4M3], ids=str)
def test_some_query_tokens_a_request(case: Case) -> None:
    """Windows of several rows, which begin in one box and end in another."""
    case = boxed(of(case, (2, 900), (1, 17), (0, 3), (2, 2), (2, 33), window_left=40))
    inputs = make_inputs(case, DEVICE)
    harness.check(case, *attend_in_boxes(inputs), harness.expected(inputs))


def test_a_cache_whose_memory_moved() -> None:
    case = boxed(replace(D128, cache="one_nhd", lengths=(3000, 17, 0)))
    inputs = make_inputs(case, DEVICE)
    want = harness.attend(inputs)
    planner = harness.planner_for(case, DEVICE)
    plan, kv = harness.plan_of(inputs, planner), inputs.bind(planner)
    out, storage = inputs.new_out(), inputs.cache.untyped_storage()
    for _ in range(4):
        for _ in range(3):
            out.fill_(math.nan)
            plan.run(inputs.q, kv, out=out)
            assert torch.equal(out, want[0])
        copy, place = inputs.cache.clone(), inputs.cache.data_ptr()
        inputs.cache.fill_(math.nan)  # what is left behind
        # Memory that grows is there beside the old one, which it is copied from, for a while.
        storage.resize_(storage.nbytes() + 4096)
        assert inputs.cache.data_ptr() != place
        inputs.cache.copy_(copy)


@pytest.mark.parametrize("dim", ["pages", "heads"])
def test_an_entry_that_is_seen_many_times(dim: str) -> None:
    """A stride of 0, for which there is no map."""
    case = replace(D128, num_kv_heads=4, lengths=(16,) * 5 if dim == "pages" else (700, 1, 33))
    q, k, v = random_tokens(case, DEVICE)
    if dim == "heads":
        tokens = q, k[:, :1].expand(k.shape).clone(), v[:, :1].expand(v.shape).clone()
        inputs = make_inputs(case, DEVICE, tokens)
        inputs.cache = tuple(x[:, :, :1].expand(x.shape) for x in inputs.cache)
    else:
        inputs = make_inputs(case, DEVICE, (q, k[:16].repeat(5, 1, 1), v[:16].repeat(5, 1, 1)))
        first = int(inputs.table[0, 0])
        inputs.cache = tuple(x[first : first + 1].expand(x.shape) for x in inputs.cache)
    harness.check(case, *harness.attend(inputs), harness.expected(inputs))


def test_layers_in_turn() -> None:
    """The repeated call of a plan writes the maps of each cache."""
    case = boxed(replace(D128, cache="one_nhd", lengths=(3000, 17, 0, 900)))
    layers = [make_inputs(replace(case, seed=2 * seed), DEVICE) for seed in range(4)]
    for layer in layers[1:]:  # in the pages of the first
        layer.table = layers[0].table
        layer.cache = layers[0].cache.clone()
        live = ~torch.isnan(layer.cache)
        layer.cache[live] = torch.randn_like(layer.cache)[live]
    wants = [harness.attend(layer) for layer in layers]
    planner = harness.planner_for(case, DEVICE)
    plan, bound = harness.plan_of(layers[0], planner), [layer.bind(planner) for layer in layers]
    out = layers[0].new_out()
    for _ in range(3):
        for layer, kv, want in zip(layers, bound, wants, strict=True):
            plan.run(layer.q, kv, out=out, **harness.extras(layer))
            assert torch.equal(out, want[0])
            harness.assert_same(plan.run(layer.q, kv, return_lse=True), want)


@pytest.mark.parametrize("case", [D128, D64], ids=str)
def test_maps_that_were_moved_are_those_that_are_encoded(case: Case) -> None:
    """The first cache of a planner is encoded, and those that lie like it are moved."""
    if DEVICE != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 has tensor maps")
    inputs = [make_inputs(case, DEVICE) for _ in range(4)]
    planner = harness.planner_for(case, DEVICE)
    for given in inputs:
        first = jitattn.AttentionPlanner(**case.planner_arguments(), device=DEVICE)
        moved, encoded = given.bind(planner), given.bind(first)
        assert moved.tensor_maps is not None
        assert encoded.tensor_maps is not None
        for role in ("decode", "decode_multi_token", "prefill"):
            assert moved.tensor_maps.at(role, moved.k_at(), moved.v_at()) == encoded.tensor_maps.at(
                role, encoded.k_at(), encoded.v_at()
            )
