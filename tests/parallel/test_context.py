"""ContextParallel on ranks that are processes: their outputs are one rank's merge in order.

``CONTEXT_BATCHES=500 CONTEXT_SEED=0 pytest tests/parallel -k random`` tries so many batches over 2,
3, 4 and 8 ranks; by default a few over 2 and 3.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.contexts import (
    ContextCase,
    ContextInputs,
    merged_in_order,
    random_case,
    run_cases,
    shard_state,
    states_of,
    whole,
)
from tests.support.harness import same_bits
from tests.support.rank_jobs import (
    CASE,
    attend_chunk,
    keep_bits,
    local_parts,
    plan_nothing,
    refresh_and_replace,
    write_outputs,
)
from tests.support.ranks import run_ranks, values

NUM_BATCHES = int(os.environ.get("CONTEXT_BATCHES", "0"))
SEED = int(os.environ.get("CONTEXT_SEED", "0"))
RANKS = (2, 3, 4, 8) if NUM_BATCHES else (2, 3)
NUM_DEFAULT = 8

NAMED = {
    "one token": ContextCase(num_ranks=3, seq_lens=(1,), heads=6),
    "no token at all": ContextCase(num_ranks=3, seq_lens=(0, 0), heads=6, has_sinks=True),
    "ranks without tokens": ContextCase(num_ranks=3, seq_lens=(4, 3, 0, 25), heads=6),
    "a token past a round": ContextCase(num_ranks=3, seq_lens=(13, 12, 1), heads=6, interleave=1),
    "draft tokens over a border": ContextCase(
        num_ranks=3, seq_lens=(14, 5, 26), q_lens=(6, 5, 3), heads=6, page_size=3
    ),
    "more queries than keys": ContextCase(num_ranks=3, seq_lens=(2,), q_lens=(4,), heads=6),
    "a chunk without causality": ContextCase(
        num_ranks=3, seq_lens=(40, 7), q_lens=(21, 2), heads=6, causal=False
    ),
    "FP8 with sinks": ContextCase(
        num_ranks=3, seq_lens=(30, 1), heads=6, kv_dtype="float8_e4m3fn", has_sinks=True
    ),
    "latent attention": ContextCase(num_ranks=3, seq_lens=(30, 1, 0), heads=6, is_mla=True),
    "latent attention of FP8": ContextCase(
        num_ranks=3, seq_lens=(30, 9), q_lens=(3, 1), heads=6, is_mla=True, kv_dtype="float8_e4m3fn"
    ),
    "pages one after the other": ContextCase(
        num_ranks=3, seq_lens=(30, 0, 9), heads=6, page_table="csr", interleave=2
    ),
    "token tables in a pool of rows": ContextCase(
        num_ranks=3, seq_lens=(30, 9), q_lens=(2, 2), heads=6, page_table="token", has_rows=True
    ),
}


def check_case(case: ContextCase, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Compare what ranks returned with their merge in order, and with float64 over the whole."""
    inputs = ContextInputs(case)
    out, lse = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    want, want_lse = merged_in_order(inputs)
    assert same_bits(out, want), case
    assert same_bits(lse, want_lse), case
    check_whole(case, inputs, out, lse)
    rows = sum(inputs.q_lens)
    assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))
    assert bool((lse[rows:] == -math.inf).all())


def check_whole(case: ContextCase, inputs: ContextInputs, out: Tensor, lse: Tensor) -> None:
    """Compare rows with float64 over all tokens: each state's out is rounded, then their sum."""
    exact, exact_lse = whole(inputs)
    largest = max(
        (float(tokens[1 - case.is_mla].float().abs().max()) for tokens in inputs.tokens
         if tokens[0].numel()), default=0.0,
    )  # fmt: skip
    rows = exact.shape[0]
    error = (out[:rows].double() - exact).abs()
    assert float(error.max() if rows else 0) <= 3 * 2**-9 * largest + 1e-6, case
    torch.testing.assert_close(lse[:rows].double(), exact_lse, rtol=1e-6, atol=1e-5)


