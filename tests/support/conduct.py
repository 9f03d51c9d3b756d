"""Builders for the tests of the cache's conduct: processes whose compiler takes no time.

The real pipeline renders, looks up, locks and stores; only NVRTC is replaced, so that thousands of
builds, kills and faults take seconds. Importing this module replaces nothing; ``use_fake_compiler``
does, in a process that a test started or under its monkeypatch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from jitattn.jit import cubin, nvrtc
from jitattn.jit.cubin import Resources
from jitattn.jit.render import render
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import KernelSpec

REPOSITORY = Path(__file__).parents[2]
COMPILER = "V13.5.37 CL-1"
ARCH = "sm_90a"

# Multiplies the rounds of the random tests: CONDUCT_FACTOR=20 pytest tests/jit/test_cache_conduct*
FACTOR = int(os.environ.get("CONDUCT_FACTOR", "1"))
# Where they begin.
SEED = int(os.environ.get("CONDUCT_SEED", "3"))


def tell(name: str, **counts: int) -> None:
    """Append what a random test tried and found to the file that CONDUCT_REPORT names, if any."""
    if path := os.environ.get("CONDUCT_REPORT"):
        numbers = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        with Path(path).open("a") as file:
            file.write(f"{name}: {numbers}; seed {SEED}\n")


def _some_specs() -> tuple[KernelSpec, ...]:
    small = specs_of(PlannerConfig.parse("head_dim=16,num_qo_heads=8,num_kv_heads=8"), ARCH)
    other = specs_of(PlannerConfig.parse("head_dim=32,num_qo_heads=8,num_kv_heads=8"), ARCH)
    schedule = next(spec for spec in small if isinstance(spec, ScheduleSpec))
    return schedule, small[0], other[0]


SPECS = _some_specs()


def render_all() -> None:
    """Read the templates of ``SPECS``, which takes longer than what then races."""
    for spec in SPECS:
        render(spec, ARCH)


def fake_cubin(source: str, options: tuple[str, ...], compiler: str = COMPILER) -> bytes:
    """What the fake compiler makes: another thing for each source, option and compiler."""
    seed = hashlib.sha256("\0".join((compiler, *options, source)).encode()).digest()
    return b"\x7fELF" + seed * 100


class FakeCompiler:
    """Stands in for ``nvrtc.compile_cubin``; counts its calls in a file when given one."""

    def __init__(self, log: Path | None = None, delay_s: float = 0.0) -> None:
        self.log = log
        self.delay_s = delay_s
        self.name = COMPILER

    def __call__(
        self, source: str, *, name: str, headers: Mapping[str, str], options: tuple[str, ...]
    ) -> nvrtc.Compiled:
        time.sleep(self.delay_s)
        if self.log is not None:
            with self.log.open("a") as file:  # short appends are whole
                file.write(f"{name}\n")
        return nvrtc.Compiled(fake_cubin(source, tuple(options), self.name), "")


def fake_resources(code: bytes, symbol: str, arch: str) -> Resources:
    return Resources(registers=8, spill_bytes=0, smem_bytes=0, code_bytes=len(code))


def use_fake_compiler(log: Path | None = None, delay_s: float = 0.0) -> FakeCompiler:
    """Replace NVRTC in this process, for good."""
    fake = FakeCompiler(log, delay_s)
    nvrtc.compile_cubin = fake  # type: ignore[assignment]
    cubin.resources_of = fake_resources
    nvrtc.toolchain = lambda: fake.name  # type: ignore[assignment]
    nvrtc.search_digest = lambda: "fake"
    nvrtc.loaded_libraries = lambda: ()
    return fake


def environment(cache: Path | None = None, **variables: str) -> dict[str, str]:
    """The environment of a child: this repository, and the cache ``cache``."""
    found = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    if cache is not None:
        found["JITATTN_CACHE_DIR"] = str(cache)
    return found


def start(script: str, *arguments: object, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a Python process that runs ``script``."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, *arguments: object, env: Mapping[str, str]) -> str:
    """Run ``script`` in a Python process and return what it prints; it must not fail or warn."""
    out, err = start(script, *arguments, env=env).communicate()
    assert err == "", err
    return out
