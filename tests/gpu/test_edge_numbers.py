"""Scores at the edge of float32, on the card."""

from __future__ import annotations

from dataclasses import replace

import pytest

import jitattn
from tests.support.cases import Case, of
from tests.support.edge_numbers import (
    LATENT_CASES,
    check_far_queries,
    check_far_scales,
    check_large_latent_neighbour,
    check_large_latent_scores,
    check_large_neighbour,
    check_large_scores,
)
from tests.support.mla import MLACase

pytestmark = pytest.mark.gpu

BASE = Case(head_dim=128, num_kv_heads=2, group_size=4)
STEPS = pytest.mark.parametrize(
    "case",
    [of(BASE, (1, 1500), (1, 70)), of(BASE, (4, 900)), of(BASE, (70, 150), (600, 1600))],
    ids=["decode", "decode of 4", "prefill"],
)


@STEPS
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_large_scores(kv_dtype: str | None, case: Case) -> None:
    check_large_scores(replace(case, kv_dtype=kv_dtype), "cuda")


@STEPS
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_large_scores_of_another_row(kv_dtype: str | None, case: Case) -> None:
    check_large_neighbour(replace(case, kv_dtype=kv_dtype), "cuda")


@STEPS
def test_scales_whose_product_is_infinite(case: Case) -> None:
    check_far_scales(replace(case, kv_dtype="float8_e4m3fn"), "cuda")


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int4"])
def test_queries_that_become_float16(kv_dtype: str) -> None:
    check_far_queries(of(replace(BASE, kv_dtype=kv_dtype), (70, 150), (600, 1600)), "cuda")


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_large_latent_scores(case: MLACase) -> None:
    check_large_latent_scores(case, "cuda")


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_large_latent_scores_of_another_row(case: MLACase) -> None:
    arguments = case.planner_arguments()
    planner = jitattn.MLAPlanner(**arguments, batch_invariant=True, device="cuda")
    check_large_latent_neighbour(case, "cuda", planner)
