"""Batches of any query length on the CPU, against a formula written down a second time.

`by_definition` walks rows, heads and keys one by one in Python floats; it shares nothing with
jitattn/kernels/attention/reference.py. Masks are read back from the tensors that ``run`` gets.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from tests.support import harness
from tests.support.cases import LAYOUTS, TABLES, Case, mixed_cases
from tests.support.inputs import Inputs, make_inputs, uniform_probe
from tests.support.layouts import attend_through, same_pages
from tests.support.queries import Rows, row_starts

SMALL = Case(head_dim=16, page_size=4, num_kv_heads=1, group_size=2)
Q_LENS = (1, 3, 2, 5, 0, 4, 1, 9)
LENGTHS = (1, 9, 2, 3, 7, 0, -1, 9)
MIX = replace(SMALL, lengths=LENGTHS, q_lens=Q_LENS)
MASKS = ("bool", "packed", "ragged")


def is_visible(case: Case, position: int, key: int) -> bool:
    if case.causal and key > position:
        return False
    return case.window_left < 0 or key >= position - case.window_left


def bit(packed: Tensor, index: int) -> bool:
    return bool(int(packed[index // 8]) >> index % 8 & 1)


def passes_mask(inputs: Inputs, request: int, row: int, place: int, key: int) -> bool:
    """Whether the mask that ``run`` is given lets row ``row`` of q see a key."""
    if inputs.mask is None:
        return True
    kv_len, given = inputs.case.lengths[request], inputs.mask.given
    if isinstance(given, tuple):
        width = -(-kv_len // 8)
        begin = int(given[1][request]) + place * width
        return bit(given[0][begin : begin + width], key)
    is_packed = given.dtype == torch.uint8
    width = given.shape[1] * (8 if is_packed else 1)
    column = key - (kv_len - width)
    if column < 0:
        return True
    return bit(given[row], column) if is_packed else bool(given[row, column])


def by_definition(inputs: Inputs) -> harness.Expected:
    case = inputs.case
    shape = case.num_tokens, case.num_qo_heads
    out = torch.zeros((*shape, case.value_dim), dtype=torch.float64)
    magnitude, ceiling = torch.zeros_like(out), torch.zeros_like(out)
    lse = torch.full(shape, -math.inf, dtype=torch.float64)
    for request, kv_len in enumerate(case.lengths):
        start, stop = row_starts(case)[request : request + 2]
        base = inputs.kv_indptr[request]
        for row in range(start, stop):
            place = row - start
            position = max(kv_len, 0) - (stop - start) + place
            keys = [
                key
                for key in range(kv_len)
                if is_visible(case, position, key) and passes_mask(inputs, request, row, place, key)
            ]
            for head in range(case.num_qo_heads):
                terms = []
                for key in keys:
                    k = inputs.k[base + key, head // case.group_size]
                    score = case.scale * float(inputs.q[row, head].double() @ k.double())
                    if case.logits_soft_cap > 0:
                        cap = case.logits_soft_cap
                        score = cap * math.tanh(score / cap)
                    terms.append(score)
                logits = [*terms, *sink_of(inputs, head)]
                if not logits:
                    continue
                top = max(logits)
                total = sum(math.exp(logit - top) for logit in logits)
                lse[row, head] = top + math.log(total)
                for key, score in zip(keys, terms, strict=True):
                    weight = math.exp(score - top) / total
                    v = inputs.v[base + key, head // case.group_size].double()
                    out[row, head] += weight * v
                    magnitude[row, head] += weight * v.abs()
                    ceiling[row, head] += math.exp(max(terms) - lse[row, head]) * v.abs()
    return harness.Expected(out, lse, magnitude, ceiling)


def sink_of(inputs: Inputs, head: int) -> list[float]:
    return [] if inputs.sinks is None else [float(inputs.sinks[head])]


def assert_by_definition(case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    want = by_definition(inputs)
    harness.check(case, *harness.attend(inputs), want)
    # The oracle of the GPU tests agrees as well, to rounding of float64.
    oracle = harness.expected(inputs)
    torch.testing.assert_close(oracle.out, want.out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(oracle.lse, want.lse, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(oracle.magnitude, want.magnitude, rtol=1e-10, atol=1e-12)
    if oracle.ceiling is not None:
        assert want.ceiling is not None
        assert bool((oracle.ceiling >= want.ceiling * (1 - 1e-10)).all())
        assert bool((oracle.ceiling <= want.ceiling * 2).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 3, 100])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_masks_windows_and_causality(mask: str | None, window_left: int, causal: bool) -> None:
    case = replace(MIX, window_left=window_left, causal=causal, mask=mask, mask_width=8)
    assert_by_definition(case)


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("page_table", LAYOUTS)
def test_every_layout(page_table: str, mask: str | None) -> None:
    page_size = 1 if page_table == "ragged" else 4
    case = replace(MIX, page_table=page_table, page_size=page_size, mask=mask, window_left=4)
    assert_by_definition(replace(case, sinks="float32", spare_rows=3, seed=1))


@pytest.mark.parametrize("mask_width", [8, 16, 64])
@pytest.mark.parametrize("mask", ["bool", "packed"])
def test_mask_widths(mask: str, mask_width: int) -> None:
    """Narrower and wider than the requests: the last column is the last key."""
    case = replace(MIX, lengths=(20, 3, 17, 9, 1, 0, 30, 11), mask=mask, mask_width=mask_width)
    assert_by_definition(replace(case, sinks="bfloat16", seed=mask_width % 3))


@pytest.mark.parametrize("spare_rows", [0, 1, 6])
@pytest.mark.parametrize("sinks", [None, "float32"])
def test_rows_past_the_last_request(sinks: str | None, spare_rows: int) -> None:
    case = replace(MIX, spare_rows=spare_rows, sinks=sinks)
    inputs = make_inputs(case, "cpu")
    out, lse = harness.attend(inputs)
    end = sum(Q_LENS)
    assert out.shape[0] == end + spare_rows
    assert bool((out[end:] == 0).all())
    assert bool((lse[end:] == -torch.inf).all())
    assert_by_definition(case)


@pytest.mark.parametrize("sinks", [None, "float32"])
def test_rows_that_see_nothing(sinks: str | None) -> None:
    """Before the first key, of an empty request, or behind a mask of zeros."""
    case = replace(SMALL, lengths=(2, 0, 5), q_lens=(5, 3, 2), sinks=sinks, mask="bool")
    inputs = make_inputs(case, "cpu")
    assert isinstance(inputs.mask.given, Tensor)
    inputs.mask.given[8:] = False
    inputs.mask.given[:8] = True
    out, lse = harness.attend(inputs)
    empty = [0, 1, 2, 5, 6, 7, 8, 9]
    assert bool((out[empty] == 0).all())
    want = torch.full((2,), -math.inf) if sinks is None else inputs.sinks.float()
    assert torch.equal(lse[empty], want.expand(len(empty), 2))
    harness.check(case, out, lse, by_definition(inputs))


@pytest.mark.parametrize(
    "change",
    [
        {"logits_soft_cap": 5.0, "mask": "ragged"},
        {"head_dim": 32, "head_dim_vo": 16},
        {"head_dim": 16, "head_dim_vo": 48, "out_dtype": "float32", "mask": "packed"},
        {"dtype": "float16", "group_size": 5, "cache": "odd_strides", "q_view": "qkv"},
        {"num_kv_heads": 3, "kv_layout": "HND", "cache": "packed", "rows": "int64"},
        {"sm_scale": 1.5, "lengths_dtype": "int64", "out_view": "heads_outside", "seed": 3},
    ],
    ids=repr,
)
def test_other_features(change: dict[str, object]) -> None:
    assert_by_definition(replace(MIX, **change))


def test_offsets_of_one_each_are_no_offsets() -> None:
    case = replace(SMALL, lengths=(3, 0, 7, 9), sinks="float32")
    want = harness.attend(make_inputs(case, "cpu"))
    got = harness.attend(make_inputs(replace(case, q_lens=(1, 1, 1, 1)), "cpu"))
    assert harness.same_bits(got[0], want[0])
    assert harness.same_bits(got[1], want[1])


@pytest.mark.parametrize("page_table", TABLES)
def test_other_tables_give_the_same_bits(page_table: str) -> None:
    case = replace(MIX, window_left=3, rows="int32", mask="ragged")
    inputs = make_inputs(case, "cpu")
    want = harness.attend(inputs)
    planner = harness.planner_for(replace(case, page_table=page_table), "cpu")
    got = attend_through(inputs, planner, same_pages(inputs, page_table, stretch=2))
    assert harness.same_bits(got[0], want[0])
    assert harness.same_bits(got[1], want[1])


def test_refresh_follows_the_offsets() -> None:
    """Lengths and offsets are snapshot by plan and read again by refresh."""
    case = replace(SMALL, lengths=(9, 8), q_lens=(2, 4), call="returned")
    inputs = make_inputs(case, "cpu")
    planner = harness.planner_for(case, "cpu")
    plan = harness.plan_of(inputs, planner)
    want = harness.attend(inputs)
    other = replace(case, q_lens=(4, 2))
    inputs.qo_indptr.copy_(torch.tensor([0, 4, 6]))
    got = plan.run(inputs.q, inputs.given, return_lse=True, **harness.extras(inputs))
    assert harness.same_bits(got[0], want[0])
    plan.refresh()
    now = replace(inputs, case=other)
    result = plan.run(inputs.q, inputs.given, return_lse=True)
    harness.check(other, *result, by_definition(now))
    inputs.qo_indptr.copy_(torch.tensor([0, 5, 6]))
    with pytest.raises(ValueError, match="max_q_len"):
        plan.refresh()


def test_a_mask_of_ones_is_none() -> None:
    inputs = make_inputs(replace(MIX, window_left=2), "cpu")
    want = harness.attend(inputs)
    case = replace(inputs.case, mask="bool")
    masked = make_inputs(case, "cpu")
    masked.mask.given.fill_(True)
    got = harness.attend(masked)
    assert harness.same_bits(got[0], want[0])
    assert harness.same_bits(got[1], want[1])


def test_one_call_for_notebooks() -> None:
    case = replace(MIX, mask="packed", sinks="float32")
    inputs = make_inputs(case, "cpu")
    got = jitattn.attention(
        inputs.q,
        inputs.cache,
        inputs.pages(),
        inputs.seq_lens,
        inputs.qo_indptr,
        max_q_len=max(Q_LENS),
        sinks=inputs.sinks,
        custom_mask=inputs.mask.given,
        return_lse=True,
    )
    harness.check(case, *got, by_definition(inputs))


# --- the inputs themselves ------------------------------------------------------------------------


def test_ranges_of_visible_keys() -> None:
    """exp(lse) of a uniform probe counts what `Rows` says."""
    for window_left in (-1, 0, 2):
        for causal in (False, True):
            case = replace(MIX, window_left=window_left, causal=causal)
            inputs = make_inputs(case, "cpu", uniform_probe(case, "cpu"))
            _, lse = harness.attend(inputs)
            counted = lse.double().exp()
            want = Rows.of(case, "cpu").num_keys.double()[:, None].expand_as(counted)
            torch.testing.assert_close(counted, want, rtol=1e-5, atol=0)


def test_mixed_cases_use_every_value() -> None:
    cases = mixed_cases()
    assert cases == mixed_cases()
    assert len({str(case) for case in cases}) == len(cases) >= 400
    assert {case.mask for case in cases} == {None, *MASKS}
    assert {case.head_dim for case in cases} >= {16, 128, 256, 512}
    assert {case.spare_rows for case in cases} == {0, 3, 200}
    q_lens = {q for case in cases for q in case.queries}
    assert {0, *range(1, 17)} <= q_lens
    assert max(q_lens) > 2000
    assert {case.page_table for case in cases} == set(LAYOUTS)


CHEAP = [case for case in mixed_cases() if case.num_tokens * max(case.lengths) < 60_000]


@pytest.mark.parametrize("case", CHEAP[::12], ids=str)
def test_mixed_cases(case: Case) -> None:
    """The cases of the GPU, on the reference backend: caches, tables and masks are read right."""
    inputs = make_inputs(case, "cpu")
    harness.check(case, *harness.attend(inputs), harness.expected(inputs))


def test_random_mixed_batches() -> None:
    """A few of the examples of tests/gpu/test_random.py, "mixed", on the reference backend."""
    pytest.importorskip("hypothesis")
    from tests.support.mixed_strategies import VARIANTS, examples
    from tests.support.strategies import NUM_SHARDS, Shards

    assert len(VARIANTS) <= 80
    shards = Shards(examples(), "cpu", num_examples=12 * NUM_SHARDS)
    shards.run(1)
    assert shards.num_run >= 12
