"""Every layout of page tables: the same tokens give the same result, and misfits are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import ConfigError
from jitattn.tensors.page_table_base import PageTable
from tests.support.cases import (
    D64,
    D128,
    D128_FP16,
    D128_SEPARATE,
    D192X128,
    D256,
    EVERY_LAYOUT,
    TABLES,
    Case,
)
from tests.support.devices import EVERYWHERE
from tests.support.harness import (
    assert_same,
    attend,
    check,
    check_case,
    expected,
    planner_for,
    target_rows,
)
from tests.support.inputs import address_probe, make_inputs, spread, uniform_probe
from tests.support.layouts import attend_through, ragged_inputs, same_pages, wide_table

SMALL = Case(head_dim=32, page_size=4, lengths=(5, 0, 17, 40), num_kv_heads=2, group_size=2)


# --- the same logical tokens ----------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("stretch", [1, 3])
@pytest.mark.parametrize("window_left", [-1, 50])
@pytest.mark.parametrize("rows", [None, "int32", "int64"])
@pytest.mark.parametrize("case", [D128, D128_FP16, D64, D256], ids=str)
def test_every_table_gives_the_bits_of_the_block_table(
    case: Case, rows: str | None, window_left: int, stretch: int, device: str
) -> None:
    lengths = (130, 0, 17, 300) if device == "cpu" else (4097, 0, 17, 300, 12_345, 16)
    case = replace(case, lengths=lengths, rows=rows, window_left=window_left, sinks="float32")
    inputs = make_inputs(case, device)
    want = attend(inputs)
    check(case, *want, expected(inputs))
    for table in TABLES:
        planner = planner_for(replace(case, page_table=table), device)
        assert_same(
            attend_through(inputs, planner, same_pages(inputs, table, stretch=stretch)), want
        )


@EVERYWHERE
@pytest.mark.parametrize("window_left", [-1, 50])
def test_ragged_gives_the_result_of_the_block_table(window_left: int, device: str) -> None:
    case = replace(D128, lengths=(130, 0, 17, 300), window_left=window_left, sinks="bfloat16")
    inputs = make_inputs(case, device)
    want = expected(inputs)
    check(case, *attend(inputs), want)
    check(case, *attend(ragged_inputs(inputs)), want)


@EVERYWHERE
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_address_probe(case: Case, device: str) -> None:
    targets = [0, 15, 16, 36]
    case = replace(case, lengths=(37,) * 4, seed=3)
    inputs = make_inputs(case, device, address_probe(case, device, targets))
    out, _ = attend(inputs)
    assert torch.equal(out, target_rows(inputs, targets))


@EVERYWHERE
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
@pytest.mark.parametrize("window_left", [-1, 0, 15, 16, 298, 299, 10**9])
def test_uniform_probe(case: Case, window_left: int, device: str) -> None:
    case = replace(case, lengths=(300, 1, 17, 0), window_left=window_left, num_kv_heads=1)
    _, lse = attend(make_inputs(case, device, uniform_probe(case, device)))
    for row, length in zip(lse, case.lengths, strict=True):
        count = length if window_left < 0 else min(length, window_left + 1)
        torch.testing.assert_close(row.exp(), torch.full_like(row, count), rtol=1e-5, atol=0)


@EVERYWHERE
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_empty_requests(case: Case, device: str) -> None:
    inputs = check_case(replace(case, lengths=(0, 6, -1, -(2**31))), device)
    assert bool((attend(inputs)[0][[0, 2, 3]] == 0).all())
    check_case(replace(case, lengths=(0, 0)), device)
    check_case(replace(case, lengths=(0, 3), sinks="float32"), device)


@EVERYWHERE
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_a_batch_of_none(case: Case, device: str) -> None:
    planner = planner_for(case, device)
    pages = wide_table(replace(case, lengths=()), 3, device)
    plan = planner.plan(pages, torch.zeros(0, dtype=torch.int32, device=device))
    inputs = make_inputs(case, device)
    out, lse = plan.run(inputs.q[:0], planner.bind(inputs.given), return_lse=True)
    assert out.shape == (0, case.num_qo_heads, case.value_dim)
    assert lse.shape == (0, case.num_qo_heads)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("vo", [16, 48, 64])
@pytest.mark.parametrize("page_table", [*TABLES, "ragged"])
def test_two_head_dims(page_table: str, vo: int, batch_invariant: bool) -> None:
    case = replace(
        SMALL,
        page_table=page_table,
        page_size=1 if page_table == "ragged" else 4,
        head_dim_vo=vo,
        batch_invariant=batch_invariant,
    )
    for cache in ("pair_nhd", "packed", "interleaved", "odd_strides"):
        inputs = make_inputs(replace(case, cache=cache), "cpu")
        out, lse = attend(inputs)
        assert out.shape == (4, 4, vo)
        check(inputs.case, out, lse, expected(inputs))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_one_tensor_holds_one_head_dim(kv_layout: str) -> None:
    planner = planner_for(replace(SMALL, head_dim_vo=16, kv_layout=kv_layout), "cpu")
    with pytest.raises(ValueError, match=r"head_dim_vo=16"):
        planner.bind(torch.zeros(3, 2, 4, 2, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"v_cache.*32.*16"):
        shape = (3, 4, 2, 32) if kv_layout == "NHD" else (3, 2, 4, 32)
        planner.bind((torch.zeros(shape, dtype=torch.bfloat16),) * 2)


def test_ragged_wants_a_pair_of_three_dimensions() -> None:
    planner = planner_for(replace(SMALL, page_table="ragged", page_size=1), "cpu")
    with pytest.raises(ValueError, match="pair"):
        planner.bind(torch.zeros(3, 2, 4, 2, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="num_kv_tokens"):
        planner.bind((torch.zeros(3, 4, 2, 32, dtype=torch.bfloat16),) * 2)
    with pytest.raises(ValueError, match=r"7 tokens.*8"):
        planner.bind(tuple(torch.zeros(n, 2, 32, dtype=torch.bfloat16) for n in (7, 8)))


def test_pages_keep_their_tensors_and_say_what_they_are() -> None:
    starts, ids = torch.tensor([0, 2, 3], dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    rows = torch.tensor([1, 0, 1])
    csr, token, ragged = (
        jitattn.CsrPages(starts, ids),
        jitattn.TokenTable(ids.view(3, 3), rows=rows),
        jitattn.RaggedKV(starts),
    )
    assert csr.kv_indptr is starts
    assert csr.kv_indices is ids
    assert token.rows is rows
    assert ragged.kv_indptr is starts
    assert [pages.batch_size for pages in (csr, token, ragged)] == [2, 3, 2]
    assert [pages.layout.value for pages in (csr, token, ragged)] == ["csr", "token", "ragged"]
    assert all(pages.layout.value.lower() in repr(pages).lower() for pages in (csr, token, ragged))


# --- C02: integers of another type, and strided ones ----------------------------------------------


def vectors(case: Case) -> dict[str, Callable[[Callable[[Tensor], Tensor]], PageTable]]:
    """What each argument's constructor gives when the tensor is changed on the way in."""
    inputs = make_inputs(replace(case, seed=2), "cpu")
    match case.page_table:
        case "csr":
            return {
                "kv_indptr": lambda f: jitattn.CsrPages(f(inputs.indptr), inputs.table),
                "kv_indices": lambda f: jitattn.CsrPages(inputs.indptr, f(inputs.table)),
            }
        case "ragged":
            return {"kv_indptr": lambda f: jitattn.RaggedKV(f(inputs.indptr))}
        case "token":
            return {"slots": lambda f: jitattn.TokenTable(f(inputs.table))}
    return {"table": lambda f: jitattn.BlockTable(f(inputs.table))}


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32, torch.uint8])
def test_c02_tables_are_int32(case: Case, dtype: torch.dtype) -> None:
    name_of = str(dtype).removeprefix("torch.")
    for name, make in vectors(replace(case, lengths=(5, 9))).items():
        with pytest.raises(TypeError, match=rf"{name} .*{name_of}.*int32"):
            make(lambda tensor: tensor.to(dtype))