def check_cases(num_ranks: int, cases: list[ContextCase]) -> None:
    results = values(run_ranks(num_ranks, run_cases, cases))
    for i, case in enumerate(cases):
        check_case(case, [result[i] for result in results])


def test_named_batches() -> None:
    check_cases(3, list(NAMED.values()))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_random_batches(num_ranks: int) -> None:
    count = NUM_BATCHES or NUM_DEFAULT
    seeds = range(SEED + RANKS.index(num_ranks), SEED + count, len(RANKS))
    cases = [random_case(num_ranks, seed) for seed in seeds]
    check_cases(num_ranks, cases)


@pytest.mark.parametrize("is_mla", [False, True])
def test_states_come_in_the_order_of_ranks(is_mla: bool) -> None:
    """The reference's merge is too exact for its order to show in bits."""
    case = replace(CASE, is_mla=is_mla)
    inputs = ContextInputs(case)
    want = [shard_state(inputs, rank) for rank in range(3)]
    for rank, (outs, lses) in enumerate(values(run_ranks(3, states_of, case))):
        assert outs.shape[0] == 3
        for i, (out, lse) in enumerate(want):
            assert same_bits(outs[i], inputs.heads_of(out, rank))
            assert same_bits(lses[i], inputs.heads_of(lse, rank))


def test_a_chunk_of_a_prompt() -> None:
    case = ContextCase(num_ranks=2, seq_lens=(70, 33), q_lens=(31, 20))
    results = values(run_ranks(2, attend_chunk, case))
    out, lse = (torch.cat(each, dim=1) for each in zip(*results, strict=True))
    check_whole(case, ContextInputs(case), out, lse)


def test_bits_do_not_depend_on_who_waits() -> None:
    repeats = 6
    results = values(run_ranks(3, keep_bits, repeats))
    for i in range(repeats):
        check_case(CASE, [result[i] for result in results])


def test_a_plan_reads_lengths_anew_and_takes_another_table() -> None:
    results = values(run_ranks(3, refresh_and_replace))
    case = replace(CASE, seq_lens=(30, 17), q_lens=(3, 2))
    before, *others = zip(*results, strict=True)
    for parts in others:
        check_case(case, list(parts))
    assert not same_bits(before[0][0], others[0][0][0])


def test_what_each_rank_keeps() -> None:
    first, second, third = values(run_ranks(3, local_parts))
    assert [each["lens"] for each in (first, second, third)] == [
        [0, 1, 8, 16], [0, 0, 8, 16], [0, 0, 1, 8],
    ]  # fmt: skip
    assert first["slots"] == [-1, 0, -1, -1, 15]
    assert second["slots"] == [-1, -1, 1, -1, -1]
    assert third["slots"] == [-1, -1, -1, 1, -1]
    assert third["rows"] == [[0, 1, 2, 3, -1, -1, -1, -1]]
    assert first["table"] == first["pages"] == [[0, 1, 2, 3]]
    assert third["table"] == [[0, 1, -1, -1]]
    assert first["round"] == 24
    assert first["shown"] == "ContextParallel(rank 0 of 3, interleave=2, page_size=4)"
    told = [value for name, value in first.items() if name.startswith("local_")]
    for message, found in zip(
        (
            "seq_lens has dtype float32",
            "slots has dtype float32",
            "table is RaggedKV",
            "table is a list",
        ),
        told,
        strict=True,
    ):
        assert message in found


def test_given_outputs_are_written_or_refused() -> None:
    for found in values(run_ranks(3, write_outputs)):
        assert found.pop("is the given")
        assert found.pop("is written")
        assert len(found) == 8
        for message, told in found.items():
            assert message in told


def test_a_batch_without_requests() -> None:
    for shapes in values(run_ranks(3, plan_nothing)):
        assert shapes == [[0, 2, 32], [0, 2]] * 2


def test_a_group_of_one_is_the_planner() -> None:
    cases = [random_case(1, seed) for seed in range(3)]
    check_cases(1, cases)
