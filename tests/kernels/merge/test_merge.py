"""merge_states: what it means, what is neutral in it, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.support.cases import D128, D256, Case
from tests.support.devices import EVERYWHERE
from tests.support.harness import UNIT_ROUNDOFF, attend, check, expected, planner_for, same_bits
from tests.support.inputs import make_inputs, uniform_probe

DTYPES = ("float16", "bfloat16", "float32")


def states(
    num_states: int, dtype: str, device: str, shape: tuple[int, int, int] = (5, 3, 40)
) -> tuple[Tensor, Tensor]:
    """Random states; about a third of them are empty."""
    rng = torch.Generator(device).manual_seed(num_states)
    outs = torch.randn((num_states, *shape), generator=rng, device=device)
    lses = 4 * torch.randn((num_states, *shape[:2]), generator=rng, device=device)
    empty = torch.rand(lses.shape, generator=rng, device=device) < 0.3
    return outs.to(getattr(torch, dtype)), lses.masked_fill(empty, -math.inf)


def merged_in_float64(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and the sum of weight * |out| that scales the tolerance."""
    lse = torch.logsumexp(lses.double(), dim=0)
    weights = torch.exp(lses.double() - lse).nan_to_num(nan=0.0)[..., None]
    values = torch.where(weights > 0, outs.double(), 0.0)
    return (weights * values).sum(0), lse, (weights * values.abs()).sum(0)


def assert_merged(outs: Tensor, lses: Tensor, got: tuple[Tensor, Tensor]) -> None:
    out, lse, magnitude = merged_in_float64(outs, lses)
    assert got[0].dtype == outs.dtype
    assert got[1].dtype == torch.float32
    assert torch.equal(got[1] == -math.inf, lse == -math.inf)
    torch.testing.assert_close(got[1].double(), lse, rtol=0, atol=1e-5)
    rounding = UNIT_ROUNDOFF[str(outs.dtype).removeprefix("torch.")]
    # A weight is the product of approximate functions, each within some 2**-22.
    assert bool(((got[0].double() - out).abs() <= (rounding + 2**-18) * magnitude + 2**-25).all())


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_states", [1, 2, 3, 7, 64])
def test_against_float64(num_states: int, dtype: str, device: str) -> None:
    outs, lses = states(num_states, dtype, device)
    assert_merged(outs, lses, jitattn.merge_states(outs, lses))


@EVERYWHERE
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (1, 1, 512), (3, 71, 16), (1000, 2, 128), (2, 3, 33), (0, 4, 64), (4, 0, 8)],
)
def test_shapes(shape: tuple[int, int, int], device: str) -> None:
    outs, lses = states(3, "bfloat16", device, shape)
    out, lse = jitattn.merge_states(outs, lses)
    assert tuple(out.shape) == shape
    assert_merged(outs, lses, (out, lse))


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_does_not_fit_saturates(dtype: str, device: str) -> None:
    outs, lses = states(2, dtype, device)
    outs[:] = math.inf
    lses[:] = 0.0
    out, _ = jitattn.merge_states(outs, lses)
    assert bool((out == torch.finfo(out.dtype).max).all())


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filler", [0.0, math.nan, math.inf])
def test_an_empty_state_changes_no_bit(filler: float, dtype: str, device: str) -> None:
    outs, lses = states(3, dtype, device)
    want = jitattn.merge_states(outs, lses)
    for where in range(4):
        more = torch.cat((outs[:where], torch.full_like(outs[:1], filler), outs[where:]))
        logs = torch.cat((lses[:where], torch.full_like(lses[:1], -math.inf), lses[where:]))
        more[logs == -math.inf] = filler
        got = jitattn.merge_states(more, logs)
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_state_among_empty_ones_is_returned_as_it_is(dtype: str, device: str) -> None:
    outs, lses = states(1, dtype, device)
    lses = lses.nan_to_num(neginf=-300.0)
    more = torch.cat((torch.full_like(outs, math.nan), outs, torch.full_like(outs, math.nan)))
    logs = torch.cat((torch.full_like(lses, -math.inf), lses, torch.full_like(lses, -math.inf)))
    out, lse = jitattn.merge_states(more, logs)
    assert same_bits(out, outs[0])
    assert same_bits(lse, lses[0])


@EVERYWHERE
def test_nothing_but_empty_states(device: str) -> None:
    outs, lses = states(4, "bfloat16", device)
    out, lse = jitattn.merge_states(outs * math.nan, torch.full_like(lses, -math.inf))
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@EVERYWHERE
def test_no_state_at_all(device: str) -> None:
    outs, lses = states(1, "bfloat16", device)
    out, lse = jitattn.merge_states(outs[:0], lses[:0])
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@EVERYWHERE
@pytest.mark.parametrize("level", [-1e4, -200.0, 200.0, 1e4])
def test_levels_far_from_zero(level: float, device: str) -> None:
    outs, lses = states(5, "float32", device)
    got = jitattn.merge_states(outs, lses + level)
    out, lse, magnitude = merged_in_float64(outs, lses + level)
    torch.testing.assert_close(got[1].double(), lse, rtol=1e-6, atol=1e-5)
    assert bool(((got[0].double() - out).abs() <= 1e-2 * magnitude + 1e-6).all())


@EVERYWHERE
def test_states_of_very_different_weight(device: str) -> None:
    outs, lses = states(3, "float32", device)
    lses = torch.full_like(lses, 0.0)
    lses[1], lses[2] = 200.0, -1e30
    out, lse = jitattn.merge_states(outs, lses)
    assert same_bits(out, outs[1])
    assert bool((lse == 200).all())


