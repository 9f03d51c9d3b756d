"""Compile on the machine that computes, and compute without a compiler; each in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jitattn
from jitattn.kernels.registry import specs_of
from tests.gpu.device import DEVICE, arch_of_device
from tests.support.cases import D128
from tests.support.compiler import skip_unless_compiled

ROOT = Path(__file__).parents[2]

# Runs one case and prints where its kernels came from.
COMPUTE = """
import json, sys
from dataclasses import replace
from tests.support.cases import D128
from tests.support.harness import planner_for, check_case
import jitattn
case = replace(D128, lengths=(300, 0, 5000))
check_case(case, "cuda")
origins = [info.origin for info in jitattn.build_info(planner_for(case, "cuda:0"))]
compiler = sorted(name for name in sys.modules if "nvrtc" in name and name.startswith("cuda"))
sys.stdout.write(json.dumps({"origins": origins, "compiler": compiler}))
"""

# Importing the compiler's binding, or CUTLASS, fails.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("cuda.bindings.nvrtc", "cuda.bindings._internal.nvrtc", "cutlass")):
            raise ImportError(f"{name} is blocked by this test")
sys.meta_path.insert(0, Block())
"""

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="loads kernels onto a device")


def compute(script: str, **environ: str | None) -> dict[str, list[str]]:
    """Run a script in a fresh process; None removes a variable."""
    merged = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | environ
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={name: value for name, value in merged.items() if value is not None},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def needs_compiler() -> str:
    """The architecture that kernels of D128 are compiled for, where they can be."""
    arch = arch_of_device()
    skip_unless_compiled(specs_of(D128.config(), arch), arch)
    return arch


def test_first_use_compiles_and_the_next_process_loads(tmp_path: Path) -> None:
    needs_compiler()
    own = {"JITATTN_CACHE_DIR": str(tmp_path), "JITATTN_PRECOMPILED": None, "JITATTN_JIT": None}
    assert set(compute(COMPUTE, **own)["origins"]) == {"compiled"}
    assert list(tmp_path.rglob("*.cubin"))
    again = compute(COMPUTE, **own)
    assert set(again["origins"]) == {"disk"}


def test_a_process_that_only_decodes_leaves_the_prefill_kernel_too(tmp_path: Path) -> None:
    """It compiles in the background, and the process waits for it at its end."""
    needs_compiler()
    own = {"JITATTN_CACHE_DIR": str(tmp_path), "JITATTN_PRECOMPILED": None, "JITATTN_JIT": None}
    decode = "from tests.support.cases import D128; from tests.support.harness import check_case\n"
    compute(decode + "check_case(D128, 'cuda'); print('{}')", **own)
    assert set(compute(COMPUTE, **own)["origins"]) == {"disk"}


def test_a_bundle_needs_no_compiler(tmp_path: Path) -> None:
    bundle = os.environ.get("JITATTN_PRECOMPILED")
    if not bundle:
        arch, bundle = needs_compiler(), str(tmp_path / "bundle")
        jitattn.precompile([D128.config()], arch=arch, out=Path(bundle), progress=False)
    found = compute(
        BLOCK + COMPUTE,
        JITATTN_PRECOMPILED=os.pathsep.join(str(Path(p).absolute()) for p in bundle.split(":")),
        JITATTN_JIT="0",
        JITATTN_CACHE_DIR=str(tmp_path / "empty"),
    )
    assert set(found["origins"]) == {"precompiled"}
    assert found["compiler"] == []


def test_a_missing_kernel_names_the_command(tmp_path: Path) -> None:
    script = (
        "import jitattn\n"
        "try:\n"
        "    jitattn.AttentionPlanner(head_dim=112, page_size=77, device='cuda')\n"
        "except jitattn.KernelNotFoundError as error:\n"
        "    import json, sys\n"
        "    sys.stdout.write(json.dumps({'message': [str(error)]}))\n"
    )
    off = {"JITATTN_JIT": "0", "JITATTN_CACHE_DIR": str(tmp_path), "JITATTN_PRECOMPILED": None}
    (message,) = compute(script, **off)["message"]
    assert "jitattn precompile --arch" in message
    assert "page_size=77" in message
    assert "head_dim=112" in message
