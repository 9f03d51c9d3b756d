"""Attention over lists of tokens and of pages on the reference backend, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import jitattn
from jitattn.base.errors import ConfigError
from jitattn.cascade import CascadePlanner
from tests.support.list_examples import FORMS, ON_HOST, Form, make_example
from tests.support.lists import ListCase, check_lists, extra_inputs, make_inputs

PAGES = ListCase(page_lists=True, page_size=16, num_pages=40, k=4, q_lens=3, counts="head")
CASES = {
    "shared lists": ListCase(outside=(3,)),
    "lists of heads": ListCase(own=True, counts="head", outside=(2,), sinks=True),
    "no counts": ListCase(counts=None, own=True, kv_dtype="float8_e4m3fn", scales=True),
    "soft cap": ListCase(logits_soft_cap=5.0, cache="padded", counts="head"),
    "latent": ListCase(latent=5, k=70, outside=(4,)),
    "latent rows": ListCase(latent=3, k=70, form="rows"),
    "pages": replace(PAGES, outside=(2,), sinks=True),
    "window": replace(PAGES, window_left=20, kv_dtype="float8_e4m3fn"),
    "not causal": replace(PAGES, causal=False),
}


@pytest.mark.parametrize("name", CASES)
def test_definition(name: str) -> None:
    inputs = make_inputs(CASES[name])
    check_lists(inputs, inputs.run(CASES[name].planner("cpu")))


@pytest.mark.parametrize("name", ["lists of heads", "shared lists", "soft cap", "latent"])
def test_extra_lists(name: str) -> None:
    """Another list over another cache is as good as one more part of the first."""
    inputs, other = extra_inputs(CASES[name])
    planner = CASES[name].planner("cpu")
    kv = planner.bind(other.kv, **other.scales)
    check_lists(inputs, inputs.run(planner, extra=(other.lists, kv)), other)


@pytest.mark.parametrize(
    ("extra", "error", "reason"),
    [
        (3, TypeError, "extra is 3"),
        ((None, None), TypeError, r"extra\[0\] is a NoneType"),
        (
            (jitattn.IndexLists(torch.zeros(2, 7, dtype=torch.int32)), None),
            ValueError,
            "num_tokens is 3",
        ),
    ],
)
def test_refused_extra_lists(extra: Any, error: type[Exception], reason: str) -> None:
    q, kv = torch.zeros(3, 4, 128).bfloat16(), torch.zeros(1, 2, 16, 2, 128).bfloat16()
    with pytest.raises(error, match=reason):
        _planner().plan(LISTS, 3).run(q, kv, extra=extra)


def test_extra_lists_of_other_tables() -> None:
    q, kv = torch.zeros(3, 4, 128).bfloat16(), torch.zeros(1, 2, 16, 2, 128).bfloat16()
    table = jitattn.BlockTable(torch.zeros(3, 1, dtype=torch.int32))
    plan = _planner(page_table="shared").plan(table, LENS)
    with pytest.raises(ValueError, match="extra is given"):
        plan.run(q, kv, extra=(LISTS, kv))


def test_compiled_calls() -> None:
    """Lists go through the operator as tables do."""
    case = CASES["shared lists"]
    inputs, planner = make_inputs(case), case.planner("cpu")
    plan, kv, (q,) = inputs.plan(planner), planner.bind(inputs.kv), inputs.queries

    @torch.compile(backend="eager", fullgraph=True)
    def run(q: torch.Tensor) -> torch.Tensor:
        return plan.run(q, kv, pages=inputs.lists)  # type: ignore[no-any-return]

    torch.testing.assert_close(run(q), plan.run(q, kv), rtol=0, atol=0, equal_nan=True)


def test_counts_at_run() -> None:
    """Fewer than planned are honoured; of more, nothing was planned."""
    case = ListCase(num_tokens=3, holes=0.0)
    inputs, planner = make_inputs(case), case.planner("cpu")
    slots = torch.arange(3 * 37, dtype=torch.int32).view(3, 37)
    kv = torch.randn(24, 2, 5, 2, 64).bfloat16()
    plan = planner.plan(jitattn.IndexLists(slots, torch.tensor([4, 4, 4], dtype=torch.int32)), 3)
    q = inputs.queries[0]
    fewer = jitattn.IndexLists(slots, torch.tensor([4, 0, 5], dtype=torch.int32))
    out, lse = plan.run(q, kv, pages=fewer, return_lse=True)
    want = plan.run(q, kv)
    assert torch.equal(out[0], want[0])
    assert bool((lse[1] == -math.inf).all())
    assert bool(out[2].isnan().all())


def _planner(**arguments: Any) -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(
        **{"num_qo_heads": 4, "num_kv_heads": 2, "page_table": "indices"} | arguments, device="cpu"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"window_left": 5}, "window_left=5 does not fit page_table=indices"),
        ({"use_custom_mask": True}, "use_custom_mask=True does not fit"),
        ({"variant": "alibi"}, "does not fit page_table=indices or page_lists"),
        ({"early_kv": True, "page_table": "page_lists"}, "early_kv=True does not fit"),
    ],
)
def test_refused_configurations(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _planner(**arguments)


def test_latent_attention_has_no_lists_of_pages() -> None:
    with pytest.raises(ConfigError, match="page_table=page_lists"):
        jitattn.MLAPlanner(sm_scale=1.0, page_table="page_lists", device="cpu")


LISTS = jitattn.IndexLists(torch.zeros(3, 7, dtype=torch.int32))
LENS = torch.ones(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ((LISTS, LENS), TypeError, "give num_tokens"),
        ((LISTS, 4), ValueError, "num_tokens is 4"),
        ((LISTS, -1), ValueError, "num_tokens"),
        ((LISTS, 3.0), TypeError, "num_tokens"),
        ((jitattn.BlockTable(torch.zeros(3, 7, dtype=torch.int32)), 3), TypeError, "IndexLists"),
        ((None, 3), TypeError, "IndexLists"),
        ((LISTS, 3, torch.arange(4, dtype=torch.int32)), ValueError, "qo_indptr is given"),
    ],
)
def test_refused_batches(given: tuple[Any, ...], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        _planner().plan(*given)


@pytest.mark.parametrize("name", ["max_q_len", "max_kv_len"])
def test_lists_of_tokens_have_no_lengths(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is given"):
        _planner().plan(LISTS, 3, **{name: 1})


def test_lists_for_other_heads() -> None:
    lists = jitattn.IndexLists(torch.zeros(3, 4, 7, dtype=torch.int32))
    with pytest.raises(ValueError, match="lists for 4 KV heads: the planner has 2"):
        _planner().plan(lists, 3)
    counts = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="lists for 4 KV heads: the planner has 2"):
        _planner().plan(jitattn.IndexLists(LISTS.slots, counts), 3)


def test_lists_of_pages_have_few_query_tokens() -> None:
    pages = torch.zeros(1, 2, 3, dtype=torch.int32)
    lists = jitattn.PageLists(pages, torch.arange(3, dtype=torch.int32).expand(1, 2, 3))
    planner = _planner(page_table="page_lists")
    starts = torch.tensor([0, 17], dtype=torch.int32)
    with pytest.raises(ValueError, match="max_q_len is 17"):
        planner.plan(lists, LENS[:1], starts, max_q_len=17)


def test_a_latent_cache_without_pages() -> None:
    planner = jitattn.MLAPlanner(sm_scale=1.0, page_table="indices", device="cpu")
    with pytest.raises(ValueError, match="kv has no pages"):
        planner.bind(torch.zeros(0, 64, 576).bfloat16())


def test_cascades_have_no_lists() -> None:
    with pytest.raises(ConfigError, match="page_table=indices"):
        CascadePlanner(page_table="indices", device="cpu")


def test_tables_are_no_lists() -> None:
    with pytest.raises(TypeError, match="pages is a IndexLists: expected a BlockTable"):
        _planner(page_table="shared").plan(LISTS, LENS)


def test_entries_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_CHECK", "1")
    planner = _planner(head_dim=16)
    slots = torch.tensor([[3, -1], [16, 99]], dtype=torch.int32)
    q, kv = torch.zeros(2, 4, 16).bfloat16(), torch.zeros(1, 2, 16, 2, 16).bfloat16()
    counts = torch.tensor([2, 0], dtype=torch.int32)
    planner.plan(jitattn.IndexLists(slots, counts), 2).run(q, kv)
    with pytest.raises(ValueError, match="list 1 has the entry 16 for K: the cache ends at 16"):
        planner.plan(jitattn.IndexLists(slots), 2).run(q, kv)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_examples_of_a_card(form: Form) -> None:
    """What tests/gpu/test_list_examples.py does, in small."""
    make_example(form, 1, "cpu", ON_HOST).check()
