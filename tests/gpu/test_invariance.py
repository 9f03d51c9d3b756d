"""Batch invariance across decode steps, verified tokens, chunks and prefill, bit for bit."""

from __future__ import annotations

import random

import pytest

import jitattn
from tests.support.invariance import (
    ATTENTION,
    LATENT,
    attention_arguments,
    attention_sequence,
    latent_arguments,
    latent_sequence,
)

pytestmark = pytest.mark.gpu

# Around the first changes of the splits' length, and beyond.
SPANS = ((0, 700), (8000, 8700), (9900, 10_600), (16_200, 16_900))


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_a_token_has_its_bits_in_any_piece(name: str, span: tuple[int, int]) -> None:
    planner = jitattn.AttentionPlanner(**attention_arguments(name), device="cuda")  # type: ignore[arg-type]
    first, num_tokens = span
    request = attention_sequence(planner, num_tokens, num_tokens, "cuda")
    assert request.check(first, random.Random(name), rounds=2) > 20


@pytest.mark.parametrize("span", ((0, 300), (4000, 4300), (8100, 8300)), ids=str)
@pytest.mark.parametrize("name", LATENT)
def test_a_token_of_latent_attention_has_its_bits_in_any_piece(
    name: str, span: tuple[int, int]
) -> None:
    planner = jitattn.MLAPlanner(**latent_arguments(name), device="cuda")  # type: ignore[arg-type]
    first, num_tokens = span
    request = latent_sequence(planner, num_tokens, num_tokens, "cuda")
    assert request.check(first, random.Random(name), rounds=2) > 5
