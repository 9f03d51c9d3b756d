"""A model with latent attention gives eager's tokens through `MLAPlanner`, on the CPU."""

from __future__ import annotations

import importlib.util

import pytest


# Before the watch over its kernels begins, which there are none of without.
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.usefixtures("bundled")
def test_tokens_are_those_of_eager_attention() -> None:
    from tests.support.deepseek import check_tokens

    assert check_tokens("cpu", num_layers=3, lengths=(5, 33, 16), num_new=8) == 24
