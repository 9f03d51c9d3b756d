"""Planners, plans, caches and workspaces among threads, and what copying and pickling them says."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch

import jitattn
from tests.emulator import launch_recorder
from tests.emulator.launch_recorder import LaunchRecorder
from tests.support import conduct

SHAPE = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 32, "page_size": 4}
LENS = torch.tensor([5, 9, 0], dtype=torch.int32)
THREADS = 32


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    return launch_recorder.install(monkeypatch)


def table() -> jitattn.BlockTable:
    return jitattn.BlockTable(torch.zeros(3, 5, dtype=torch.int32))


def pool() -> torch.Tensor:
    return torch.zeros(6, 2, 4, 2, 32, dtype=torch.bfloat16)


def test_threads_share_planners_and_have_their_own(cuda: LaunchRecorder) -> None:
    """Each thread finds its own addresses in what it launched, of a shared planner and its own."""
    shared, cached = cuda.planner(**SHAPE), pool()
    bound = shared.bind(cached)
    rounds = 3 * conduct.FACTOR
    wrong: list[object] = []
    done = []
    start = threading.Barrier(THREADS)
    making = threading.Lock()  # the recorder's, which notes the layout of the last planner

    def work() -> None:
        try:
            with making:
                own = cuda.planner(**SHAPE)
            q = torch.zeros(3, 8, 32, dtype=torch.bfloat16)
            outs = [torch.empty_like(q) for _ in range(2)]
            start.wait()
            for _ in range(rounds):
                for planner, out in zip((shared, own), outs, strict=True):
                    plan = planner.plan(table(), LENS)
                    given = bound if planner is shared else planner.bind(cached)
                    assert plan.run(q, given, out=out) is out
                    plan.refresh()
            done.append({out.data_ptr() for out in outs})
        except BaseException as error:  # told to the test
            wrong.append(error)
            start.abort()

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []
    assert len(done) == THREADS
    launched = [
        launch.params.attention.out
        for launch in cuda.launches
        if not launch.symbol.startswith("jitattn_schedule")
    ]
    for addresses in done:
        for address in addresses:
            assert launched.count(address) == rounds
    conduct.tell("threaded runs of planners", tried=len(launched), threads=THREADS, failed=0)


# ---------------------------------------------------------------------------- copies


def reference() -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(**SHAPE, device="cpu")


def latent() -> jitattn.MLAPlanner:
    return jitattn.MLAPlanner(num_heads=16, page_size=64, sm_scale=0.1, device="cpu")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "planner": (reference, "make another one with the same arguments"),
    "latent planner": (latent, "make another one with the same arguments"),
    "plan": (lambda: reference().plan(table(), LENS), "make another one with planner.plan"),
    "bound cache": (lambda: reference().bind(pool()), "bind the tensors it is made of"),
    "bound latent cache": (
        lambda: latent().bind(torch.zeros(2, 64, 576, dtype=torch.bfloat16)),
        "bind the tensors it is made of",
    ),
    "workspace": (lambda: jitattn.Workspace("cpu"), r"make another Workspace\(device\)"),
}


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_bound_to_a_process_says_what_to_do_instead(
    name: str, copy_of: Callable[[object], object]
) -> None:
    make, advice = REFUSED[name]
    with pytest.raises(TypeError, match=f"can't be copied or pickled: .*{advice}"):
        copy_of(make())


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_what_they_are_made_from_is_copied(copy_of: Callable[[object], object]) -> None:
    rope = jitattn.Rope(64, base=10_000.0)
    other = copy_of(rope)
    assert other == rope
    assert isinstance(other, jitattn.Rope)
    assert int(other.handle) != int(rope.handle)
    config = reference().config
    assert copy_of(config) == config
