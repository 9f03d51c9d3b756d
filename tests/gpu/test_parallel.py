"""Ranks that share a card over gloo, and ranks with a card each over NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.support.contexts import (
    ContextCase,
    ContextInputs,
    card_cases,
    merged_in_order,
    replay_case,
    run_cases,
)
from tests.support.harness import same_bits
from tests.support.ranks import run_ranks, values

NCCL = "cpu:gloo,cuda:nccl"


def check_ranks(num_ranks: int, backend: str, device: str) -> None:
    cases = card_cases(num_ranks)
    results = values(run_ranks(num_ranks, run_cases, cases, device, backend=backend))
    for i, case in enumerate(cases):
        parts = [result[i] for result in results]
        out, lse = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        want, want_lse = merged_in_order(ContextInputs(case, DEVICE))
        assert same_bits(out, want.cpu()), case
        assert same_bits(lse, want_lse.cpu()), case


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_that_share_a_card(num_ranks: int) -> None:
    check_ranks(num_ranks, "gloo", f"{DEVICE}:0")


def cards_of(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} cards")


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_with_a_card_each(num_ranks: int) -> None:
    cards_of(num_ranks)
    check_ranks(num_ranks, NCCL, DEVICE)


@pytest.mark.parametrize("is_mla", [False, True])
def test_a_captured_step_is_replayed(is_mla: bool) -> None:
    cards_of(2)
    case = ContextCase(
        num_ranks=2, page_size=16, seq_lens=(700, 50, 90), is_mla=is_mla, batch_invariant=True
    )
    assert values(run_ranks(2, replay_case, case, 1000, backend=NCCL)) == [1000, 1000]
