"""The same spec gives the same cubin, wherever and whenever it is compiled."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.spec.family import KernelSpec
from tests.support.compiler import compile_afresh
from tests.support.sample_specs import sample_specs
from tests.support.warpgroups import warpgroup_specs

SPECS: tuple[KernelSpec, ...] = (
    *sample_specs("sm_90a")[3:60:28],
    warpgroup_specs()[0],
    ScheduleSpec(),
)
ROOT = Path(__file__).parents[2]


def cubin_digest(spec: KernelSpec, arch: str) -> str:
    return hashlib.sha256(compile_afresh(spec, arch).cubin).hexdigest()


@functools.cache
def first_digest(spec: KernelSpec) -> str:
    """The digest of this process's first cubin, with which all others are compared."""
    return cubin_digest(spec, "sm_90a")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.symbol)
def test_twice_in_one_process(spec: KernelSpec) -> None:
    first = first_digest(spec)
    assert cubin_digest(spec, "sm_90a") == first


def test_in_another_process_folder_and_environment(tmp_path: Path) -> None:
    script = (
        "from tests.compile.test_reproducible import SPECS, cubin_digest\n"
        "import sys\n"
        "sys.stdout.write(' '.join(cubin_digest(spec, 'sm_90a') for spec in SPECS))\n"
    )
    environ = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONHASHSEED="7", TZ="Asia/Tokyo")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [first_digest(spec) for spec in SPECS]


def test_architectures_differ() -> None:
    spec = SPECS[0]
    others = {cubin_digest(spec, arch) for arch in ("sm_80", "sm_120f")}
    assert len({first_digest(spec), *others}) == 3
