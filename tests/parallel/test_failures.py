"""Ranks that don't agree, refuse, leave or are late: every rank has an error, and none hangs."""

from __future__ import annotations

import pytest

import jitattn
from jitattn.parallel import ContextParallel
from tests.support.rank_jobs import (
    constructed,
    plan_where_one_refuses,
    plan_with,
    run_other_rows,
    run_then,
)
from tests.support.ranks import GONE, run_ranks, values

ODD: dict[str, dict[str, object]] = {
    "interleave is 1 on rank 0 and 2 on rank 1": {"interleave": 2},
    "page_size is 4 on rank 0 and 3 on rank 1": {"page_size": 3},
    "num_qo_heads is 6 on rank 0 and 12 on rank 1": {"num_qo_heads": 12},
    "num_kv_heads is 2 on rank 0 and 1 on rank 1": {"num_kv_heads": 1},
    "head_dim is 32 on rank 0 and 64 on rank 1": {"head_dim": 64},
    "q_dtype is bfloat16 on rank 0 and float16 on rank 1": {
        "q_dtype": "float16",
        "kv_dtype": "float16",
    },
    "kv_dtype is bfloat16 on rank 0 and float8_e4m3fn on rank 1": {"kv_dtype": "float8_e4m3fn"},
    "batch_invariant is False on rank 0 and True on rank 1": {"batch_invariant": True},
    "batch_size is 2 on rank 0 and 1 on rank 1": {"seq_lens": (30,)},
    "no error": {"kv_layout": "HND", "num_sms": 9},
}


def test_what_differs_is_named_on_every_rank() -> None:
    told = values(run_ranks(3, plan_with, ODD))
    for each in told:
        for message, found in zip(ODD, each, strict=True):
            assert message in found
            assert found.startswith("ConfigError") or message == "no error"


def test_a_refusal_is_every_ranks() -> None:
    *others, refusing = values(run_ranks(3, plan_where_one_refuses))
    assert "TypeError: local_pages is a NoneType" in refusing[0]
    assert "ConfigError: window_left=4 is refused" in refusing[1]
    for told in others:
        assert told[0].startswith("ParallelError: rank 2 refused its plan: TypeError: local_pages")
        assert "rank 2 refused its plan: ConfigError: window_left=4" in told[1]
    assert {told[2] for told in (*others, refusing)} == {"no error"}


def test_rows_of_queries_differ() -> None:
    for told in values(run_ranks(3, run_other_rows)):
        message = "the number of rows of q is 4 on rank 0 and 5 on rank 1"
        assert told == [message, "no error"] * 2


@pytest.mark.parametrize("what", ["leaves", "is late", "has another q"])
def test_nothing_hangs(what: str) -> None:
    timeout_s = 1
    results = run_ranks(3, run_then, what, timeout_s=timeout_s, limit_s=60)
    odd = results.pop(1)
    for first, seconds, second, later in values(results):
        assert first.startswith("ParallelError: gathering queries over 3 ranks failed on rank")
        assert float(seconds) < timeout_s + 2
        # What follows a failure doesn't wait again.
        assert "make another group" in second
        assert float(later) < 1
    if what == "leaves":
        assert odd == GONE
    elif what == "is late":
        assert odd[0].startswith("ParallelError")
    else:
        assert "ValueError: q has shape [2, 1, 32]: expected [2, 2, 32]" in odd[0]


REFUSED = (
    "ValueError: interleave is 0",
    "TypeError: page_size is a str",
    "ConfigError: timeout is given, but group has one of its own for the CPU",
    "TypeError: timeout is a int: expected a datetime.timedelta",
    "TypeError: planner is a str: expected an AttentionPlanner or an MLAPlanner",
    "ConfigError: window_left=3 is refused",
    "ConfigError: use_sinks=True is refused",
    "ConfigError: use_custom_mask=True is refused",
    "ConfigError: variant is refused",
    "ConfigError: planner has page_size=16: ContextParallel has page_size=4",
    "ConfigError: planner has 4 query heads: 3 ranks can't have equally many",
    "ValueError: max_q_len is 17: at most 16 causal query tokens",
    "ValueError: request 0 has 17 query tokens: max_q_len is 9",
    "ValueError: max_q_len is None",
    "ValueError: pages is CsrPages(",
    "ValueError: max_kv_len is -1",
    "ValueError: seq_lens[0] is",
    "no error",
)


def test_what_is_refused_and_why() -> None:
    for told in values(run_ranks(3, constructed)):
        assert len(told) == len(REFUSED)
        for message, found in zip(REFUSED, told, strict=True):
            assert found.startswith(message)


def test_without_a_group() -> None:
    with pytest.raises(jitattn.ConfigError, match="call init_process_group"):
        ContextParallel()
