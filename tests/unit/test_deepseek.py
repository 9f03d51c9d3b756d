"""A model with latent attention gives eager's tokens through `MLAPlanner`, on the CPU."""

from __future__ import annotations

import pytest


@pytest.mark.usefixtures("bundled")
def test_tokens_are_those_of_eager_attention() -> None:
    pytest.importorskip("transformers")
    from tests.deepseek import check_tokens

    assert check_tokens("cpu", num_layers=3, lengths=(5, 33, 16), num_new=8) == 24
