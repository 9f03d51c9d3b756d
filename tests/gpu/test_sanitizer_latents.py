"""Small cases of latent attention, and of lists of tokens, that sanitize.sh runs instrumented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.device import DEVICE
from tests.support.lists import GPU_CASES, ListCase, check_lists
from tests.support.lists import make_inputs as make_list_inputs
from tests.support.mla import FORMS, ON_A_CARD, MLACase, check_kernel, make_inputs

# One long enough that several CTAs share it.
BASE = replace(ON_A_CARD, lengths=(1300, 64, 0, 1, 200), q_lens=None, spare_rows=0)
MORE_ROWS = {"few": None, "more": (1, 2, 0, 1, 2), "many": (5, 1, 0, 1, 40)}
"""Query tokens of 16 heads, for the kernels of 16, 32 and 64 rows of compute capability 9.0."""

CASES = (
    *(replace(BASE, form=form, q_lens=q_lens) for form in FORMS for q_lens in MORE_ROWS.values()),
    *(replace(BASE, layout="odd", page_table="separate", q_lens=q) for q in MORE_ROWS.values()),
    replace(BASE, page_size=1),
    replace(BASE, num_heads=128),
    replace(BASE, page_table="token"),
    replace(BASE, page_table="ragged", form="fp8_one"),
)
LISTS = {
    name: replace(GPU_CASES[name], num_tokens=3, k=700, num_pages=40)
    for name in ("8 heads", "128 heads", "rows", "grouped")
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: MLACase) -> None:
    inputs = make_inputs(case, DEVICE)
    check_kernel(inputs, *inputs.run())


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    case: ListCase = LISTS[name]
    inputs = make_list_inputs(case, DEVICE)
    check_lists(inputs, inputs.run(case.planner(DEVICE)))
