"""Run a case through the public API and compare it with the float64 reference."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.attention import reference
from jitattn.tensors.page_table_base import PageTable
from tests.support.cases import Case
from tests.support.inputs import (
    CANARY,
    Inputs,
    Tokens,
    address_probe,
    is_poison,
    make_inputs,
    random_tokens,
    surroundings,
    uniform_probe,
)
from tests.support.queries import Rows, row_starts
from tests.support.variant_values import sharpened

Result = tuple[Tensor, Tensor]
"""Out and lse."""

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |out - reference| and |lse - reference|; see `tolerance`."""

    out_relative: float  # times sum of p * |v| over the keys of the row
    out_of_ceiling: float  # times the row's largest p and the sum of |v|
    out_absolute: float
    lse_absolute: float


def tolerance(
    dtype: str, out_dtype: str | None = None, *, is_dequantised: bool = False
) -> Tolerance:
    """The error that rounding allows; everything else is a bug.

    Inputs are exact in the reference, which is computed from the stored values. A kernel rounds
    twice: the probabilities to ``dtype`` before they meet V, each by at most u(dtype), and the
    result to ``out_dtype``. With a = sum of p * |v| >= |out|, per row and column,

        |out - reference| <= (u(dtype) + u(out_dtype)) * a        u = 2**-8 bf16, 2**-11 fp16

    which is the suggested 2**-7 (bf16) and 2**-10 (fp16) of max|V| with the average of |V| in
    place of its maximum, hence sharper on long contexts. Scores, exponentials and sums are
    float32: with scores below 2**7 they add some 2**-16 of a, for which one part in 2**13 is
    granted, and beside a large sink float32 weights underflow to 0.

    Numbers of fp16 below 2**-14 are multiples of 2**-24 (those of bf16 of 2**-133). A result there
    is rounded by up to 2**-25. So are probabilities, which are rounded as parts of the largest one
    of the row so far: each is off by up to 2**-25 of the row's largest p, and all of them, whatever
    their signs, add up to 2**-25 of

        c = largest p * sum of |v| >= a

    That counts in columns where the keys of large p have small values, and else is little beside
    the rest: rows of many keys have no large p. Beside bf16 queries prefill over quantised caches
    may round 2**15 times the probabilities to fp16: 2**-40 of c.

    The same float32 arithmetic leaves lse, of magnitude 2**8 at most in the tests, within 1e-3 as
    the contract promises, the fast tanh of the soft cap included.
    """
    rounding = UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF[out_dtype or dtype]
    return Tolerance(
        out_relative=rounding + 2.0**-13,
        out_of_ceiling=2.0**-25 if dtype == "float16" else 2.0**-40 if is_dequantised else 0.0,
        out_absolute=2.0**-25 if (out_dtype or dtype) == "float16" else 2.0**-120,
        lse_absolute=1e-3,
    )


@dataclass(frozen=True)
class Expected:
    """The reference's out and lse, and what scales the tolerance.

    Attributes:
        magnitude: sum of p * |v| over the keys.
        ceiling: the same if all p were the largest, or more; may be None beside bfloat16 caches.
    """

    out: Tensor
    lse: Tensor
    magnitude: Tensor
    ceiling: Tensor | None


def expected(inputs: Inputs) -> Expected:
    """The float64 reference on the dense tokens; no table, no stride, no poison involved."""
    case = inputs.case
    # V and |V| side by side: one pass gives the result and its magnitude.
    both = torch.cat((inputs.v, inputs.v.abs()), dim=-1)
    out, lse = _reference(inputs, both, inputs.sinks)
    ceiling = None
    if case.dtype == "float16":
        ceiling = _ceiling(inputs, lse)
    elif (
        case.is_dequantised
    ):  # so little is asked of it that 1 will do for p, and every token counts
        ceiling = inputs.v.abs().nan_to_num(0.0, posinf=0.0).double().sum(0)
        ceiling = ceiling.repeat_interleave(case.group_size, 0)[:, : case.value_dim]
    return Expected(out[..., : case.value_dim], lse, out[..., case.value_dim :], ceiling)


