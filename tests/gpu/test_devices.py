"""Several GPUs in one process. Runs alone too: python -m pytest tests/gpu/test_devices.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.registry import specs_of
from tests.gpu.device import DEVICE, arch_of_device, side_by_side
from tests.support import transfers
from tests.support.cases import D128, D128_CSR, D192X128, RAGGED, Case
from tests.support.compiler import skip_unless_compiled
from tests.support.harness import assert_same, attend, check, expected, planner_for, replayed
from tests.support.inputs import Inputs, make_inputs

ROOT = Path(__file__).parents[2]
CASES = tuple(replace(case, lengths=(9, 5000, 0)) for case in (D128, D128_CSR, RAGGED, D192X128))

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda" or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


def on(device: int, inputs: Inputs) -> Inputs:
    """The same inputs on another device, strides included where they matter."""
    name = f"cuda:{device}"

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(name)

    return replace(
        inputs,
        q=move(inputs.q),
        k=move(inputs.k),
        v=move(inputs.v),
        cache=tuple(move(x) for x in inputs.cache),
        table=move(inputs.table),
        rows=move(inputs.rows),
        indptr=move(inputs.indptr),
        seq_lens=move(inputs.seq_lens),
        sinks=move(inputs.sinks),
        garbage=move(inputs.garbage),
    )


def equal_cards() -> bool:
    first, second = (torch.cuda.get_device_properties(i) for i in range(2))
    return first.name == second.name and (
        first.multi_processor_count == second.multi_processor_count
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_c28_a_tensors_of_the_other_device(case: Case) -> None:
    """Device 0 is current, everything lies on device 1."""
    inputs = make_inputs(case, "cuda:0")
    want = attend(inputs)
    assert torch.cuda.current_device() == 0
    moved = on(1, inputs)
    result = attend(moved)
    assert torch.cuda.current_device() == 0
    assert result[0].device == torch.device("cuda:1")
    check(case, *result, expected(moved))
    if equal_cards():
        assert_same(result, want)


def test_c28_a_transfers_on_the_other_device() -> None:
    transfers.check_gather(
        transfers.Gather(replace(D128, lengths=(9, 500, 0), group_size=1)), "cuda:1"
    )
    pairs = ((0, 2), (3, 1), (-1, 0))
    transfers.check_copy(
        transfers.Copy((2, 16, 2, 64), (("plain", "odd"),), (4, 4), torch.bfloat16, pairs), "cuda:1"
    )
    transfers.check_block_table(transfers.Slots(16, (37, 0, 16), is_mapped=True), "cuda:1")
    transfers.check_batch_info(transfers.Tokens((37, 5), (3, 5), "shared", spare=2), "cuda:1")
    assert torch.cuda.current_device() == 0


def test_c28_a_merge_on_the_other_device() -> None:
    outs, lses = torch.randn(3, 5, 4, 64, device="cuda:1"), torch.randn(3, 5, 4, device="cuda:1")
    got = jitattn.merge_states(outs, lses)
    assert got[0].device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_same(got, jitattn.merge_states(outs.to("cuda:0"), lses.to("cuda:0")))


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1, 0)])
def test_c28_b_one_device_after_the_other(order: tuple[int, ...]) -> None:
    for case in CASES:
        inputs = make_inputs(case, "cuda:0")
        want = expected(inputs)
        for device in order:
            with torch.cuda.device(device):
                out, lse = attend(on(device, inputs))
                assert torch.cuda.current_device() == device
            check(case, out.to("cuda:0"), lse.to("cuda:0"), want)


def test_c28_b_one_compile_for_equal_cards() -> None:
    if not equal_cards():
        pytest.skip("the cards differ")
    arguments = {"head_dim": 112, "page_size": 24, "q_dtype": "float16", "kv_dtype": "float16"}
    first, second = (
        jitattn.build_info(jitattn.AttentionPlanner(**arguments, device=f"cuda:{i}"))
        for i in range(2)
    )
    assert [info.name for info in first] == [info.name for info in second]
    assert {info.origin for info in second} == {"memory"}


def test_c28_c_a_thread_for_each_device() -> None:
    def work(device: int) -> None:
        inputs = make_inputs(replace(CASES[0], seed=device), f"cuda:{device}")
        want = expected(inputs)
        first = attend(inputs)
        check(inputs.case, *first, want)
        for _ in range(200):
            assert_same(attend(inputs), first)

    side_by_side(work, 2)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("stray", ["q", "cache", "table", "seq_lens", "out", "lse"])
def test_c28_d_mixed_devices(stray: str) -> None:
    inputs = make_inputs(CASES[0], "cuda:1")
    want = attend(inputs)
    other = on(0, inputs)
    changes: dict[str, Tensor] = {}
    if stray == "out":
        changes["out"] = torch.empty_like(want[0], device="cuda:0")
    elif stray == "lse":
        changes["lse"] = torch.empty_like(want[1], device="cuda:0")
    else:
        setattr(inputs, stray, getattr(other, stray))
    with pytest.raises(ValueError, match=r"(?s)cuda:0.*cuda:1"):
        attend(inputs, planner_for(inputs.case, "cuda:1"), **changes)


def test_c28_d_merge_of_mixed_devices() -> None:
    outs, lses = torch.randn(3, 5, 4, 64, device="cuda:1"), torch.randn(3, 5, 4, device="cuda:0")
    with pytest.raises(ValueError, match=r"(?s)lses.*cuda:0.*cuda:1"):
        jitattn.merge_states(outs, lses)


SCRIPT = """
import sys
from dataclasses import replace
import torch
from tests.support.cases import D128
from tests.support.harness import planner_for, check_case
import jitattn
case = replace(D128, lengths=(9, 5000, 0))
check_case(case, "cuda")
planner = planner_for(case, "cuda:0")
assert torch.cuda.device_count() == 1
sys.stdout.write(" ".join(info.origin for info in jitattn.build_info(planner)))
"""


def test_c28_e_visible_devices_and_a_shared_cache(tmp_path: Path) -> None:
    """A process that sees only the first card fills the cache; one with the second reads it."""
    if not os.environ.get("JITATTN_PRECOMPILED"):
        skip_unless_compiled(specs_of(D128.config(), arch_of_device()), arch_of_device())
    origins = []
    for visible in ("0", "1"):
        environ = os.environ | {
            "CUDA_VISIBLE_DEVICES": visible,
            "JITATTN_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environ, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        origins.append(set(done.stdout.split()))
    assert origins[0] <= {"compiled", "precompiled"}
    if equal_cards():
        assert origins[1] <= {"disk", "precompiled"}


def test_c28_f_the_default_device_is_cuda() -> None:
    """torch.set_default_device changes where bare tensors land; ours name their device."""
    inputs = make_inputs(CASES[0], "cuda:1")
    want = attend(inputs)
    torch.set_default_device("cuda:0")
    try:
        result = attend(
            inputs, jitattn.AttentionPlanner(**inputs.case.planner_arguments(), device=1)
        )
    finally:
        torch.set_default_device(None)
    assert_same(result, want)


def test_graphs_on_the_other_device() -> None:
    inputs = make_inputs(CASES[0], "cuda:1")
    planner = planner_for(inputs.case, "cuda:1")
    want = attend(inputs)
    with torch.cuda.device(1):
        assert_same(replayed(inputs, planner), want)
