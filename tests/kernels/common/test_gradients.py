"""Kernels have no backward pass: results carry no gradient, and compiled calls say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn

PAGES = jitattn.BlockTable(torch.arange(4, dtype=torch.int32)[None])
LENGTHS = torch.tensor([5], dtype=torch.int32)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def preprocess(**others: Any) -> Tensor:
    given: dict[str, Any] = {
        "qkv": torch.zeros(5, 8 * 64, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16),
        "slots": torch.arange(5),
        "v_transform": "hadamard",
    }
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    return jitattn.preprocess_qkv(**given | heads | others)


def results_of(name: str) -> tuple[Tensor, ...]:
    if name == "preprocess_qkv":
        cache = torch.zeros(4, 2, 16, 2, 64, dtype=torch.bfloat16)
        qkv = weight(5, 8 * 64, dtype=torch.bfloat16)
        return preprocess(qkv=qkv, kv_cache=cache, q_norm=weight(64)), cache
    if name == "merge_states":
        return jitattn.merge_states(weight(2, 3, 4, 64), weight(2, 3, 4))
    q, keys = torch.randn(1, 4, 64), torch.zeros(4, 16, 68, dtype=torch.uint8)
    q = q.to(torch.float8_e4m3fn)
    return (jitattn.index_logits(q, weight(1, 4), keys, PAGES, LENGTHS),)


@pytest.mark.parametrize("name", ["preprocess_qkv", "merge_states", "index_logits"])
def test_eager_calls_have_none(name: str) -> None:
    """On the CPU as on a card."""
    assert not any(result.requires_grad for result in results_of(name))


PART = torch.zeros(5, 2, 64, dtype=torch.bfloat16)
REFUSED: dict[str, dict[str, Any]] = {
    r"qkv\[2\]": {"qkv": (PART.repeat(1, 2, 1), PART, PART.clone().requires_grad_())},
    "k_norm": {"k_norm": weight(64)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_compiled_calls_refuse_what_requires_one(name: str) -> None:
    compiled = torch.compile(lambda: preprocess(**REFUSED[name]), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{name} requires a gradient"):
        compiled()
    with torch.no_grad():
        assert compiled().shape == (5, 4, 64)
