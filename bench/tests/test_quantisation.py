"""Errors of quantised caches, by the definition: what is compared, and with what."""

from __future__ import annotations

import pytest
import torch

from bench import quantisation_error as of_out
from bench import quantisation_logits as of_logits
from bench.decoder_model import TINY


@pytest.mark.parametrize("kv_dtype", of_out.DTYPES)
def test_rotations_are_taken_back(kv_dtype: str) -> None:
    x = torch.randn(40, 2, 128, generator=torch.Generator().manual_seed(0))
    plain, rotated = (of_out.kept_values(x, f"{kv_dtype}{end}") for end in ("", of_out.ROTATED))
    errors = [of_out.relative_error(found, x) for found in (plain, rotated)]
    assert errors[0] == pytest.approx(errors[1], rel=0.25)
    assert of_out.bytes_of(kv_dtype) == of_out.bytes_of(f"{kv_dtype}{of_out.ROTATED}")


def test_a_rotation_spreads_outliers() -> None:
    x = torch.randn(40, 2, 128, generator=torch.Generator().manual_seed(0))
    x[..., 5] += 30
    plain, rotated = (of_out.kept_values(x, f"int4{end}") for end in ("", of_out.ROTATED))
    assert of_out.relative_error(rotated, x) < of_out.relative_error(plain, x) / 2


@pytest.mark.parametrize("kind", of_logits.MODELS)
def test_logits(kind: str) -> None:
    model = of_logits.Model(kind, TINY, num_tokens=24)
    right = model.logits(model.exact_heads)
    assert right.shape == (24, TINY.vocabulary)
    changes = {
        cache: of_logits.change_of(model.logits_of(cache), right)
        for cache in ("bfloat16", "bfloat16 rotated", "int4", "int4 rotated")
    }
    for end in ("", of_out.ROTATED):
        assert changes[f"bfloat16{end}"].logits < 0.02 < changes[f"int4{end}"].logits < 1
        assert 0 < changes[f"bfloat16{end}"].divergence < changes[f"int4{end}"].divergence
    nothing = of_logits.change_of(right, right)
    assert nothing == (0, 0, 0)
