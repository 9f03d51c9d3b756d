"""The same as tests/kernels/mla/test_deepseek.py on a card."""

from __future__ import annotations

import pytest

from tests.gpu.device import DEVICE


def test_tokens_are_those_of_eager_attention() -> None:
    pytest.importorskip("transformers")
    from tests.support.deepseek import check_tokens

    lengths = (5, 33, 16, 700, 1, 129, 64, 300)
    assert check_tokens(DEVICE, num_layers=27, lengths=lengths, num_new=32) == 32 * len(lengths)
