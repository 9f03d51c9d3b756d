"""The sm_80 code of the kernels, as PTX, on the card at hand: see tests/gpu/sm80.py.

JITATTN_TEST_PTX names the folder that tests/gpu/make_ptx.py filled, JITATTN_TEST_SM80_EXAMPLES how
many random examples of decode run, and as many of mixed batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import jitattn
from jitattn.kernels.attention.spec import PrefillSpec
from jitattn.kernels.registry import specs_of
from tests.gpu.device import DEVICE
from tests.gpu.sm80 import pretend_sm80
from tests.gpu.test_fp8 import check_every_byte_of_k, check_every_byte_of_v
from tests.gpu.test_nvfp4 import check_every_code_of_k, check_every_code_of_v
from tests.support.cases import (
    BLOCK_FAMILIES,
    BYTE_FAMILIES,
    D128,
    EVERY_LAYOUT,
    Case,
    decode_cases,
    mixed_cases,
)
from tests.support.harness import attend, check, check_case, expected, planner_for, same_bits
from tests.support.inputs import make_inputs

pytest.importorskip("hypothesis")
from tests.gpu.make_ptx import ARCH, specs
from tests.support import mixed_strategies, strategies
from tests.support.harness import assert_same, replayed
from tests.support.mixed_strategies import SM80_VARIANTS
from tests.support.strategies import NUM_SHARDS, Shards

FOLDER = os.environ.get("JITATTN_TEST_PTX", "")
NUM_EXAMPLES = int(os.environ.get("JITATTN_TEST_SM80_EXAMPLES", "3000"))
SEEDS = range(1001, 1001 + NUM_SHARDS)
DECODE = Shards(strategies.examples(), DEVICE, NUM_EXAMPLES)
MIXED = Shards(mixed_strategies.examples(SM80_VARIANTS), DEVICE, NUM_EXAMPLES)
PREFILL_SPECS = {spec for spec in specs() if isinstance(spec, PrefillSpec)}
MIXED_CASES = [
    case for case in mixed_cases() if PREFILL_SPECS.intersection(specs_of(case.config(), ARCH))
][::2]

pytestmark = pytest.mark.skipif(not FOLDER or DEVICE != "cuda", reason="JITATTN_TEST_PTX is unset")


@pytest.fixture(scope="module", autouse=True)
def _sm80() -> Iterator[None]:
    torch.cuda.init()
    with pretend_sm80(Path(FOLDER)):
        yield


def test_it_is_the_sm80_code() -> None:
    inputs = make_inputs(replace(D128, lengths=(300, 0, 5000)), DEVICE)
    planner = planner_for(inputs.case, DEVICE)
    check(inputs.case, *attend(inputs, planner), expected(inputs))
    assert {info.arch for info in jitattn.build_info(planner)} == {"sm_80"}
    assert {info.compiler for info in jitattn.build_info(planner)} == {"PTX"}


@pytest.mark.parametrize("case", decode_cases()[::7], ids=str)
def test_decode(case: Case) -> None:
    check_case(case, DEVICE)


@pytest.mark.parametrize("case", BYTE_FAMILIES, ids=str)
def test_every_byte_of_fp8(case: Case) -> None:
    """They are converted in another way than on cards that have an instruction for it."""
    check_every_byte_of_v(case, q_len=1)
    check_every_byte_of_k(case, q_len=1)


@pytest.mark.parametrize("case", BLOCK_FAMILIES, ids=str)
def test_every_code_of_nvfp4(case: Case) -> None:
    check_every_code_of_v(case, q_len=1)
    check_every_code_of_k(case, q_len=1)


@pytest.mark.parametrize("case", MIXED_CASES, ids=str)
def test_mixed(case: Case) -> None:
    check_case(case, DEVICE)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
def test_random_examples(seed: int) -> None:
    DECODE.run(seed)


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
def test_random_mixed_batches(seed: int) -> None:
    MIXED.run(seed)


def test_the_examples_reached_enough_kernels() -> None:
    DECODE.check_reached(80)
    MIXED.check_reached(len(SM80_VARIANTS))


@pytest.mark.parametrize("case", EVERY_LAYOUT, ids=str)
def test_replays_and_invariant_batches(case: Case) -> None:
    case = replace(case, lengths=(5000, 17, 0, 900), batch_invariant=True)
    inputs = make_inputs(case, DEVICE)
    want = attend(inputs)
    planner = planner_for(case, DEVICE)
    assert_same(replayed(inputs, planner), want)
    few = attend(inputs, planner_for(case, DEVICE, num_sms=3))
    assert same_bits(few[0], want[0])


def test_merge() -> None:
    outs = torch.randn(3, 50, 4, 64, device=DEVICE).bfloat16()
    lses = torch.randn(3, 50, 4, device=DEVICE)
    out, lse = jitattn.merge_states(outs, lses)
    want = jitattn.merge_states(outs.cpu(), lses.cpu())
    torch.testing.assert_close(lse.cpu(), want[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(out.cpu(), want[0], rtol=2**-7, atol=2**-7)
