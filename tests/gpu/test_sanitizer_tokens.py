"""Small cases of what moves tokens and pages; tests/gpu/sanitize.sh runs them instrumented."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.support import transfers
from tests.support.cases import D128, TABLES, Case
from tests.support.kv_tables import Tables, check_layer_tables
from tests.support.token_cases import TokenCase, check_tokens
from tests.support.token_sets import APPENDS, KINDS

KINDS_OF_TOKENS = {**KINDS, **APPENDS}
GATHERED = Case(head_dim=128, num_kv_heads=2, group_size=1, lengths=(1, 16, 0, 17, -3, 40))
GATHERS = (
    *(replace(GATHERED, page_table=table) for table in TABLES),
    replace(GATHERED, kv_dtype="float8_e4m3fn", scales="heads"),
    replace(GATHERED, cache="odd_strides", page_size=3, lengths_dtype="int64"),
)
COPIES = (
    transfers.Copy(
        (2, 16, 2, 64), (("plain", "odd"),), (5, 4), torch.bfloat16, ((0, 3), (4, 0), (-1, 1))
    ),
    transfers.Copy(
        (3, 5),
        (("transposed", "padded"), ("layer_inside", "plain")),
        (4, 4),
        torch.uint8,
        ((1, 2),),
    ),
)


@pytest.mark.parametrize("name", KINDS_OF_TOKENS)
def test_tokens(name: str) -> None:
    case: TokenCase = KINDS_OF_TOKENS[name]
    check_tokens(replace(case, pairs=((1, 1), (3, 17), (1, 0), (2, 2))), DEVICE)


@pytest.mark.parametrize("case", GATHERS, ids=str)
def test_gather(case: Case) -> None:
    transfers.check_gather(transfers.Gather(case), DEVICE)


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_quantised_gather(name: str) -> None:
    transfers.check_quantised_gather(name, "bfloat16", "heads", DEVICE)


@pytest.mark.parametrize("example", COPIES, ids=str)
def test_copy(example: transfers.Copy) -> None:
    transfers.check_copy(example, DEVICE)


@pytest.mark.parametrize("source", ["tensor", "table", "csr"])
def test_block_table(source: str) -> None:
    transfers.check_block_table(
        transfers.Slots(16, (37, 0, 16), is_mapped=True, source=source), DEVICE
    )


@pytest.mark.parametrize("table", [None, "shared", "csr", "token"])
def test_batch_info(table: str | None) -> None:
    transfers.check_batch_info(transfers.Tokens((37, 5, 0), (3, 5, 1), table, spare=2), DEVICE)


def test_layer_tables() -> None:
    check_layer_tables(Tables(5, 9, 12, (3, 2), 1, "transposed", 2), DEVICE)


def test_layouts_are_those_that_there_are() -> None:
    assert {case.page_table for case in GATHERS} == set(TABLES)
    assert D128.head_dim == GATHERED.head_dim, "the bundle has its kernels"
