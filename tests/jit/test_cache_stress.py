"""Caches and builds under random deaths, signals, forks, evictions and two versions at once.

Rounds are few here; ``CONDUCT_FACTOR`` multiplies them, ``CONDUCT_SEED`` says where they begin, and
``CONDUCT_REPORT`` names a file that gets the counts.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from jitattn.base.knobs import Knobs
from jitattn.jit import build
from jitattn.jit.cache import KernelCache
from tests.support import conduct
from tests.support.conduct import ARCH, FACTOR, SEED, environment, run

# Kills builders while NVRTC is at work: a byte of shared memory says whether it is.
KILLS = """
import json, mmap, os, random, signal, sys, time
from pathlib import Path
from jitattn.base import knobs
from jitattn.jit import build, nvrtc
from jitattn.jit.cache import KernelCache
from tests.support import conduct

root, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance, state = random.Random(seed), mmap.mmap(-1, 1)
real = nvrtc.compile_cubin

def compile_cubin(*arguments, **options):
    state[0] = 1
    compiled = real(*arguments, **options)
    state[0] = 2
    return compiled

nvrtc.compile_cubin = compile_cubin

def builder(folder):
    state[0] = 0
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            settings = knobs.Knobs(cache_dir=folder, lock_timeout=60.0)
            build.build(conduct.SPECS[0], conduct.ARCH, settings)
            status = 0
        finally:
            os._exit(status)
    return pid

def wait_for_state(pid):
    while state[0] == 0:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.0005)
    return time.monotonic()

pid = builder(root / "warm")
started = wait_for_state(pid)
while state[0] == 1:
    time.sleep(0.0005)
span = time.monotonic() - started
assert os.waitpid(pid, 0)[1] == 0
compiling = damaged = failed = 0
for number in range(rounds):
    folder = root / str(number)
    pid = builder(folder)
    wait_for_state(pid)
    time.sleep(chance.uniform(0.0, 0.9 * span))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    compiling += state[0] == 1
    damaged += len(KernelCache(folder).verify())
    failed += os.waitpid(builder(folder), 0)[1] != 0
    damaged += len(KernelCache(folder).verify())
    failed += len(KernelCache(folder).entries()) != 1
print(json.dumps(
    {"tried": rounds, "killed_while_compiling": compiling, "damaged": damaged, "failed": failed}
))
"""


def test_builders_killed_while_they_compile(tmp_path: Path) -> None:
    counts = json.loads(run(KILLS, tmp_path, 3 * FACTOR, SEED, env=environment()))
    assert counts["damaged"] == counts["failed"] == 0
    assert counts["killed_while_compiling"] > 0
    conduct.tell("builders killed while NVRTC ran", **counts)


# Interrupts a process that builds without end; whatever it was at, it ends and leaves no harm.
INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from jitattn.base import knobs
from jitattn.jit import build
from tests.support import conduct
conduct.use_fake_compiler(delay_s=0.01)
print("ready", flush=True)
settings = knobs.Knobs(cache_dir=Path(sys.argv[1]))
try:
    while True:
        build.forget()
        build.build_all(conduct.SPECS, conduct.ARCH, settings)
        for path in Path(sys.argv[1]).rglob("kernel.cubin"):
            path.unlink()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
SIGNALS = """
import json, random, signal, subprocess, sys, time
from pathlib import Path
from jitattn.base import knobs
from jitattn.jit import build
from tests.support import conduct
conduct.use_fake_compiler()
root, rounds, seed, script = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
chance = random.Random(seed)
failed = damaged = 0
for number in range(rounds):
    folder = root / str(number)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:
        assert process.stdout.readline() == "ready\\n"
        time.sleep(chance.uniform(0.0, 0.2))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        failed += (process.returncode, out) != (0, "interrupted\\n")
    build.forget()
    kernels = build.build_all(conduct.SPECS, conduct.ARCH, knobs.Knobs(cache_dir=folder))
    failed += len(kernels) != len(conduct.SPECS)
    from jitattn.jit.cache import KernelCache
    damaged += len(KernelCache(folder).verify())
print(json.dumps({"tried": rounds, "damaged": damaged, "failed": failed}))
"""


def test_interruptions_at_random_moments(tmp_path: Path) -> None:
    counts = json.loads(run(SIGNALS, tmp_path, 4 * FACTOR, SEED, INTERRUPTED, env=environment()))
    assert counts["damaged"] == counts["failed"] == 0
    conduct.tell("SIGINT at random moments", **counts)


# Two versions of jitattn, whose templates differ, on one cache; one of the readers evicts.
VERSIONS = """
import json, os, random, sys, time
from pathlib import Path
from jitattn.base import knobs
from jitattn.jit import build, nvrtc, render
from jitattn.jit.cache import KernelCache
from tests.support import conduct

root, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
conduct.use_fake_compiler()
real_render, real_inputs = render.render, build.inputs

def use(version, evicts):
    if version:
        render.render = lambda spec, arch: real_render(spec, arch) + f"// version {version}\\n"
        build.inputs = lambda spec, arch: {**real_inputs(spec, arch), "version": b"2"}
        build.__version__ = f"{version}"
    expected = {
        spec: conduct.fake_cubin(render.render(spec, conduct.ARCH), nvrtc.options(conduct.ARCH))
        for spec in conduct.SPECS
    }
    chance = random.Random(f"{seed} {version} {evicts}")
    settings = knobs.Knobs(cache_dir=root)
    for _ in range(rounds):
        build.forget()
        for kernel in build.build_all(conduct.SPECS, conduct.ARCH, settings):
            assert kernel.cubin == expected[kernel.spec]
        if evicts:
            KernelCache(root).prune(chance.choice((0, 3000, 10_000, 2**30)))

children = []
for version in (0, 2):
    for evicts in (False, True):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                use(version, evicts)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
damaged = len(KernelCache(root).verify())
print(json.dumps({"tried": 4 * rounds, "damaged": damaged, "failed": failed}))
"""


def test_two_versions_share_a_cache_that_is_evicted_meanwhile(tmp_path: Path) -> None:
    counts = json.loads(run(VERSIONS, tmp_path / "cache", 8 * FACTOR, SEED, env=environment()))
    assert counts["damaged"] == counts["failed"] == 0
    conduct.tell("rounds of two versions beside evictions", **counts)


# Forks at random moments before, during and after compilations in other threads; the children
# compile, too.
FORKS = """
import json, os, random, sys, threading, time, warnings
from pathlib import Path
from jitattn.base import knobs
from jitattn.jit import build
from tests.support import conduct
warnings.simplefilter("ignore")
root, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
failed = during = 0
for number in range(rounds):
    build.forget()
    work = threading.Thread(
        target=build.build,
        args=(conduct.SPECS[0], conduct.ARCH, knobs.Knobs(cache_dir=root / f"parent {number}")),
    )
    when = number % 3
    if when:
        work.start()
    if when == 1:
        time.sleep(chance.uniform(0.0, 0.3))
    if when == 2:
        work.join()
    during += work.is_alive()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            build.forget()
            settings = knobs.Knobs(cache_dir=root / f"child {number}", lock_timeout=20.0)
            build.build(conduct.SPECS[0], conduct.ARCH, settings)
            status = 0
        finally:
            os._exit(status)
    if not when:
        work.start()
    failed += os.waitpid(pid, 0)[1] != 0
    work.join(60)
    failed += work.is_alive()
print(json.dumps({"tried": rounds, "while_compiling": during, "failed": failed}))
"""


def test_forks_before_while_and_after_others_compile(tmp_path: Path) -> None:
    counts = json.loads(run(FORKS, tmp_path, 3 * FACTOR, SEED, env=environment()))
    assert counts["failed"] == 0
    conduct.tell("forks", **counts)


# Leaves while builds are in the background.
LEAVES = """
import random, sys, time
from pathlib import Path
from jitattn.base import knobs
from jitattn.jit import build
from tests.support import conduct
conduct.use_fake_compiler(delay_s=0.05)
build.start(conduct.SPECS, conduct.ARCH, knobs.Knobs(cache_dir=Path(sys.argv[1])))
time.sleep(random.Random(sys.argv[2]).uniform(0.0, 0.1))
if sys.argv[3] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_the_interpreter_ends_with_builds_in_the_background(tmp_path: Path, ending: str) -> None:
    for number in range(FACTOR):
        folder = tmp_path / str(number)
        child = conduct.start(LEAVES, folder, f"{SEED} {number}", ending, env=environment())
        assert child.communicate(timeout=60) == ("", "")
        assert child.returncode == (3 if ending == "raises" else 0)
        assert KernelCache(folder).verify() == []
        assert len(KernelCache(folder).entries()) == len(conduct.SPECS)  # what was begun is done
    conduct.tell(
        f"interpreters that {ending} with builds in the background", tried=FACTOR, failed=0
    )


def _build_in_a_spawned_process(folder: Path) -> str:
    conduct.use_fake_compiler()
    return build.build(conduct.SPECS[0], ARCH, Knobs(cache_dir=folder)).origin


def test_spawned_processes_build(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        origins = pool.map(_build_in_a_spawned_process, [tmp_path / "cache"] * 4)
    assert sorted(set(origins)) in (["compiled", "disk", "memory"], ["compiled", "memory"])
    assert origins.count("compiled") == 1
    assert KernelCache(tmp_path / "cache").verify() == []
