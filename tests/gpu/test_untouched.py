"""C43 where there is a GPU: no context before the first use, and forks around it."""

from __future__ import annotations

import pytest

from tests.gpu.device import DEVICE
from tests.support.untouched import CHECK, FORK, IMPORT, PLAN, in_child, run_apart

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda", reason="what holds without a GPU is in tests/kernels"
)

USE = """
from dataclasses import replace
from tests.support.cases import D128
from tests.support.harness import planner_for, check_case
CASE = replace(D128, lengths=(300, 0, 40))
"""

# The parent knows the device, the child asks for it: it must neither hang nor compute.
FORK_AFTER_USE = """
import signal
import torch
from tests.support.harness import plan_of
inputs = check_case(CASE, "cuda")
planner = planner_for(CASE, "cuda:0")
plan, kv, out = plan_of(inputs, planner), inputs.bind(planner), inputs.new_out()
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    signal.alarm(300)  # ends a child that hangs
    calls = (
        lambda: plan.run(inputs.q, kv, out=out),
        lambda: plan_of(inputs, planner),
        lambda: check_case(CASE, "cuda"),
    )
    for number, call in enumerate(calls):
        try:
            call()
        except Exception as error:
            assert str(error), error
        else:
            os._exit(10 + number)
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
check_case(CASE, "cuda")
"""


@pytest.mark.parametrize("first", ["", "import torch\n"], ids=["alone", "after torch"])
def test_c43_import_makes_no_context(first: str) -> None:
    run_apart(CHECK, first, IMPORT)


def test_c43_planning_on_the_cpu_makes_no_context() -> None:
    run_apart(CHECK, PLAN, FORK)


def test_c43_devices_are_chosen_after_import() -> None:
    choose = """
import torch, jitattn
check_untouched()
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
assert torch.cuda.device_count() == 1
check_case(CASE, "cuda")
assert open_devices()
"""
    run_apart(CHECK, USE, choose)


def test_c43_import_in_the_parent_use_in_the_child() -> None:
    in_both = in_child('check_case(CASE, "cuda")') + 'check_untouched()\ncheck_case(CASE, "cuda")\n'
    run_apart(CHECK, USE, "check_untouched()\n", in_both)


def test_c43_use_in_the_parent_is_an_error_in_the_child() -> None:
    run_apart(CHECK, USE, FORK_AFTER_USE)
