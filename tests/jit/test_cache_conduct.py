"""How the cache behaves when processes race, die, hang, fork and clear under each other."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from jitattn.jit.cache import KernelCache
from tests.support.conduct import ARCH, COMPILER, FACTOR, environment, run, start

# A process that imports, says so, waits to be told, and builds two kernels with the real NVRTC.
REAL = """
import sys
from jitattn.jit import build
from jitattn.base import knobs
from tests.support.conduct import ARCH, SPECS, render_all
render_all()
print("ready", flush=True)
sys.stdin.readline()
found = [f"{kernel.symbol}:{kernel.origin}" for kernel in
         build.build_all(SPECS[:2], ARCH, knobs.load())]
sys.stdout.write(f"{' '.join(found)} {'torch' in sys.modules}\\n")
"""

FAKE = """
import sys
from pathlib import Path
from jitattn.jit import build
from jitattn.base import knobs
from tests.support import conduct
conduct.use_fake_compiler(Path(sys.argv[1]), float(sys.argv[2]))
conduct.render_all()
print("ready", flush=True)
sys.stdin.readline()
found = [build.build(spec, conduct.ARCH, knobs.load()).origin for spec in conduct.SPECS]
sys.stdout.write(" ".join(found) + "\\n")
"""


def together(children: list[subprocess.Popen[str]]) -> list[str]:
    """Let children that wait for it begin; return what each prints, if none fails or warns."""
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n", child.communicate()[1]
    results = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        out, err = child.communicate()
        # On a busy machine some wait long enough to say so.
        said = [line for line in err.splitlines() if not line.startswith("waiting for at most ")]
        assert (child.returncode, said) == (0, [])
        results.append(out.strip())
    return results


def forked(script: str, count: int) -> str:
    """A script that imports, and then is ``count`` processes that do the rest at once."""
    imports, ready, work = script.partition('print("ready", flush=True)\nsys.stdin.readline()\n')
    return f"""{imports}{ready}
import os
begun, begin = os.pipe()
if all(os.fork() for _ in range({count})):
    os.close(begin)
    sys.exit(any(os.wait()[1] for _ in range({count})))
os.close(begin)
os.read(begun, 1)  # ends when nobody has the other end
{work}"""


def leftovers(root: Path) -> list[str]:
    """Everything in a cache that is neither an entry, a division, a note nor an empty folder."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if (
            path.is_file()
            and path.name not in ("kernel.cubin", "kernel.cu", "meta.json")
            and path.parent.name != "notes"
        )
        or ".staging-" in path.name
    ]


# ---------------------------------------------------------------------------- many at once


