"""C43: importing, planning and validating leave CUDA alone; no GPU is one clear error."""

from __future__ import annotations

import pytest

from tests.support.untouched import CHECK, FORK, IMPORT, PLAN, run_apart

VISIBLE = pytest.mark.parametrize("visible", [None, "-1"])

NO_DEVICE = """
import jitattn
try:
    jitattn.AttentionPlanner(device="cuda")
except jitattn.ConfigError as error:
    assert "this process sees 0 CUDA devices" in str(error), error
else:
    raise AssertionError("a planner without a device")
assert jitattn.AttentionPlanner().backend == "reference"
assert not sys.modules["torch"].cuda.is_initialized()  # though the driver has been asked
"""


def hidden(visible: str | None) -> dict[str, str]:
    return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}


@VISIBLE
@pytest.mark.parametrize("first", ["", "import torch\n"], ids=["alone", "after torch"])
def test_c43_import_makes_no_context(first: str, visible: str | None) -> None:
    run_apart(CHECK, first, IMPORT, **hidden(visible))


@VISIBLE
def test_c43_planning_on_the_cpu_makes_no_context(visible: str | None) -> None:
    run_apart(CHECK, PLAN, **hidden(visible))


@pytest.mark.parametrize("visible", [""])
def test_c43_no_device_is_one_clear_error(visible: str) -> None:
    run_apart(CHECK, NO_DEVICE, **hidden(visible))


def test_c43_devices_may_be_hidden_after_import() -> None:
    run_apart(CHECK, "import torch, jitattn\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n", NO_DEVICE)


def test_c43_a_fork_after_import_and_after_use() -> None:
    run_apart(CHECK, PLAN, FORK)
