"""C43: what a process must not have done to CUDA; scripts for fresh processes.

Each prints nothing and ends with status 0, or fails with a traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]

CHECK = """
import os, sys
def open_devices():
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the listing's own
            pass
    return [path for path in found if path.startswith("/dev/nvidia")]
def check_untouched():
    assert open_devices() == [], open_devices()
    if "torch" in sys.modules:
        assert not sys.modules["torch"].cuda.is_initialized()
    else:
        with open("/proc/self/maps") as maps:
            assert "libcuda.so" not in maps.read()
"""

IMPORT = """
import jitattn
check_untouched()
assert jitattn.check_config(head_dim=128).supported
jitattn.AttentionPlanner, jitattn.BlockTable, jitattn.attention  # torch comes with them
check_untouched()
"""

# Planning and validation on the CPU, wherever GPUs are.
PLAN = """
import torch, jitattn
torch.set_num_threads(1)
def attend():
    planner = jitattn.AttentionPlanner(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, device="cpu", backend="reference"
    )
    cache = torch.ones(3, 2, 16, 2, 16, dtype=torch.bfloat16)
    plan = planner.plan(
        jitattn.BlockTable(torch.tensor([[2, 1]], dtype=torch.int32)),
        torch.tensor([20], dtype=torch.int32),
    )
    out = plan.run(torch.ones(1, 4, 16, dtype=torch.bfloat16), cache)
    assert bool((out == 1).all())
attend()
try:
    planner = jitattn.AttentionPlanner(head_dim=16.5, device="cpu")
except jitattn.ConfigError:
    pass
else:
    raise AssertionError("a head_dim of 16.5 was accepted")
check_untouched()
"""


def in_child(statement: str) -> str:
    """A script that runs ``statement`` in a child, which must not fail."""
    return f"""
child = os.fork()
if child == 0:
    try:
        {statement}
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


FORK = in_child("attend(); check_untouched()") + "attend()\ncheck_untouched()\n"


def run_apart(*parts: str, **environ: str) -> None:
    """Run the parts of a script in one fresh process; it must not fail."""
    path = os.pathsep.join([str(_ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", "".join(parts)],
        env=os.environ | {"PYTHONPATH": path} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