def _reference(
    inputs: Inputs, v: Tensor, sinks: Tensor | None, sharpness: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Out and lse of other values, and of scores that are multiplied."""
    case = inputs.case
    change = inputs.change
    return reference.attention(
        inputs.q,
        inputs.k,
        v,
        row_starts(case),
        inputs.kv_indptr,
        causal=case.causal,
        window_left=case.window_left,
        logits_soft_cap=sharpness * case.logits_soft_cap,
        sm_scale=sharpness * case.scale,
        sinks=sinks,
        masks=None if inputs.mask is None else inputs.mask.seen,
        transform=None if change is None else sharpened(change, sharpness),
    )


def _ceiling(inputs: Inputs, lse: Tensor) -> Tensor:
    """The sum of |v| times the largest p of a row, which n keys make n**(1/16) too large at most.

    Scores of 0 give the mean of |v| and the logarithm of n. The logarithm of the sum of 16th powers
    of exp(score) is 16 times the largest score, and ln(n) more at most.
    """
    mean, log_count = _reference(inputs, inputs.v.abs(), None, sharpness=0.0)
    _, log_powers = _reference(inputs, inputs.v[..., :1], None, sharpness=16.0)
    largest = log_powers / 16 - lse
    factor = torch.exp(log_count + largest).nan_to_num(nan=0.0)  # -inf - -inf without keys
    return factor.unsqueeze(-1) * mean


def planner_for(
    case: Case, device: torch.device | str, **changes: object
) -> jitattn.AttentionPlanner:
    """A planner of the case; equal arguments share one."""
    arguments = case.planner_arguments() | changes
    return _planner(tuple(sorted(arguments.items())), str(device))


@functools.cache
def _planner(arguments: tuple[tuple[str, object], ...], device: str) -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(**dict(arguments), device=device)


def plan_of(
    inputs: Inputs,
    planner: jitattn.AttentionPlanner,
    pages: PageTable | None = None,
    *,
    max_q_len: int | None = None,
) -> jitattn.types.Plan:
    """A plan of the inputs; ``pages`` replaces the case's, ``max_q_len`` the longest request."""
    if inputs.qo_indptr is not None and max_q_len is None:
        max_q_len = max(inputs.case.queries)
    return planner.plan(
        pages or inputs.pages(), inputs.seq_lens, inputs.qo_indptr, max_q_len=max_q_len
    )


def extras(inputs: Inputs) -> dict[str, object]:
    """The arguments of run that a configuration asks for."""
    mask = None if inputs.mask is None else inputs.mask.given
    return {
        "sinks": inputs.sinks,
        "custom_mask": mask,
        "variant_params": inputs.variant_params,
    }


def uniform(case: Case, device: torch.device | str) -> tuple[Inputs, Tensor, Tensor]:
    """Inputs, out and lse of a uniform probe."""
    inputs = make_inputs(case, device, uniform_probe(case, device))
    return inputs, *attend(inputs)


def attend(
    inputs: Inputs, planner: jitattn.AttentionPlanner | None = None, **changes: object
) -> tuple[Tensor, Tensor]:
    """Out and lse of the public API; ``changes`` replace arguments of run."""
    case = inputs.case
    planner = planner or planner_for(case, inputs.device)
    plan = plan_of(inputs, planner)
    kv = inputs.bind(planner)
    if case.call == "returned":
        arguments = {"return_lse": True} | extras(inputs) | changes
        out, lse = plan.run(inputs.q, kv, **arguments)
        return out, lse
    arguments = {"out": inputs.new_out(), "lse": inputs.new_lse()} | extras(inputs) | changes
    out = plan.run(inputs.q, kv, **arguments)
    assert out is arguments["out"]
    check_surroundings(out)
    return out, arguments["lse"]


def replayed(inputs: Inputs, planner: jitattn.AttentionPlanner) -> Result:
    """Out and lse of a captured refresh and run, on the current device."""
    plan, kv = planner.plan(inputs.pages(), inputs.seq_lens), planner.bind(inputs.given)
    out, lse = inputs.new_out(), inputs.new_lse()
    plan.run(inputs.q, kv, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh()
        plan.run(inputs.q, kv, out=out, lse=lse)
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    return out, lse


def check_surroundings(out: Tensor) -> None:
    """Assert that nothing was written between the rows of a strided out."""
    around = surroundings(out).clone()
    torch.as_strided(around, out.shape, out.stride(), out.storage_offset()).fill_(CANARY)
    assert bool((around == CANARY).all()), "wrote outside out"


def check(case: Case, out: Tensor, lse: Tensor, want: Expected) -> None:
    """Assert that out and lse are within `tolerance`, naming the worst place if not."""
    check_rounded(case.dtype, case.out_dtype, out, lse, want, is_dequantised=case.is_dequantised)


def check_rounded(
    dtype: str,
    out_dtype: str | None,
    out: Tensor,
    lse: Tensor,
    want: Expected,
    *,
    is_quantised: bool = False,
    is_dequantised: bool = False,
) -> None:
    """The same of probabilities of ``dtype``; those of quantised caches may be of float16.

    Where ``is_dequantised``, they are so by the exponents that `tolerance` says.
    """
    limits = tolerance(dtype, out_dtype, is_dequantised=is_dequantised)
    if is_quantised:
        limits = replace(limits, out_of_ceiling=tolerance("float16").out_of_ceiling)
    assert out.dtype == getattr(torch, out_dtype or dtype)
    assert lse.dtype == torch.float32
    assert out.shape == want.out.shape
    assert lse.shape == want.lse.shape
    empty = want.lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "lse is not -inf exactly where it should be"
    error = (lse.double() - want.lse).abs().masked_fill(empty, 0.0)
    _check_within(error, torch.full_like(error, limits.lse_absolute), lse, want.lse, "lse")
    error = (out.double() - want.out).abs()
    limit = limits.out_relative * want.magnitude + limits.out_absolute
    if limits.out_of_ceiling:
        assert want.ceiling is not None
        limit += limits.out_of_ceiling * want.ceiling
    _check_within(error, limit, out, want.out, "out")


def _check_within(error: Tensor, limit: Tensor, got: Tensor, want: Tensor, name: str) -> None:
    if bool((error <= limit).all()):
        return
    # NaN compares as false, and must not hide behind argmax.
    excess = (error / limit.clamp(min=1e-30)).nan_to_num(nan=torch.inf).masked_fill(error == 0, 0)
    where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    bad = int((excess > 1).sum())
    raise AssertionError(
        f"{name}{list(where)} is {float(got[where]):.6g}, want {float(want[where]):.6g}: "
        f"{float(excess[where]):.3g} x the tolerance; {bad} of {error.numel()} elements are off"
    )


def check_case(case: Case, device: torch.device | str, tokens: Tokens | None = None) -> Inputs:
    """Make inputs, run and compare."""
    inputs = make_inputs(case, device, tokens)
    out, lse = attend(inputs)
    check(case, out, lse, expected(inputs))
    return inputs


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality of shape, dtype and value; NaNs of equal bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def assert_same(got: Result, want: Result) -> None:
    """Bitwise equality of out and lse, on whatever devices they are."""
    assert same_bits(got[0].to(want[0].device), want[0]), "out differs"
    assert same_bits(got[1].to(want[1].device), want[1]), "lse differs"


def target_rows(inputs: Inputs, targets: Sequence[int]) -> Tensor:
    """What an address probe must return: V of each request's target, for every query head."""
    starts = inputs.kv_indptr[:-1]
    index = [start + target for start, target in zip(starts, targets, strict=True)]
    rows = inputs.v[index].repeat_interleave(inputs.case.group_size, dim=1)
    return rows.to(getattr(torch, inputs.case.out_dtype or inputs.case.dtype))


def check_addresses(inputs: Inputs, out: Tensor, targets: Sequence[int]) -> int:
    """Rows that see their request's target return its V row, bit for bit; how many they are.

    In float32 up to 1e-4: a score of 2**8 has steps of 2**-16, so the target's weight is 1 to 2e-5.
    """
    rows = Rows.of(inputs.case, inputs.device)
    target = torch.tensor(targets, device=inputs.device)[rows.request]
    sees = (target >= rows.first) & (target < rows.last)
    want = target_rows(inputs, targets)[rows.request]
    found, want = out[: len(want)][sees], want[sees]
    if out.dtype == torch.float32:
        assert torch.allclose(found, want, rtol=1e-4, atol=1e-4), "a target's address is wrong"
        found = found.round()
    assert torch.equal(found, want), "a target's address is wrong"
    return int(sees.sum())


def fill_dead_slots(inputs: Inputs, value: float) -> None:
    """Fill what is poison in a pair of caches, or in the scales of blocks, with a value."""
    inputs.poisoned = tuple(
        torch.where(is_poison(cache), value, cache.float()).to(cache.dtype)
        for cache in inputs.poisoned
    )


def assert_dead_slots_do_not_count(inputs: Inputs, *poisons: float) -> Result:
    """Whatever fills the slots that no request owns: the bits with zeros there, which it returns.

    They hold poison when this begins.
    """
    poisoned = inputs.poisoned
    assert any(bool(is_poison(cache).any()) for cache in poisoned)
    fill_dead_slots(inputs, 0.0)
    want = attend(inputs)
    assert bool(torch.isfinite(want[0]).all())
    for poison in poisons:
        inputs.poisoned = poisoned
        fill_dead_slots(inputs, poison)
        assert_same(attend(inputs), want)
    return want


def assert_dead_tokens_do_not_count(inputs: Inputs, dead: range, poison: float) -> None:
    """Tokens ``dead`` of the only request have left its window: what they hold changes no bit."""
    size = inputs.case.page_size
    positions = torch.arange(dead.start, dead.stop, device=inputs.device)
    pages = inputs.table[0].long()[positions // size]
    results = []
    for value in (0.0, poison):
        for cache in inputs.cache:
            cache[pages, positions % size] = value
        results.append(attend(inputs))
    assert_same(results[1], results[0])
    check(inputs.case, *results[1], expected(inputs))


HIGH_PAGES = (0, 1, 65535, 65536, 65537, 131071, 131072, 131073)
"""65,536 pages of the large pool are 2**31 elements in 16 bits, and 2**32 bytes."""


def move_to_high_pages(inputs: Inputs, pool: Tensor, k: Tensor, v: Tensor) -> None:
    """Put requests of two pages into ``pool``: request b has page HIGH_PAGES[b], then 2 + b.

    Args:
        inputs: one request of 32 tokens for each of HIGH_PAGES.
        pool: [131_074, 2, 16, num_kv_heads, head_dim], K and V interleaved.
        k: the stored tokens of all requests, in bytes of the pool's dtype.
        v: likewise.
    """
    count = len(HIGH_PAGES)
    second = range(2, 2 + count)
    for i, dense in enumerate((k, v)):
        pages = dense.view(pool.dtype).view(count, 2, *pool.shape[2:])
        pool[list(HIGH_PAGES), i] = pages[:, 0]
        pool[list(second), i] = pages[:, 1]
    ids = torch.tensor([HIGH_PAGES, second], dtype=torch.int32, device=inputs.device)
    inputs.table = ids.T.contiguous()
    inputs.garbage = torch.zeros_like(inputs.table, dtype=torch.bool)
    inputs.cache = pool


def check_high_pages(
    case: Case, target: int, q_len: int | None, pool: Tensor, *, as_pair: bool = False
) -> int:
    """C07: requests of 32 keys in page ids whose offsets are beyond 32 bits, or just after them.

    ``pool`` is that of the fixture ``large_pool``; without ``q_len`` there are no offsets of
    queries. Returns the rows of out that were compared.
    """
    targets = [target] * len(HIGH_PAGES)
    q_lens = None if q_len is None else (q_len,) * len(targets)
    case = replace(case, num_kv_heads=8, lengths=(32,) * len(targets), q_lens=q_lens)
    q, k, v = address_probe(case, pool.device, targets)
    inputs = make_inputs(case, pool.device, (q, k, v))
    move_to_high_pages(inputs, pool, k, v)
    if as_pair:
        inputs.cache = pool.unbind(1)
    return check_addresses(inputs, attend(inputs)[0], targets)


def check_left_tokens(case: Case, dead: range, poison: float, device: torch.device | str) -> None:
    """C13: tokens that have left the window of 4095 keys may hold anything."""
    inputs = make_inputs(case, device)  # without a window, so that every token is in the cache
    inputs.case = replace(case, window_left=4094)
    assert_dead_tokens_do_not_count(inputs, dead, poison)


def check_placement(case: Case, device: torch.device | str) -> None:
    """Seeds place pages, tokens, strides of indptr, and room between requests: no bit changes."""
    tokens = random_tokens(case, device)
    want = attend(make_inputs(case, device, tokens))
    for seed in (1, 2, 3):
        assert_same(attend(make_inputs(replace(case, seed=seed), device, tokens)), want)


def check_variation(case: Case, device: torch.device | str, **changes: object) -> None:
    """The same tokens in another form, such as other strides, give the same bits."""
    tokens = random_tokens(case, device)
    want = attend(make_inputs(case, device, tokens))
    assert_same(attend(make_inputs(replace(case, **changes), device, tokens)), want)


def check_cache_strides(case: Case, device: torch.device, cache: str, kv_layout: str) -> None:
    """Whatever the memory order and its alignment: the loaders differ, the sums don't."""
    if cache == "twice" and case.page_table == "shared":
        pytest.skip("one tensor passed twice needs two rows of ids")
    case = replace(case, num_kv_heads=1 if cache == "size_1" else 2)
    check_variation(case, device, cache=cache, kv_layout=kv_layout)


def check_head_stride(inputs: Inputs, head_stride: int) -> None:
    """C04: the stride of the only KV head means nothing."""
    want = attend(inputs)
    head = 1 if inputs.case.kv_layout == "HND" else 2
    strange = []
    for cache in inputs.cache:
        strides = list(cache.stride())
        strides[head] = head_stride
        strange.append(cache.as_strided(cache.shape, strides))
    inputs.cache = tuple(strange)
    assert_same(attend(inputs), want)


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Make torch raise when something copies to the host or waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def check_scores_of_minus_200(case: Case, device: str, num_sms: int | None) -> Tensor:
    """Check a case of 8 heads that makes every score -200, under sinks far from it; return lse."""
    q, k, v = random_tokens(case, device)
    inputs = make_inputs(case, device, (torch.full_like(q, 5), torch.full_like(k, -5), v))
    inputs.sinks = torch.tensor([-100, -5, 0, 5, 50, 80, -torch.inf, 5], device=device)
    out, lse = attend(inputs, planner_for(case, device, num_sms=num_sms))
    check(case, out, lse, expected(inputs))
    assert bool(torch.isfinite(out).all())
    assert float(out[:, 3].abs().max()) < 1e-30
    torch.testing.assert_close(lse[:, 3], torch.full_like(lse[:, 3], 5.0), rtol=0, atol=1e-5)
    return lse


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call; warmed up once, so that nothing is left to load."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