def test_64_processes_on_a_cold_cache_compile_each_kernel_once(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    (printed,) = together([start(forked(REAL, 64), env=environment(root))])
    results = [line.split() for line in printed.splitlines()]
    assert {result[-1] for result in results} == {"False"}  # none has imported torch
    origins = Counter(name for result in results for name in result[:-1])
    compiled = {name: n for name, n in origins.items() if name.endswith(":compiled")}
    assert list(compiled.values()) == [1, 1]
    assert sum(origins.values()) == 2 * 64
    assert {name.partition(":")[2] for name in origins} == {"compiled", "disk"}
    kernels = KernelCache(root)
    assert len(kernels.entries()) == 2
    assert kernels.verify() == []
    assert leftovers(root) == []


@pytest.mark.parametrize("failure", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EIO"])
def test_a_folder_where_locks_fail(tmp_path: Path, failure: str) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    broken = (
        "import errno, fcntl, os\n"
        "def fail(*arguments):\n"
        f"    raise OSError(errno.{failure}, os.strerror(errno.{failure}))\n"
        "fcntl.flock = fail\n"
    )
    results = together([start(broken + FAKE, log, 0.2, env=environment(root)) for _ in range(6)])
    assert {origin for result in results for origin in result.split()} <= {"compiled", "disk"}
    # Nobody waited for JITATTN_LOCK_TIMEOUT: who does, warns, and ``together`` saw no warning.
    assert len(KernelCache(root).entries()) == 3
    assert KernelCache(root).verify() == []
    assert leftovers(root) == []


def test_a_system_without_flock(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, to take flock away from a process")
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(
        "#include <errno.h>\nint flock(int fd, int operation) { errno = ENOSYS; return -1; }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    root, log = tmp_path / "cache", tmp_path / "log"
    env = environment(root, LD_PRELOAD=str(library))
    results = together([start(FAKE, log, 0.2, env=env) for _ in range(4)])
    assert "compiled" in results[0] + results[1]
    # The shim works: without locks the kernels were compiled more than once.
    assert len(log.read_text().splitlines()) > 3
    assert KernelCache(root).verify() == []
    assert leftovers(root) == []


# A file system that refuses to remove anything, as a network file system does of what others have
# open.
BUSY = """
import errno, os
def busy(path, *arguments, **options):
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
os.rmdir = os.removedirs = os.unlink = os.remove = busy
"""


@pytest.mark.parametrize("count", [8, 32])
def test_c38_folders_that_are_busy(tmp_path: Path, count: int) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    (printed,) = together([start(forked(BUSY + FAKE, count), log, 0.05, env=environment(root))])
    origins = Counter(printed.split())
    assert set(origins) <= {"compiled", "disk"}
    assert sum(origins.values()) == 3 * count
    assert len(log.read_text().splitlines()) == origins["compiled"] == 3
    kernels = KernelCache(root)
    assert len(kernels.entries()) == 3
    assert kernels.verify() == []
    # What could not be removed is removed by who can.
    for left in root.rglob(".staging-*"):
        os.utime(left, (0, 0))
    kernels.prune(2**40)
    assert not list(root.rglob(".staging-*"))
    (again,) = together([start(FAKE, log, 0.0, env=environment(root))])
    assert again.split() == ["disk"] * 3


# Python falls back from TMPDIR to other folders; here there are none.
NO_TEMPORARY_FOLDER = """
import os, tempfile
tempfile._candidate_tempdir_list = lambda: [os.environ["TMPDIR"]]
"""


@pytest.mark.parametrize("folder", ["missing", "a file", "/proc"])
def test_c37_no_temporary_folder(tmp_path: Path, folder: str) -> None:
    """Nor a PATH: kernels are compiled in memory and staged beside their place in the cache."""
    (tmp_path / "a file").touch()
    root = tmp_path / "cache"
    env = environment(root, TMPDIR=str(tmp_path / folder), PATH="/nonexistent")
    origins = []
    for script in (REAL, REAL):
        (result,) = together([start(NO_TEMPORARY_FOLDER + script, env=env)])
        origins.append([name.partition(":")[2] for name in result.split()[:-1]])
    assert origins == [["compiled"] * 2, ["disk"] * 2]
    assert leftovers(root) == []


# ---------------------------------------------------------------------------- killed and stuck

KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
from jitattn.jit import build
from jitattn.base import knobs
from jitattn.jit.cache import KernelCache
from tests.support import conduct

root, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
conduct.use_fake_compiler(delay_s=0.005)
chance = random.Random(seed)
spec = conduct.SPECS[0]

def builder(folder):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            build.build(spec, conduct.ARCH, knobs.Knobs(cache_dir=folder, lock_timeout=5.0))
            status = 0
        finally:
            os._exit(status)
    return pid

started = time.monotonic()
os.waitpid(builder(root / "warm"), 0)
span = time.monotonic() - started
killed = damaged = 0
for number in range(rounds):
    folder = root / str(number)
    pid = builder(folder)
    time.sleep(chance.uniform(0.0, 1.2 * span))
    os.kill(pid, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    # Waiting for a lock in vain would be a warning, which the test forbids.
    assert os.waitstatus_to_exitcode(os.waitpid(builder(folder), 0)[1]) == 0, number
    damaged += len(KernelCache(folder).verify())
    assert len(KernelCache(folder).entries()) == 1
    # What the killed one left is swept when it is old, by the next who stores.
    for left in folder.rglob(".staging-*"):
        os.utime(left, (0, 0))
    division = KernelCache(folder).division(conduct.COMPILER)
    division.put("sm_90a-x-" + "0" * 32, b"x", "x", {"compiler": conduct.COMPILER})
    KernelCache(folder).prune(2**40)
    assert not list(folder.rglob(".staging-*"))
print(json.dumps({"killed": killed, "damaged": damaged}))
"""


def test_a_killed_builder_harms_nobody(tmp_path: Path) -> None:
    rounds = 50 * FACTOR
    result = json.loads(run(KILLS, tmp_path, rounds, 1, env=environment()))
    assert result["damaged"] == 0
    assert result["killed"] >= rounds // 4  # the others had finished


def test_a_builder_killed_while_nvrtc_runs(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    child = start(REAL, env=environment(root))
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    while not list(root.rglob("locks/*.lock")):
        time.sleep(0.005)
    child.kill()
    child.communicate()
    assert list(root.rglob("locks/*.lock"))  # left behind, and of no effect
    (result,) = together([start(REAL, env=environment(root))])
    assert result.count("compiled") == 2
    assert leftovers(root) == []


def test_a_stuck_builder_is_named_and_passed_by(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    stuck = start(FAKE, log, 1.0, env=environment(root))
    assert stuck.stdin is not None
    stuck.stdin.write("go\n")
    stuck.stdin.flush()
    while not [p for p in root.rglob("locks/*.owner") if p.read_text()]:
        time.sleep(0.005)
    stuck.send_signal(signal.SIGSTOP)
    (lock,) = root.rglob("locks/*.lock")
    passing = start(FAKE, log, 0.0, env=environment(root, JITATTN_LOCK_TIMEOUT="0.3"))
    out, err = passing.communicate("go\n")
    assert passing.returncode == 0
    assert out.split() == ["ready", "compiled", "compiled", "compiled"]
    assert err.count("RuntimeWarning") == 1
    assert f"on the lock {lock}, held by pid {stuck.pid} on {os.uname().nodename}" in err
    stuck.send_signal(signal.SIGCONT)
    assert stuck.communicate()[0].split() == ["ready", "compiled", "disk", "disk"]
    assert KernelCache(root).verify() == []
    assert leftovers(root) == []


def test_lock_files_and_staging_of_the_past_do_not_matter(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    division = KernelCache(root).division(COMPILER)
    division.create()
    names = json.loads(run(NAMES, env=environment(root)))
    (division.root / "locks").mkdir()
    for number, name in enumerate(names):
        lock = division.root / "locks" / f"{name}.lock"
        lock.write_text("pid 1 on elsewhere" if number else "")
        os.utime(lock, (0, 0))
    half = division.root / ".staging-half"
    half.mkdir()
    (half / "kernel.cubin").write_bytes(b"\x7fELF")
    os.utime(half, (0, 0))
    recent = division.root / ".staging-recent"
    recent.mkdir()
    assert KernelCache(root).entries() == []
    (result,) = together([start(FAKE, log, 0.0, env=environment(root))])
    assert result.split() == ["compiled"] * 3
    assert not half.exists()
    assert recent.exists()  # perhaps somebody is writing to it
    assert not list(root.rglob("locks/*"))


NAMES = """
import json
from jitattn.jit import build
from tests.support.conduct import ARCH, SPECS
print(json.dumps([build.Target(spec, ARCH, False).render()[0] for spec in SPECS]))
"""


# ---------------------------------------------------------------------------- fork

OUTLIVED = """
import os, signal, sys, time
from pathlib import Path
from jitattn.jit.cache import KernelCache
cache, name = KernelCache(Path(sys.argv[1])), "sm_90a-k-" + "0" * 32
reader, writer = os.pipe()
parent = os.fork()
if parent == 0:
    with cache.locked(name, 1.0) as held:
        assert held
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        os.write(writer, str(child).encode())
        time.sleep(1000)
child = int(os.read(reader, 20))
with cache.locked(name, 0.0) as held:
    pass
print(held)
os.kill(parent, signal.SIGKILL)
os.waitpid(parent, 0)
with cache.locked(name, 0.0) as held:
    print(held)
os.kill(child, signal.SIGKILL)
"""

LEAVING = """
import os, sys
from pathlib import Path
from jitattn.jit.cache import KernelCache
cache, name = KernelCache(Path(sys.argv[1])), "sm_90a-k-" + "0" * 32
with cache.locked(name, 1.0):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        other = os.fork()
        if other == 0:
            with cache.locked(name, 0.0) as held:
                os._exit(held)
        print(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
if child:
    with cache.locked(name, 0.0) as held:
        print(held)
"""


def test_a_child_does_not_keep_its_dead_parents_lock(tmp_path: Path) -> None:
    child = start(OUTLIVED, tmp_path / "cache", env=environment())
    out, err = child.communicate()
    assert out.split() == ["False", "True"]
    assert err.count("RuntimeWarning") == 1


def test_a_child_does_not_release_its_parents_lock(tmp_path: Path) -> None:
    child = start(LEAVING, tmp_path / "cache", env=environment())
    assert child.communicate()[0].split() == ["0", "True"]


AFTER_FORK = """
import os, sys
from jitattn.jit import build
from jitattn.base import knobs
from tests.support import conduct
conduct.use_fake_compiler()
if sys.argv[1] == "after use":
    build.build(conduct.SPECS[0], conduct.ARCH, knobs.load())
child = os.fork()
origins = [k.origin for k in build.build_all(conduct.SPECS, conduct.ARCH, knobs.load())]
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *sorted(set(origins)))
"""


@pytest.mark.parametrize("when", ["after import", "after use"])
def test_parent_and_child_both_build(tmp_path: Path, when: str) -> None:
    out = run(AFTER_FORK, when, env=environment(tmp_path / "cache")).split()
    assert out[0] == "0"
    assert set(out[1:]) <= {"compiled", "disk", "memory"}
    assert leftovers(tmp_path / "cache") == []


# ---------------------------------------------------------------------------- clearing under use

CLEARING = """
import os, sys, time
from pathlib import Path
from jitattn.jit import build, nvrtc
from jitattn.base import knobs
from jitattn.jit.cache import KernelCache
from jitattn.jit.render import render
from tests.support import conduct

root, what, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
conduct.use_fake_compiler()
expected = {
    spec: conduct.fake_cubin(render(spec, conduct.ARCH), nvrtc.options(conduct.ARCH))
    for spec in conduct.SPECS
}

def use():
    settings = knobs.Knobs(cache_dir=root)
    for _ in range(rounds):
        build.forget()
        for kernel in build.build_all(conduct.SPECS, conduct.ARCH, settings):
            assert kernel.cubin == expected[kernel.spec]

def child():
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            use()
            status = 0
        finally:
            os._exit(status)
    return pid

waiting = {child() for _ in range(3)}
times = 0
while waiting:
    if what == "prune":
        KernelCache(root).prune(0)
    elif what == "clear":
        KernelCache(root).clear()
    else:
        import shutil
        shutil.rmtree(root, ignore_errors=True)
    times += 1
    time.sleep(0.002)
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        waiting.remove(pid)
        assert status == 0, status
build.build_all(conduct.SPECS, conduct.ARCH, knobs.Knobs(cache_dir=root))
assert KernelCache(root).verify() == []
print(times)
"""


@pytest.mark.parametrize("what", ["prune", "clear"])
def test_others_may_prune_and_clear_meanwhile(tmp_path: Path, what: str) -> None:
    times = run(CLEARING, tmp_path / "cache", what, 20 * FACTOR, env=environment())
    assert int(times) > 10


def test_others_may_remove_the_whole_folder_meanwhile(tmp_path: Path) -> None:
    # Then a kernel may have to stay in memory, which is worth a warning and no failure.
    child = start(CLEARING, tmp_path / "cache", "remove", 20 * FACTOR, env=environment())
    _, err = child.communicate()
    assert child.returncode == 0, err
    assert "Traceback" not in err


# ---------------------------------------------------------------------------- network file systems

NAME = "sm_90a-k-" + "0" * 32


def test_a_file_system_that_notices_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelCache(tmp_path / "cache")
    kernels.put(NAME, b"theirs", "source", {})
    until = time.monotonic() + 0.3
    lstat = Path.lstat

    def late(self: Path) -> os.stat_result:
        if self.name == NAME and time.monotonic() < until:
            raise FileNotFoundError(errno.ENOENT, "not yet", str(self))
        return lstat(self)

    monkeypatch.setattr(Path, "lstat", late)
    assert kernels.get(NAME) is None
    kernels.put(NAME, b"ours", "source", {})
    stored = kernels.get(NAME)
    assert stored is not None
    assert stored.cubin == b"theirs"
    assert leftovers(kernels.root) == []


@pytest.mark.parametrize("failure", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
            raise OSError(failure, os.strerror(failure))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    kernels = KernelCache(tmp_path / "cache")
    kernels.put(NAME, b"cubin", "source", {})
    assert kernels.get(NAME) is not None


def test_a_file_system_that_loses_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelCache(tmp_path / "cache")
    kernels.put(NAME, b"cubin", "source", {})

    def stale(*arguments: object) -> int:
        raise OSError(errno.ESTALE, "stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("jitattn.jit.cache.read_file", stale)
        patch.setattr("jitattn.jit.cache.read_object", stale)
        assert kernels.get(NAME) is None
    kernels.put(NAME, b"cubin", "source", {})
    assert kernels.get(NAME) is not None


# ---------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("years", [-60, -1, 1, 80])
def test_clocks_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int) -> None:
    kernels = KernelCache(tmp_path / "cache")
    kernels.put(NAME, b"cubin", "source", {})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + years * 365.25 * 86400)
    assert kernels.get(NAME) is not None
    (entry,) = kernels.entries()
    assert entry.age_s >= 0
    assert entry.idle_s >= 0
    with (
        kernels.locked(NAME, 0.05),
        pytest.warns(RuntimeWarning, match="gave up after"),
        kernels.locked(NAME, 0.05) as held,
    ):
        assert not held
    kernels.put(NAME, b"cubin", "source", {})
    assert kernels.prune(0)
    assert kernels.get(NAME) is None


@pytest.mark.parametrize("stamp", [0, 2**31 + 1])
def test_times_of_files_do_not_matter(tmp_path: Path, stamp: int) -> None:
    kernels = KernelCache(tmp_path / "cache")
    kernels.put(NAME, b"cubin", "source", {})
    for path in (*kernels.root.rglob("*"), kernels.root):
        os.utime(path, (stamp, stamp))
    assert kernels.get(NAME) is not None
    assert kernels.verify() == []
    assert len(kernels.entries()) == 1
    assert kernels.entries()[0].arch == ARCH
