"""Kernels of variants, run on the CPU by the code that launches them, against the definition.

A few hundred small batches of few kernels, and the warpgroups of both families.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cases import E4M3, NVFP4, Case, of
from tests.harness import attend, check, expected
from tests.inputs import make_inputs
from tests.mla import MLACase, check_kernel
from tests.mla import make_inputs as make_latents
from tests.unit.host_attention import HostCuda
from tests.variants import VARIANTS

PAIRS = ((1, 40), (1, 150), (3, 0), (2, 17), (40, 70), (1, 0), (9, 4))
BASE = Case(head_dim=32, page_size=5, num_kv_heads=2, group_size=2)


@pytest.mark.parametrize("name", VARIANTS)
def test_warps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(replace(BASE, variant=name, seed=4), *PAIRS, spare_rows=2)
    host = HostCuda(monkeypatch, "sm_80")
    inputs = make_inputs(case, "cpu")
    planner = host.planner(**case.planner_arguments())
    check(case, *attend(inputs, planner), expected(inputs))
    assert {symbol.split("_")[1] for symbol in host.ran} == {"decode", "prefill"}
