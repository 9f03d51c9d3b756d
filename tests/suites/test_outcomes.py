"""What a test of another package's suite counts as."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jitattn.compat import flash_attn, flashinfer
from tests.suites.plugin import TooSlowError, extent, outcome_of


def ended(call: Callable[[], object]) -> str:
    with pytest.raises(BaseException) as caught:
        call()
    return outcome_of(caught.value)[0]


def differ() -> None:
    assert torch.equal(torch.zeros(1), torch.ones(1))


def differ_in_gradients() -> None:
    dq = torch.ones(1)
    assert not dq.any()


def expect_other_words() -> None:
    with pytest.raises(ValueError, match="something else"):
        flashinfer.BatchAttention("NDH", "cpu")


def expect_a_refusal() -> None:
    with pytest.raises(ValueError, match="anything"):
        torch.zeros(1)


def too_slow() -> None:
    raise TooSlowError


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (lambda: flashinfer.BatchAttention("NDH", "cpu"), "refused by name"),
        (lambda: flashinfer.rmsnorm, "refused by name"),
        (lambda: flash_attn.flash_attn_func(1, 2, 3), "refused by name"),
        # What Python says of a call, and what torch says inside, are no refusals.
        (lambda: flashinfer.packbits(bits=1), "failed"),
        (lambda: flashinfer.MLAPlanMetadata.csr(), "failed"),
        (lambda: torch.zeros(2).view(3), "failed"),
        (differ, "failed"),
        (differ_in_gradients, "forward passed"),
        (expect_other_words, "refused in other words"),
        (expect_a_refusal, "does what the package refuses"),
        (too_slow, "too slow"),
        (lambda: torch.empty(1 << 50), "too slow"),
        (lambda: pytest.skip("a card"), "skipped"),
    ],
)
def test_ends_are_told_apart(call: Callable[[], object], outcome: str) -> None:
    assert ended(call) == outcome


def test_cases_are_ordered_by_what_they_compute() -> None:
    assert extent((64, 128)) > extent(128) > extent(True) == extent("float16") == 0.0
