"""jitattn.attention: the call for scripts equals planner, bind, plan and run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitattn
from jitattn.kernels.attention import functional
from tests.support.cases import D128, EVERY_LAYOUT, RAGGED, SOFT_CAP, Case, decode_cases
from tests.support.devices import EVERYWHERE
from tests.support.harness import attend, check, expected, same_bits
from tests.support.inputs import Inputs, make_inputs


def call(inputs: Inputs, **changes: object) -> object:
    case = inputs.case
    arguments = {
        "kv_layout": case.kv_layout,
        "causal": case.causal,
        "window_left": case.window_left,
        "logits_soft_cap": case.logits_soft_cap,
        "sm_scale": case.sm_scale,
        "sinks": inputs.sinks,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
        "return_lse": True,
    } | changes
    return jitattn.attention(inputs.q, inputs.given, inputs.pages(), inputs.seq_lens, **arguments)


@EVERYWHERE
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", ["pair_nhd", "one_nhd", "interleaved", "odd_strides"])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_every_layout(case: Case, cache: str, kv_layout: str, device: str) -> None:
    if case.page_table == "ragged" and kv_layout == "HND":
        pytest.skip("ragged K and V have no pages, so no order in them")
    case = replace(case, lengths=(40, 0, 17), cache=cache, kv_layout=kv_layout)
    inputs = make_inputs(case, device)
    out, lse = call(inputs)
    check(case, out, lse, expected(inputs))
    want = attend(inputs)
    assert same_bits(out, want[0])
    assert same_bits(lse, want[1])


FEATURES = [
    case
    for case in decode_cases()
    if max(case.lengths) < 700 and len(case.lengths) < 20 and case.out_dtype is None
]


@pytest.mark.parametrize("case", FEATURES[::6], ids=str)
def test_every_argument(case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    check(case, *call(inputs), expected(inputs))


@EVERYWHERE
def test_windows_caps_scales_and_sinks(device: str) -> None:
    features = {"window_left": 20, "sm_scale": 0.3, "sinks": "bfloat16-column"}
    for case in (D128, SOFT_CAP, RAGGED):
        case = replace(case, lengths=(40, 0, 17), **features)
        inputs = make_inputs(case, device)
        check(case, *call(inputs), expected(inputs))


def test_out_alone() -> None:
    inputs = make_inputs(replace(D128, lengths=(40, 0)), "cpu")
    out = call(inputs, return_lse=False)
    assert isinstance(out, torch.Tensor)
    assert same_bits(out, call(inputs)[0])


def test_planners_are_kept() -> None:
    inputs = make_inputs(replace(D128, lengths=(40, 0)), "cpu")
    call(inputs)
    before = functional._planner.cache_info()
    call(inputs)
    other = make_inputs(replace(D128, lengths=(1, 2, 3), seed=1), "cpu")
    call(other)
    after = functional._planner.cache_info()
    assert after.misses == before.misses
    assert after.hits == before.hits + 2
    call(inputs, window_left=3)
    assert functional._planner.cache_info().misses == before.misses + 1


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no max_q_len": ({"qo_indptr": torch.tensor([0, 1, 2], dtype=torch.int32)}, "max_q_len"),
    "max_q_len alone": ({"max_q_len": 3}, "max_q_len is 3"),
    "queries beyond q": (
        {"qo_indptr": torch.tensor([0, 1, 3], dtype=torch.int32), "max_q_len": 2},
        r"2 rows.*\b3\b",
    ),
    "k_scale": ({"k_scale": 0.5}, "k_scale"),
    "v_scale": ({"v_scale": torch.tensor(0.5)}, "v_scale"),
    "custom_mask": ({"custom_mask": torch.ones(3, 9, dtype=torch.bool)}, "custom_mask"),
    "window_left": ({"window_left": -2}, "window_left=-2"),
    "kv_layout": ({"kv_layout": "DHN"}, "kv_layout"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, match = REFUSED[name]
    inputs = make_inputs(replace(D128, lengths=(40, 0)), "cpu")
    with pytest.raises((TypeError, ValueError), match=match):
        call(inputs, **changes)


def test_tensors_that_are_none() -> None:
    inputs = make_inputs(replace(D128, lengths=(40, 0)), "cpu")
    pages, lengths = inputs.pages(), inputs.seq_lens
    with pytest.raises((TypeError, ValueError), match="q"):
        jitattn.attention(inputs.q[0], inputs.cache, pages, lengths)
    with pytest.raises((TypeError, ValueError), match="pages"):
        jitattn.attention(inputs.q, inputs.given, inputs.table, lengths)
    with pytest.raises((TypeError, ValueError), match="kv_cache"):
        jitattn.attention(inputs.q, inputs.cache[0], pages, lengths)
    with pytest.raises((TypeError, ValueError), match="seq_lens"):
        jitattn.attention(inputs.q, inputs.given, pages, [40, 0])
    with pytest.raises((TypeError, ValueError), match="k_cache"):
        jitattn.attention(inputs.q, tuple(x[0] for x in inputs.cache), pages, lengths)
