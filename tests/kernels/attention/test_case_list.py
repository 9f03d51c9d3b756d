"""The list of decode cases: enough of them, few enough kernels, every value used."""

from __future__ import annotations

import pytest

from jitattn.kernels.registry import specs_of
from jitattn.spec.config import HEAD_DIMS
from tests.support.cases import (
    CACHES_SEPARATE,
    GROUPS,
    KERNELS,
    LAYOUTS,
    SCALES,
    decode_cases,
    kernel_configs,
)
from tests.support.inputs import ROW_VIEWS

CASES = decode_cases()


def test_there_are_enough_cases_and_few_kernels() -> None:
    assert len(CASES) >= 400
    assert len({str(case) for case in CASES}) == len(CASES)
    specs = {spec for config in kernel_configs("sm_90a") for spec in specs_of(config, "sm_90a")}
    assert len({spec for spec in specs if spec.kernel == "decode"}) >= 80
    moving = {"gather", "copy_pages", "block_table", "batch_info", "layer_tables"}
    assert {spec.kernel for spec in specs} - moving == {"decode", "prefill", "schedule", "merge"}
    assert len(specs) <= 1010
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
