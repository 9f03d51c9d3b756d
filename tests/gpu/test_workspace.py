"""The memory that plans take is what the planner said before, and captures never grow it."""

from __future__ import annotations

import pytest
import torch

import jitattn
from tests.gpu.device import DEVICE
from tests.support.cases import D128
from tests.support.workspaces import plan_of

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="the memory is the device's")


@pytest.mark.parametrize("max_q_len", [1, 100])
@pytest.mark.parametrize("batch_size", [1, 3000])
def test_plans_take_what_was_said(batch_size: int, max_q_len: int) -> None:
    workspace = jitattn.Workspace(DEVICE)
    arguments = D128.planner_arguments()
    planner = jitattn.AttentionPlanner(**arguments, device=DEVICE, workspace=workspace)
    told = planner.workspace_bytes(batch_size, max_q_len=max_q_len)
    first = plan_of(planner, batch_size, max_q_len, DEVICE)
    before = torch.cuda.memory_allocated()
    assert workspace.num_bytes < told
    second = plan_of(planner, batch_size, max_q_len, DEVICE)
    # A workspace is shared, so that another plan adds its schedules alone, and this test its table,
    # lengths and offsets, all in blocks of 512 bytes.
    grown = torch.cuda.memory_allocated() - before
    given = (16 + 4 + 4) * batch_size + 6 * 512
    assert 0 < grown <= told - workspace.num_bytes + given
    del first, second


def test_a_capture_never_grows_it() -> None:
    workspace = jitattn.Workspace(DEVICE)
    memory = torch.zeros(8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        memory.add_(1)
        with pytest.raises(ValueError, match="has 0 bytes and needs 8192 in a capture"):
            workspace.reserve(1000, 1000)
    assert workspace.num_bytes == 0
    workspace.reserve(1000, 1000)
    assert workspace.num_bytes == 8000
