"""The list of decode cases: enough of them, few enough kernels, every value used."""

from __future__ import annotations

import pytest
import torch

from jitattn.kernels.registry import specs_of
from jitattn.spec.config import HEAD_DIMS
from tests.support.cases import (
    CACHES_SEPARATE,
    GROUPS,
    KERNELS,
    LAYOUTS,
    SCALES,
    Case,
    decode_cases,
    kernel_configs,
)
from tests.support.inputs import ROW_VIEWS, Inputs, first_visible, is_poison, make_inputs, values

CASES = decode_cases()


def test_there_are_enough_cases_and_few_kernels() -> None:
    assert len(CASES) >= 400
    assert len({str(case) for case in CASES}) == len(CASES)
    specs = {spec for config in kernel_configs("sm_90a") for spec in specs_of(config, "sm_90a")}
    assert len({spec for spec in specs if spec.kernel == "decode"}) >= 80
    moving = {"gather", "copy_pages", "block_table", "batch_info", "layer_tables"}
    assert {spec.kernel for spec in specs} - moving == {"decode", "prefill", "schedule", "merge"}
    assert len(specs) <= 780
    assert decode_cases() == CASES


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("head_dim", HEAD_DIMS),
        ("cache", CACHES_SEPARATE),
        ("q_view", [view for view in ROW_VIEWS if view != "heads_outside"]),
        ("out_view", [view for view in ROW_VIEWS if view != "qkv"]),
        ("group_size", [size for sizes in GROUPS.values() for size in sizes]),
        ("page_size", [kernel.page_size for kernel in KERNELS]),
        ("page_table", LAYOUTS),
        ("head_dim_vo", [None, 16, 64, 128, 256, 512]),
        ("batch_invariant", [False, True]),
        ("kv_layout", ["NHD", "HND"]),
        ("dtype", ["bfloat16", "float16"]),
        ("kv_dtype", [None, "float8_e4m3fn", "float8_e5m2"]),
        ("scales", SCALES),
        ("out_dtype", [None, "bfloat16", "float16", "float32"]),
        ("rows", [None, "int32", "int64"]),
        ("lengths_dtype", ["int32", "int64"]),
        ("causal", [True, False]),
        ("call", ["buffers", "returned"]),
        ("logits_soft_cap", [0.0, 0.5, 5.0, 30.0]),
        ("window_left", [-1, 0, 1, 15, 16, 127, 1000, 10**9]),
        ("sinks", [None, "float16", "bfloat16", "float32", "float64", "float32-column"]),
    ],
)
def test_every_value_is_used(field: str, values: list[object]) -> None:
    assert set(values) <= {getattr(case, field) for case in CASES}


def test_lengths_span_what_they_should() -> None:
    lengths = {length for case in CASES for length in case.lengths}
    assert {0, 1, -1, -(2**31)} <= lengths
    assert 65537 < max(lengths) <= 70_000
    assert {len(case.lengths) for case in CASES} >= {1, 300}


SMALL = [case for case in CASES[::5] if max(case.lengths) < 1600 and len(case.lengths) < 50]


@pytest.mark.parametrize("case", SMALL[::2], ids=str)
def test_cache_holds_the_tokens_and_poison(case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    first = first_visible(case, torch.device("cpu")).tolist()
    for b, length in enumerate(case.lengths):
        if length <= 0:
            continue
        start, stop = inputs.kv_indptr[b], inputs.kv_indptr[b + 1]
        for which, (dense, cache) in enumerate(
            zip((inputs.k, inputs.v), caches(inputs), strict=True)
        ):
            slots = slots_of(inputs, b, which, first[b])
            tokens = cache[slots // case.page_size, slots % case.page_size]
            scale = inputs.v_scale if which else inputs.k_scale
            assert torch.equal(values(tokens, scale), dense[start + first[b] : stop])
    for cache in caches(inputs):
        column = cache[..., -1]  # of NVFP4 the scale of a block
        holds = ~(column == 127 if cache.dtype == torch.uint8 else is_poison(column)).all(-1)
        owned = sum(max(0, n - f) for n, f in zip(case.lengths, first, strict=True) if n > 0)
        assert int(holds.sum()) == owned * (2 if case.cache == "twice" else 1)


def caches(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """K and V with NHD dimensions; ragged ones as pages of one token."""
    cache = inputs.cache
    pair = (cache[:, 0], cache[:, 1]) if isinstance(cache, torch.Tensor) else cache
    if inputs.blocks is not None:  # beside each other, as in Tokens
        both = zip(pair, inputs.blocks, strict=True)
        pair = tuple(torch.cat((x, scales.view(torch.uint8)), -1) for x, scales in both)
    if inputs.case.page_table == "ragged":
        return tuple(x.unsqueeze(1) for x in pair)
    return tuple(x.transpose(1, 2) for x in pair) if inputs.case.kv_layout == "HND" else pair


def slots_of(inputs: Inputs, request: int, which: int, first: int) -> torch.Tensor:
    """Page * page_size + place of the visible tokens of a request, in K (0) or V (1)."""
    size = inputs.case.page_size
    position = torch.arange(first, inputs.case.lengths[request])
    if inputs.case.page_table == "ragged":
        return position + int(inputs.indptr[request])
    if inputs.case.page_table == "csr":
        ids = inputs.table[int(inputs.indptr[request]) :]
    else:
        ids = inputs.table[request if inputs.rows is None else int(inputs.rows[request])]
    if inputs.case.page_table == "token":
        return ids[position].long()
    ids = ids[which] if ids.dim() == 2 else ids
    return ids[position // size].long() * size + position % size


def test_garbage_is_marked_where_nothing_may_be_read() -> None:
    case = Case(page_size=4, lengths=(9, 0, 21), window_left=5, rows="int32", page_table="separate")
    inputs = make_inputs(case, "cpu")
    assert inputs.table.shape == (6, 2, 9)
    wanted = {0: range(3), 2: range(3, 6)}  # first visible keys 3 and 15
    for b in range(3):
        live = ~inputs.garbage[int(inputs.rows[b])]
        assert live[0].tolist() == [j in wanted.get(b, ()) for j in range(9)]
        assert torch.equal(live[0], live[1])
