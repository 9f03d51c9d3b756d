"""The memory of plans: its size is known before, its parts are apart, captures never grow it."""

from __future__ import annotations

import pytest
import torch

import jitattn
from jitattn.device.workspace import SLICE_BYTES, Workspace, aligned
from tests.emulator import launch_recorder
from tests.emulator.launch_recorder import LaunchRecorder
from tests.support.workspaces import plan_of

CONFIGS = (
    {},
    {"head_dim": 64, "num_qo_heads": 8, "num_kv_heads": 8},
    {"head_dim": 256, "num_qo_heads": 16, "num_kv_heads": 16},
    {"batch_invariant": True},
    {"kv_dtype": "float8_e4m3fn", "page_size": 3},
    {"num_sms": 7},
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    return launch_recorder.install(monkeypatch)


@pytest.mark.parametrize("max_q_len", [1, 3, 100])
@pytest.mark.parametrize("batch_size", [1, 40, 5000])
@pytest.mark.parametrize("arguments", CONFIGS, ids=str)
def test_the_size_is_known_before(
    cuda: LaunchRecorder, arguments: dict[str, object], batch_size: int, max_q_len: int
) -> None:
    planner = cuda.planner(**arguments)
    told = planner.workspace_bytes(batch_size, max_q_len=max_q_len)
    assert not cuda.workspaces
    plan = plan_of(planner, batch_size, max_q_len)
    (workspace,) = cuda.workspaces.values()
    own = sum(aligned(part.memory.numel()) for part in plan.backend.launches)
    buffers = [aligned(4 * b.numel()) for b in (workspace.partials, workspace.counters)]
    spare = 0
    if planner.batch_invariant and max_q_len == 1:
        # A plan whose requests have one query token each needs no decode kernel.
        decode = planner.kernels.schedule_configs(1)[-1]
        spare = aligned(decode.schedule_bytes(batch_size, 1))
        spare += aligned(4 * decode.num_partials) + aligned(4 * decode.num_counters)
    assert told == own + sum(buffers) + spare
    assert workspace.num_bytes <= sum(buffers)


@pytest.mark.parametrize("arguments", CONFIGS, ids=str)
def test_kernels_of_a_plan_have_parts_of_one_workspace(
    cuda: LaunchRecorder, arguments: dict[str, object]
) -> None:
    """They run beside each other."""
    planner = cuda.planner(**arguments)
    plan = plan_of(planner, 3, 100)
    (workspace,) = cuda.workspaces.values()
    parts = plan.backend.launches
    assert len(parts) == 2
    partials, counters = workspace.partials.data_ptr(), workspace.counters.data_ptr()
    for part, config in zip(parts, planner.kernels.schedule_configs(100), strict=True):
        assert part.buffers == (workspace.partials, workspace.counters)
        params = part.params.attention
        assert params.partials == partials
        assert (params.partial_sums - partials) % SLICE_BYTES == 0
        assert params.num_claimed == counters
        assert params.counters - counters == SLICE_BYTES
        partials += aligned(4 * config.num_partials)
        counters += aligned(4 * config.num_counters)
    assert partials <= workspace.partials.data_ptr() + workspace.partials.nbytes
    assert counters <= workspace.counters.data_ptr() + workspace.counters.nbytes


def test_plans_of_any_size_have_one_workspace(cuda: LaunchRecorder) -> None:
    planner = cuda.planner()
    plans = [plan_of(planner, batch_size, 1) for batch_size in (1, 300)]
    (workspace,) = cuda.workspaces.values()
    assert all(plan.backend.has_buffers_of(workspace) for plan in plans)
    assert planner.workspace_bytes(300) >= planner.workspace_bytes(1)


def test_a_capture_never_grows_it(cuda: LaunchRecorder) -> None:
    workspace = Workspace("cpu")
    workspace.reserve(1000, 10)
    # The tensors stay where they are.
    workspace.device = torch.device("cuda", 0)
    cuda.is_capturing = True
    before = workspace.partials, workspace.counters
    assert workspace.reserve(1000, 10) == before
    with pytest.raises(ValueError, match=r"has 4040 bytes and needs 8448 in a capture"):
        workspace.reserve(2000, 64)
    assert (workspace.partials, workspace.counters) == before


def test_the_reference_needs_none() -> None:
    assert jitattn.AttentionPlanner(device="cpu").workspace_bytes(10, max_q_len=7) == 0


@pytest.mark.parametrize(("batch_size", "max_q_len"), [(-1, 1), (2, -3)])
def test_sizes_are_counts(batch_size: int, max_q_len: int) -> None:
    planner = jitattn.AttentionPlanner(device="cpu")
    with pytest.raises(ValueError, match="expected at least 0"):
        planner.workspace_bytes(batch_size, max_q_len=max_q_len)
    with pytest.raises(TypeError, match="batch_size"):
        planner.workspace_bytes(2.5)
