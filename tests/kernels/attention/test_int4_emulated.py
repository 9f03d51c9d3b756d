"""The attention kernels over int4 caches, run on the CPU in poisoned memory, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitattn
from jitattn.tensors.quantization import bytes_of_scales
from tests.emulator.attention import EmulatedCuda
from tests.support.cases import INT4, Case, of
from tests.support.harness import attend, check, check_addresses, expected
from tests.support.inputs import Tokens, address_probe, make_inputs, random_tokens, zeros_of

PAIRS = ((1, 40), (1, 150), (3, 0), (2, 17), (40, 70), (1, 0))
BASE = replace(INT4, group_size=2, num_kv_heads=2)
CASES = {
    "rows": BASE,
    "32": replace(BASE, kv_dtype="int4_g32", dtype="float16", page_table="separate", page_size=3),
    "half a step": replace(BASE, head_dim=80, page_table="token", logits_soft_cap=5.0),
    "odd number of blocks": replace(BASE, kv_dtype="int4_g32", head_dim=96, mask="packed"),
    "wide values": replace(
        BASE,
        kv_dtype="int4_g64",
        head_dim=64,
        head_dim_vo=512,
        page_size=5,
        page_table="csr",
        block_cache="odd_base",
    ),
    "wide values of rows": replace(BASE, head_dim=64, head_dim_vo=512, kv_layout="HND"),
    "odd strides": replace(BASE, head_dim=256, cache="odd_strides", block_cache="padded"),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(CASES[name], *PAIRS, spare_rows=2)
    host = EmulatedCuda(monkeypatch, "sm_80")  # elsewhere prefill has warpgroups
    host.check(case)
    assert host.kinds == {"decode", "prefill"}


@pytest.mark.parametrize("name", ["rows", "32", "half a step"])
def test_prefill_with_warpgroups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(CASES[name], (140, 150), (40, 200), (20, 20))
    EmulatedCuda(monkeypatch, "sm_90a").check(case)


@pytest.mark.parametrize(("name", "q_len"), [("rows", 1), ("odd number of blocks", 20)])
def test_out_is_the_row_of_v(name: str, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [0, 17, 99, 130]
    case = replace(CASES[name], mask=None, causal=False)
    case = of(case, *[(q_len, 131)] * len(targets))
    inputs = make_inputs(case, "cpu", address_probe(case, "cpu", targets))
    planner = EmulatedCuda(monkeypatch, "sm_80").planner(**case.planner_arguments())
    assert check_addresses(inputs, attend(inputs, planner)[0], targets) == q_len * len(targets)


@pytest.mark.parametrize("kv_dtype", ["int4", "int4_g32"])
def test_what_quantize_kv_stores(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that the definition wrote: kernels round its values once to float16."""
    case = of(replace(BASE, kv_dtype=kv_dtype, dtype="float16", scales=None), *PAIRS)
    inputs = make_inputs(case, "cpu", quantised_tokens(case))
    inputs.k, inputs.v = inputs.k.half().double(), inputs.v.half().double()
    planner = EmulatedCuda(monkeypatch, "sm_80").planner(**case.planner_arguments())
    check(case, *attend(inputs, planner), expected(inputs))


def quantised_tokens(case: Case) -> Tokens:
    """Tokens whose K and V are normal numbers as ``quantize_kv`` stores them."""
    q, k, v = random_tokens(case, "cpu")
    stored = []
    for i, tokens in enumerate((k, v)):
        shape = zeros_of(tokens, case.kv_dtype).shape
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        data, scales = jitattn.quant.quantize_kv(numbers, str(case.kv_dtype))
        stored.append(torch.cat((data, bytes_of_scales(scales)), -1))
    return q, stored[0], stored[1]
