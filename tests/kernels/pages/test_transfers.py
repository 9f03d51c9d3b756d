"""What moves tokens and pages and makes tables, on the CPU: by definition."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.support import transfers
from tests.support.cases import Case
from tests.support.examples import examples


@examples(150)
@given(transfers.gathers())
def test_gathers(example: transfers.Gather) -> None:
    transfers.check_gather(example, "cpu")


@pytest.mark.parametrize("scale", [None, "number", "heads"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["int8", "nvfp4", "int4"])
def test_gathers_of_quantised_caches(name: str, out_dtype: str, scale: str | None) -> None:
    transfers.check_quantised_gather(name, out_dtype, scale, "cpu")


@pytest.mark.parametrize(("kv_dtype", "out_dtype"), transfers.SATURATIONS)
def test_gathers_saturate(kv_dtype: str, out_dtype: str) -> None:
    transfers.check_saturation(kv_dtype, out_dtype, "cpu")


@examples(150)
@given(transfers.copies())
def test_copies(example: transfers.Copy) -> None:
    transfers.check_copy(example, "cpu")


@examples(150)
@given(transfers.slot_tables(may_break=False))
def test_block_tables(example: transfers.Slots) -> None:
    transfers.check_block_table(example, "cpu")


@examples(100)
@given(transfers.token_batches())
def test_batch_infos(example: transfers.Tokens) -> None:
    transfers.check_batch_info(example, "cpu")


@examples(60)
@given(transfers.paged_cases())
def test_conversions(case: Case) -> None:
    transfers.check_conversions(case, "cpu")
