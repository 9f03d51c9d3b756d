"""The kernel that dequantises queries, run on the CPU with the real host code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jitattn.kernels.attention.queries import check_q_scale, dequantize_into
from tests.emulator.queries import emulated_queries
from tests.support.fp8_queries import FORMS, FP8, FP8Case, FP8Inputs

__all__ = ["emulated_queries"]  # a fixture


def dequantized(q: Tensor, q_scale: object) -> Tensor:
    out = torch.full(q.shape, torch.inf, dtype=torch.float16)
    dequantize_into(q, check_q_scale(q_scale, q), out)  # type: ignore[arg-type]
    return out


@pytest.mark.usefixtures("emulated_queries")
class TestKernel:
    @pytest.mark.parametrize("view", ["whole", "packed", "odd"])
    @pytest.mark.parametrize("form", FORMS)
    def test_every_form(self, form: str, view: str) -> None:
        inputs = FP8Inputs(FP8Case(form=form, view=view, head_dim=48), "cpu")
        assert inputs.q.is_contiguous() is (view == "whole")
        assert torch.equal(dequantized(inputs.q, inputs.q_scale), inputs.values().half())

    @pytest.mark.parametrize("scale", [1.0, -0.5, 0.0, 2.0**-20, 3.0e4, -3.0e38])
    def test_every_byte(self, scale: float) -> None:
        """Nearest, the largest float16 beyond it, NaN for NaN."""
        q = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 8, 16)
        want = (q.double() * scale).clamp(-65504, 65504).half()
        for given in (scale, torch.tensor(scale)):
            found = dequantized(q, given)
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.signbit(), want.signbit()) or bool(want.isnan().any())

    @pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf])
    def test_scales_without_a_value(self, scale: float) -> None:
        """A row whose scale is none is NaN; the others are themselves."""
        q = torch.ones(2, 3, 16).to(FP8)
        scales = torch.ones(2, 3)
        scales[1, 2] = scale
        found = dequantized(q, scales)
        assert bool(found[1, 2].isnan().all())
        assert int((found == 1).sum()) == 5 * 16

    def test_nothing(self) -> None:
        assert dequantized(torch.ones(0, 3, 16).to(FP8), torch.ones(0, 3)).numel() == 0