@EVERYWHERE
@pytest.mark.parametrize("level", [-1e30, -3e38, 1e30])
def test_equal_states_of_any_level_count_equally(level: float, device: str) -> None:
    """Only -inf is a state without keys."""
    outs, lses = states(2, "float32", device)
    out, lse = jitattn.merge_states(outs, torch.full_like(lses, level))
    torch.testing.assert_close(out, outs.mean(0), rtol=1e-6, atol=1e-6)
    assert bool((lse == level).all())


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_states(dtype: str, device: str) -> None:
    outs, lses = states(3, dtype, device)
    want = jitattn.merge_states(outs, lses)
    padded = torch.full((5, 3, 3, 51), math.nan, dtype=outs.dtype, device=device)
    view = padded.permute(2, 0, 1, 3)[..., 7:47]
    view.copy_(outs)
    logs = torch.full((3, 5, 3, 2), math.nan, device=device)
    turned = logs.permute(1, 2, 0, 3)[..., 1].permute(2, 0, 1)
    turned.copy_(lses)
    got = jitattn.merge_states(view, turned)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@EVERYWHERE
def test_a_state_used_twice_by_expansion(device: str) -> None:
    outs, lses = states(1, "float32", device)
    twice = jitattn.merge_states(outs.expand(2, -1, -1, -1), lses.expand(2, -1, -1))
    assert_merged(torch.cat((outs, outs)), torch.cat((lses, lses)), twice)


@EVERYWHERE
def test_size_1_dimensions_with_any_stride(device: str) -> None:
    outs, lses = states(2, "bfloat16", device, (1, 1, 16))
    want = jitattn.merge_states(outs, lses)
    strange = outs.as_strided(outs.shape, (16, 2**40, 7, 1))
    logs = lses.as_strided(lses.shape, (1, 2**40, 3))
    got = jitattn.merge_states(strange, logs)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@EVERYWHERE
@pytest.mark.parametrize("case", [D128, replace(D256, dtype="bfloat16")], ids=str)
def test_c20_prefix_and_suffix_merge_to_one_pass(case: Case, device: str) -> None:
    """A prefix of 4096 tokens and a suffix of 64, and a third part that is empty."""
    case = replace(case, lengths=(4160,), num_kv_heads=1)
    inputs = make_inputs(case, device)
    planner = planner_for(case, device)
    parts = []
    for columns, length in ((slice(0, 256), 4096), (slice(256, 260), 64), (slice(0, 1), 0)):
        pages = jitattn.BlockTable(inputs.table[:, columns])
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        plan = planner.plan(pages, lengths)
        parts.append(plan.run(inputs.q, planner.bind(inputs.given), return_lse=True))
    outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
    out, lse = jitattn.merge_states(outs, lses)
    want = expected(inputs)
    torch.testing.assert_close(lse.double(), want.lse, rtol=0, atol=1e-3)
    # The parts were rounded to bf16, then the sum.
    error = (out.double() - want.out).abs()
    assert bool((error <= 3 * 2.0**-8 * want.magnitude).all())
    check(case, *attend(inputs), want)


@EVERYWHERE
def test_c20_counts_add_up(device: str) -> None:
    """Uniform probes of 1, 10 and 1600 keys: exp(lse) counts, and counts add."""
    case = replace(D128, lengths=(1, 10, 1600), num_kv_heads=1)
    _, lse = attend(make_inputs(case, device, uniform_probe(case, device)))
    _, total = jitattn.merge_states(torch.zeros(3, 1, 4, 8, device=device), lse[:, None])
    torch.testing.assert_close(total, torch.full_like(total, math.log(1611)), rtol=0, atol=1e-5)


@EVERYWHERE
def test_base_two_is_natural_but_for_the_unit(device: str) -> None:
    outs, lses = states(3, "bfloat16", device)
    want, natural = jitattn.merge_states(outs, lses)
    out, lse = jitattn.merge_states(outs, lses / math.log(2), base=2)
    torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse * math.log(2), natural, rtol=1e-6, atol=1e-6)
    got = jitattn.merge_states(outs, lses, base=math.e)
    assert same_bits(got[0], want) and same_bits(got[1], natural)


@pytest.mark.parametrize("base", [10, 0, math.nan, "2", None])
def test_another_base_is_refused(base: object) -> None:
    outs, lses = states(2, "float32", "cpu")
    with pytest.raises((TypeError, ValueError), match="base is"):
        jitattn.merge_states(outs, lses, base=base)  # type: ignore[arg-type]


REFUSED = {
    "a list": ([1.0], torch.zeros(1, 2, 3), "outs"),
    "float64 outs": (torch.zeros(1, 2, 3, 4).double(), torch.zeros(1, 2, 3), "outs.*float64"),
    "int outs": (torch.zeros(1, 2, 3, 4).int(), torch.zeros(1, 2, 3), "outs.*int32"),
    "bf16 lses": (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3).bfloat16(), "lses.*bfloat16"),
    "rank 3": (torch.zeros(2, 3, 4), torch.zeros(2, 3), "outs"),
    "other states": (torch.zeros(2, 2, 3, 4), torch.zeros(1, 2, 3), "lses"),
    "other heads": (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4), "lses"),
    "lses of rank 4": (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 1), "lses"),
    "strided elements": (torch.zeros(1, 2, 3, 8)[..., ::2], torch.zeros(1, 2, 3), "contiguous"),
    "another device": (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, device="meta"), "lses.*meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    outs, lses, match = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=match):
        jitattn.merge_states(outs, lses)
