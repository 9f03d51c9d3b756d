"""Random examples on the reference backend, against a formula that shares nothing with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.support.examples import examples as settings_of
from tests.support.harness import attend, tolerance
from tests.support.inputs import Inputs
from tests.support.strategies import VARIANTS, Example, examples, inputs_of, run_example


def by_hand(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """One query head at a time, its sink as one more key whose value is zero."""
    case = inputs.case
    outs, lses = [], []
    for b, length in enumerate(case.lengths):
        stop = inputs.kv_indptr[b + 1]
        start = inputs.kv_indptr[b]
        if case.window_left >= 0:
            start = max(start, stop - case.window_left - 1)
        assert stop - inputs.kv_indptr[b] == max(length, 0)
        for head in range(case.num_qo_heads):
            k, v = (x[start:stop, head // case.group_size].double() for x in (inputs.k, inputs.v))
            scores = case.scale * (k @ inputs.q[b, head].double())
            if case.logits_soft_cap > 0:
                scores = case.logits_soft_cap * (scores / case.logits_soft_cap).tanh()
            if inputs.sinks is not None:
                scores = torch.cat((scores, inputs.sinks[head : head + 1].double()))
                v = torch.cat((v, v.new_zeros(1, v.shape[1])))
            empty = scores.numel() == 0
            lses.append(torch.tensor(-math.inf) if empty else scores.logsumexp(0))
            outs.append(v.new_zeros(v.shape[1]) if empty else scores.softmax(0) @ v)
    shape = (len(case.lengths), case.num_qo_heads)
    return torch.stack(outs).view(*shape, -1), torch.stack(lses).double().view(shape)


@settings_of(50)
@given(examples(longest=150))
def test_random_examples(example: Example) -> None:
    inputs, _ = inputs_of(example, "cpu")
    out, lse = attend(inputs)
    want_out, want_lse = by_hand(inputs)
    limits = tolerance(example.case.dtype, example.case.out_dtype)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=limits.lse_absolute)
    # The reference rounds once, so the magnitude of V bounds it well.
    scale = float(inputs.v.abs().max()) if inputs.v.numel() else 0.0
    atol = limits.out_relative * scale + limits.out_absolute
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=atol)


@settings_of(30)
@given(examples(longest=150))
def test_the_test_of_the_gpu(example: Example) -> None:
    """What tests/gpu/test_random.py does with an example, probes included."""
    run_example(example, "cpu")


@pytest.mark.parametrize("name", ["page_table", "batch_invariant", "window_left", "sinks"])
def test_variants_use_every_feature(name: str) -> None:
    assert len(VARIANTS) >= 300
    assert len({getattr(case, name) for case in VARIANTS}) >= {"batch_invariant": 2}.get(name, 5)