@EVERYWHERE
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [1, 2, 77])
def test_c02_strided_vectors(case: Case, dtype: torch.dtype, step: int, device: str) -> None:
    case = replace(case, lengths=(5, 9), rows="int32" if case.has_rows else None)
    inputs = make_inputs(case, device)
    want = attend(inputs)
    check(case, *want, expected(inputs))
    inputs.seq_lens = spread(inputs.seq_lens.to(dtype), step)
    if inputs.rows is not None:
        inputs.rows = spread(inputs.rows.to(dtype), step)
    if inputs.indptr is not None:
        inputs.indptr = spread(inputs.indptr.clone(), step)
    if case.page_table == "csr":
        inputs.table = spread(inputs.table.clone(), step)
    assert_same(attend(inputs), want)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.bool])
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c02_lengths_are_int32_or_int64(case: Case, dtype: torch.dtype) -> None:
    name_of = str(dtype).removeprefix("torch.")
    case = replace(case, lengths=(5, 9))
    pages = wide_table(case, 9, "cpu")
    with pytest.raises(TypeError, match=rf"seq_lens .*{name_of}.*int32 or int64"):
        planner_for(case, "cpu").plan(pages, torch.tensor([5, 9]).to(dtype))
    with pytest.raises(TypeError, match=rf"rows .*{name_of}.*int32 or int64"):
        jitattn.TokenTable(torch.zeros(2, 9, dtype=torch.int32), rows=torch.ones(2).to(dtype))


