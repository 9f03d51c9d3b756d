"""Pages of caches in four bits with their scales: the host's tier, forks, copies, reuse."""

from __future__ import annotations

import pytest

from tests.support.kv_quantised import KV_DTYPES, check_pages_that_move


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_that_move_keep_numbers_and_scales(kv_dtype: str, kv_layout: str) -> None:
    check_pages_that_move(kv_dtype, "cpu", kv_layout)
