"""The pages of a block table through every other layout: the same tokens in the same cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import jitattn
from jitattn.tensors.page_table_base import PageTable
from tests.support.cases import TABLES, Case
from tests.support.harness import Result, assert_same, attend, extras, plan_of, planner_for
from tests.support.inputs import Inputs, make_inputs


def same_pages(inputs: Inputs, page_table: str, *, stretch: int = 1) -> PageTable:
    """The shared block table of ``inputs`` in another layout; ``stretch`` is its column stride.

    Garbage entries stay garbage. Each table has the width of the block table, so its capacity and
    with it what the planner knows is the same.
    """
    table, rows = inputs.table, inputs.rows
    if page_table == "shared":
        return jitattn.BlockTable(_stretched(table, stretch), rows=rows)
    if page_table == "separate":
        both = torch.stack((table, table), dim=1)
        return jitattn.BlockTable(_stretched(both, stretch), rows=rows)
    if page_table == "token":
        return jitattn.TokenTable(_stretched(_slots(inputs), stretch), rows=rows)
    assert page_table == "csr", page_table
    picked = table if rows is None else table[rows.long()]
    width = table.shape[1]
    starts = torch.arange(picked.shape[0] + 1, dtype=torch.int32, device=table.device) * width
    indices = picked.reshape(-1)
    return jitattn.CsrPages(_stretched(starts, stretch), _stretched(indices, stretch))


def _slots(inputs: Inputs) -> Tensor:
    size = inputs.case.page_size
    places = torch.arange(size, dtype=torch.int32, device=inputs.device)
    ids = inputs.table[..., None]
    slots = torch.where(inputs.garbage[..., None], ids, ids * size + places)
    return slots.flatten(1)


def _stretched(tensor: Tensor, step: int) -> Tensor:
    if step == 1:
        return tensor
    wide = torch.full((*tensor.shape, step), 2**31 - 1, dtype=torch.int32, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def attend_through(
    inputs: Inputs, planner: jitattn.AttentionPlanner, pages: PageTable
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call with other pages than the case's."""
    plan = plan_of(inputs, planner, pages)
    kv = inputs.bind(planner)
    return plan.run(inputs.q, kv, return_lse=True, **extras(inputs))


def assert_same_through_every_table(inputs: Inputs, want: Result) -> None:
    """The same logical pages through every table, at any column stride, give the bits ``want``."""
    for table in TABLES:
        planner = planner_for(replace(inputs.case, page_table=table), inputs.device)
        for stretch in (1, 3):
            pages = same_pages(inputs, table, stretch=stretch)
            assert_same(attend_through(inputs, planner, pages), want)


def ragged_inputs(inputs: Inputs) -> Inputs:
    """The same tokens without pages, and a case that says so."""
    case = replace(inputs.case, page_table="ragged", page_size=1, rows=None, cache="pair_nhd")
    starts = torch.tensor(inputs.kv_indptr, dtype=torch.int32, device=inputs.device)
    cache = (inputs.k.clone(), inputs.v.clone())
    return replace(inputs, case=case, cache=cache, indptr=starts, rows=None)


def wide_table(case: Case, width: int, device: torch.device | str) -> PageTable:
    """Zeros that hold ``width`` entries a request, in the case's layout."""
    batch_size = len(case.lengths)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    match case.page_table:
        case "shared":
            return jitattn.BlockTable(zeros(batch_size, width))
        case "separate":
            return jitattn.BlockTable(zeros(batch_size, 2, width))
        case "token":
            return jitattn.TokenTable(zeros(batch_size, width))
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * width
    if case.page_table == "csr":
        return jitattn.CsrPages(starts, zeros(batch_size * width))
    return jitattn.RaggedKV(starts)


def check_every_table(
    case: Case, device: torch.device | str, *, window_left: int, batch_invariant: bool
) -> None:
    """A case through its shared table and through every other one."""
    case = replace(
        case,
        page_table="shared",
        window_left=window_left,
        batch_invariant=batch_invariant,
        rows="int32",
    )
    inputs = make_inputs(case, device)
    assert_same_through_every_table(inputs, attend(inputs))