# --- C09: lengths and offsets that don't fit ------------------------------------------------------


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c09_a_b_i_length_beyond_the_table(case: Case) -> None:
    case = replace(case, lengths=(3, 64))
    width = 64 if case.page_table in ("token", "ragged") else 4
    planner, pages = planner_for(case, "cpu"), wide_table(case, width, "cpu")
    for dtype in (torch.int32, torch.int64):
        lengths = torch.tensor([3, 64], dtype=dtype)
        plan = planner.plan(pages, lengths)
        lengths[1] += 1  # a token more than fits
        with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b1\b.*\b65\b.*\b64\b"):
            plan.refresh()
        with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b1\b.*\b65\b.*\b64\b"):
            planner.plan(pages, lengths)
        planner.plan(pages, torch.tensor([-5, -(2**31)], dtype=dtype))  # padding


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c09_length_beyond_max_kv_len(case: Case) -> None:
    case = replace(case, lengths=(33, 3))
    planner, pages = planner_for(case, "cpu"), wide_table(case, 64, "cpu")
    planner.plan(pages, int32(33, 3), max_kv_len=33)
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b0\b.*\b34\b.*\b33\b"):
        planner.plan(pages, int32(34, 3), max_kv_len=33)


@pytest.mark.parametrize("lengths", [(33, 16), (16, 33), (0, 17)])
def test_c09_length_beyond_the_pages_of_a_request(lengths: tuple[int, int]) -> None:
    """CSR: 2 pages and 1 page; the next request's pages are not this one's."""
    planner = planner_for(replace(D128, page_table="csr"), "cpu")
    pages = jitattn.CsrPages(int32(0, 2, 3), int32(*range(40)))
    planner.plan(pages, int32(32, 16))
    row = 0 if lengths[0] > 32 else 1
    with pytest.raises(ValueError, match=rf"(?s)seq_lens.*\b{row}\b.*\b{lengths[row]}\b"):
        planner.plan(pages, int32(*lengths))


def test_c09_length_beyond_the_tokens_of_a_ragged_request() -> None:
    planner = planner_for(EVERY_LAYOUT[-1], "cpu")
    pages = jitattn.RaggedKV(int32(0, 7, 9))
    planner.plan(pages, int32(7, 2))
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b0\b.*\b8\b.*\b7\b"):
        planner.plan(pages, int32(8, 2))


