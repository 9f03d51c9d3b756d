"""What moves tokens and pages and makes tables, on the CPU: by definition."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.support.cases import Case
from tests.support.transfers import (
    SATURATIONS,
    Copy,
    Gather,
    Slots,
    Tokens,
    check_batch_info,
    check_block_table,
    check_conversions,
    check_copy,
    check_gather,
    check_quantised_gather,
    check_saturation,
    copies,
    examples,
    gathers,
    paged_cases,
    slot_tables,
    token_batches,
)


@examples(150)
@given(gathers())
def test_gathers(example: Gather) -> None:
    check_gather(example, "cpu")


@pytest.mark.parametrize("scale", [None, "number", "heads"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_gathers_of_quantised_caches(name: str, out_dtype: str, scale: str | None) -> None:
    check_quantised_gather(name, out_dtype, scale, "cpu")


@pytest.mark.parametrize(("kv_dtype", "out_dtype"), SATURATIONS)
def test_gathers_saturate(kv_dtype: str, out_dtype: str) -> None:
    check_saturation(kv_dtype, out_dtype, "cpu")


@examples(150)
@given(copies())
def test_copies(example: Copy) -> None:
    check_copy(example, "cpu")


@examples(150)
@given(slot_tables(may_break=False))
def test_block_tables(example: Slots) -> None:
    check_block_table(example, "cpu")


@examples(100)
@given(token_batches())
def test_batch_infos(example: Tokens) -> None:
    check_batch_info(example, "cpu")


@examples(60)
@given(paged_cases())
def test_conversions(case: Case) -> None:
    check_conversions(case, "cpu")