OFFSETS: dict[str, tuple[Callable[[], PageTable], str]] = {
    "c09 e: falling": (lambda: jitattn.CsrPages(int32(0, 3, 2), int32(*range(9))), r"2.*\b3\b"),
    "c09 f: no zero": (lambda: jitattn.CsrPages(int32(1, 3), int32(*range(9))), r"\[0\] is 1"),
    "negative": (lambda: jitattn.CsrPages(int32(-1, 3), int32(*range(9))), r"\[0\] is -1"),
    "c09 g: too many": (lambda: jitattn.CsrPages(int32(0, 4), int32(1, 2, 3)), r"\b4\b.*\b3\b"),
    "no offset": (lambda: jitattn.CsrPages(int32(), int32(1, 2, 3)), r"\[0\]"),
    "offsets of rank 2": (lambda: jitattn.CsrPages(int32(0, 1)[None], int32(1)), r"\[1, 2\]"),
    "a ragged fall": (lambda: jitattn.RaggedKV(int32(0, 3, 2)), r"2.*\b3\b"),
    "a ragged start": (lambda: jitattn.RaggedKV(int32(2, 3)), r"\[0\] is 2"),
    "ragged rank 2": (lambda: jitattn.RaggedKV(int32(0, 3)[None]), r"\[1, 2\]"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_c09_offsets(name: str) -> None:
    make, match = OFFSETS[name]
    with pytest.raises(ValueError, match=rf"(?s)kv_indptr.*{match}"):
        make()


def test_c09_boundary_twins_of_offsets_pass() -> None:
    jitattn.CsrPages(int32(0, 3, 3), int32(1, 2, 3))
    jitattn.CsrPages(int32(0), int32())
    jitattn.RaggedKV(int32(0, 0, 0))


def test_c09_indices_of_rank_2() -> None:
    with pytest.raises(ValueError, match=r"kv_indices.*\[1, 2\]"):
        jitattn.CsrPages(int32(0, 1), int32(1, 2)[None])
    with pytest.raises(ValueError, match="kv_indices is on meta"):
        jitattn.CsrPages(int32(0, 1), int32(1, 2).to("meta"))


@pytest.mark.parametrize("shape", [(4,), (2, 2, 4)])
def test_token_tables_of_another_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(str(list(shape)))):
        jitattn.TokenTable(torch.zeros(shape, dtype=torch.int32))


def test_c09_ragged_beyond_the_tokens_there_are() -> None:
    """The offsets fit each other, but K and V end before the last request does."""
    case = replace(EVERY_LAYOUT[-1], lengths=(7, 9))
    planner = planner_for(case, "cpu")
    plan = planner.plan(jitattn.RaggedKV(int32(0, 7, 16)), int32(7, 9))
    k = torch.zeros(15, 2, 128, dtype=torch.bfloat16)
    q = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    with pytest.raises((ValueError, IndexError)):
        plan.run(q, planner.bind((k, k)))


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c09_h_another_batch(case: Case) -> None:
    case = replace(case, lengths=(1, 1))
    with pytest.raises(ValueError, match=r"(?s)seq_lens.*\b3\b.*\b2\b"):
        planner_for(case, "cpu").plan(wide_table(case, 4, "cpu"), int32(1, 1, 1))


def test_c09_j_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"num_qo_heads=10"):
        jitattn.AttentionPlanner(num_qo_heads=10, num_kv_heads=4, device="cpu")


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_c09_k_more_query_tokens_than_rows(case: Case) -> None:
    """Fewer are padding."""
    case = replace(case, lengths=(1, 2), num_kv_heads=1)
    planner = planner_for(case, "cpu")
    pages = wide_table(case, 4, "cpu")
    plan = planner.plan(pages, int32(1, 2), int32(0, 1, 3), max_q_len=2)
    kv = planner.bind(make_inputs(case, "cpu").cache)
    q = torch.zeros(4, case.num_qo_heads, case.head_dim, dtype=torch.bfloat16)
    for num_tokens in (3, 4):
        assert plan.run(q[:num_tokens], kv).shape[0] == num_tokens
    with pytest.raises(ValueError, match=r"q has 2 rows: qo_indptr\[-1\] is 3"):
        plan.run(q[:2], kv)


@pytest.mark.parametrize("planned", EVERY_LAYOUT, ids=str)
@pytest.mark.parametrize("given", EVERY_LAYOUT, ids=str)
def test_a_planner_takes_its_own_layout_only(planned: Case, given: Case) -> None:
    if planned == given:
        return
    planner = planner_for(planned, "cpu")
    with pytest.raises(ValueError, match=rf"{given.page_table}.*page_table='{planned.page_table}'"):
        planner.plan(wide_table(replace(given, lengths=(1,)), 4, "cpu"), int32(1))


# --- run(pages=...) -------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_run_takes_other_pages(case: Case, device: str) -> None:
    """Another layer's pages and cache, then the plan's own again."""
    case = replace(case, lengths=(70, 0, 33), rows="int64" if case.has_rows else None)
    inputs = make_inputs(case, device)
    planner = planner_for(case, device)
    plan, kv = planner.plan(inputs.pages(), inputs.seq_lens), planner.bind(inputs.given)
    moved = replace(case, seed=0)
    other = make_inputs(moved, device)
    other.q.copy_(other.q.flip(0))
    for layer, bound in ((other, planner.bind(other.cache)), (inputs, kv), (other, other.cache)):
        result = plan.run(layer.q, bound, pages=layer.pages(), return_lse=True)
        check(case, *result, expected(layer))


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_run_refuses_pages_of_another_size(case: Case) -> None:
    case = replace(case, lengths=(5, 9))
    inputs = make_inputs(case, "cpu")
    planner = planner_for(case, "cpu")
    plan, kv = planner.plan(wide_table(case, 20, "cpu"), inputs.seq_lens), inputs.cache
    sizes = [(2, 21), (2, 19), (3, 20), (1, 20)]
    for batch_size, width in sizes:
        if case.page_table == "ragged" and batch_size == 2:
            continue  # offsets alone have no size
        pages = wide_table(replace(case, lengths=(1,) * batch_size), width, "cpu")
        with pytest.raises(ValueError, match=r"pages has \d+ requests of at most \d+ tokens"):
            plan.run(inputs.q, kv, pages=pages)
    for other in EVERY_LAYOUT:
        if other.page_table != case.page_table:
            with pytest.raises(ValueError, match="page_table="):
                plan.run(inputs.q, kv, pages=wide_table(replace(other, lengths=(1, 1)), 20, "cpu"))


# --- C10: separate tables -------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["pair_nhd", "twice"])
def test_c10_out_is_the_v_id(cache: str) -> None:
    case = replace(D128_SEPARATE, lengths=(16, 1, 13), cache=cache)
    inputs = make_inputs(case, "cpu", uniform_probe(case, "cpu"))
    live = inputs.table[:, 1, 0].long()
    inputs.cache[1][live] = live.to(torch.bfloat16)[:, None, None, None].expand(-1, 16, 2, 128)
    out, lse = attend(inputs)
    assert torch.equal(out, live.to(out.dtype)[:, None, None].expand_as(out))
    torch.testing.assert_close(lse.exp()[:, 0], inputs.seq_lens.float())


def test_c10_batch_stride_of_a_cut_table() -> None:
    case = replace(D128_SEPARATE, lengths=(70, 1, 33))
    inputs = make_inputs(case, "cpu")
    cut = torch.full((60,), 2**31 - 1, dtype=torch.int32).as_strided((3, 2, 5), (17, 6, 1), 2)
    cut.copy_(inputs.table[..., :5])
    inputs.table = cut
    check(case, *attend(inputs), expected(inputs))


def test_c10_two_head_dims_of_separate_pools() -> None:
    """K and V pools of different sizes, each with its own ids."""
    case = replace(D192X128, page_table="separate", page_size=32, lengths=(40, 70))
    inputs = make_inputs(case, "cpu")
    k, v = inputs.cache
    more = torch.cat((v, torch.full_like(v, torch.nan)))
    inputs.cache = (k, more)
    check(case, *attend(inputs), expected(inputs))
    with pytest.raises(ValueError, match="k_cache has"):
        planner_for(replace(case, page_table="shared"), "cpu").bind(inputs.given)
