"""The kernel cache: whole entries, trust, locks, listing and pruning. No CUDA, no compiler."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitattn.base.errors import CacheError
from jitattn.jit import cache
from jitattn.jit.cache import KernelCache

REPOSITORY = Path(__file__).parents[2]
META = {"arch": "sm_90a", "symbol": "k", "compiler": "V13.5.37 CL-1", "options": ["-a", "-b"]}


def name_of(symbol: str = "k", source: bytes = b"source") -> str:
    return cache.entry_name("sm_90a", symbol, {"source": source})


NAME = name_of()


def put(kernels: KernelCache, name: str = NAME, cubin: bytes = b"cubin") -> Path:
    made_by = {} if kernels.parent is None else {"compiler": kernels.root.name}
    kernels.put(name, cubin, "source", META | made_by)
    return kernels.root / name


@pytest.fixture
def kernels(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


@pytest.fixture
def umask_077() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---------------------------------------------------------------------------- names


@given(st.dictionaries(st.text(), st.binary()), st.dictionaries(st.text(), st.binary()))
def test_digests_are_equal_only_for_equal_fields(a: dict[str, bytes], b: dict[str, bytes]) -> None:
    assert (cache.digest(a) == cache.digest(b)) == (a == b)


def test_digest_separates_labels_from_payloads_and_ignores_order() -> None:
    assert cache.digest({"a": b"bc"}) != cache.digest({"ab": b"c"})
    assert cache.digest({"format": b"1"}) != cache.digest({})
    assert cache.digest({"a": b"1", "b": b"2"}) == cache.digest({"b": b"2", "a": b"1"})


def test_the_name_covers_architecture_symbol_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    archs = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100f", "sm_120f")
    names = [cache.entry_name(arch, "k", {"source": b"s"}) for arch in archs]
    assert len({name.rpartition("-")[2] for name in names}) == len(archs)
    assert names[4].startswith("sm_90a-k-")
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert cache.entry_name("sm_80", "k", {"source": b"s"}) != names[0]


# ---------------------------------------------------------------------------- entries


def test_what_is_put_is_got(kernels: KernelCache) -> None:
    assert kernels.get(NAME) is None
    path = put(kernels)
    stored = kernels.get(NAME)
    assert stored is not None
    assert (stored.cubin, stored.source) == (b"cubin", "source")
    assert {key: stored.meta[key] for key in META} == META
    assert {file.name for file in path.iterdir()} == {"kernel.cubin", "kernel.cu", "meta.json"}


def test_an_entry_depends_on_nothing_but_what_is_put(tmp_path: Path) -> None:
    first, second = put(KernelCache(tmp_path / "a")), put(KernelCache(tmp_path / "b"))
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_a_cache_may_move(kernels: KernelCache, tmp_path: Path) -> None:
    put(kernels)
    shutil.move(kernels.root, tmp_path / "moved")
    assert KernelCache(tmp_path / "moved").get(NAME) is not None


def damage_cubin(path: Path) -> None:
    (path / "kernel.cubin").write_bytes(b"cubiN")


def truncate_cubin(path: Path) -> None:
    os.truncate(path / "kernel.cubin", 2)


def remove_cubin(path: Path) -> None:
    (path / "kernel.cubin").unlink()


def remove_meta(path: Path) -> None:
    (path / "meta.json").unlink()


def empty_meta(path: Path) -> None:
    (path / "meta.json").write_bytes(b"")


def list_meta(path: Path) -> None:
    (path / "meta.json").write_text("[]")


def binary_meta(path: Path) -> None:
    (path / "meta.json").write_bytes(b"\xff\xfe")


def edit_meta(path: Path) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"registers": 1}))


def damage_source(path: Path) -> None:
    (path / "kernel.cu").write_text("other")


def foreign_entry(path: Path) -> None:
    other = put(KernelCache(path.parent), name_of("other"), b"other")
    shutil.rmtree(path)
    shutil.copytree(other, path)
    shutil.rmtree(other)


def become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


def become_a_link(path: Path) -> None:
    moved = path.parent / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)


def let_others_write(path: Path) -> None:
    path.chmod(0o777)


def let_others_write_the_cubin(path: Path) -> None:
    (path / "kernel.cubin").chmod(0o666)


DAMAGE = [
    damage_cubin,
    truncate_cubin,
    remove_cubin,
    remove_meta,
    empty_meta,
    list_meta,
    binary_meta,
    edit_meta,
    damage_source,
    foreign_entry,
    become_a_file,
    become_a_link,
    let_others_write,
    let_others_write_the_cubin,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_a_miss_and_heals(kernels: KernelCache, damage: object) -> None:
    path = put(kernels)
    assert callable(damage)
    damage(path)
    assert kernels.get(NAME) is None
    if path.is_dir() and not path.is_symlink():
        (damaged,) = kernels.verify()
        assert damaged.damage
        assert damaged.path == path
    put(kernels)
    assert kernels.get(NAME) is not None
    assert not kernels.verify()
    assert not list(kernels.root.glob(".staging-*"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "unsafe"])
def test_what_is_no_file_is_neither_waited_for_nor_kept_open(
    kernels: KernelCache, kind: str
) -> None:
    path = put(kernels) / "kernel.cubin"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o644)
    else:
        path.touch()
        path.chmod(0o666)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert kernels.get(NAME) is None
    assert kernels.verify()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_intact_entry_is_kept(kernels: KernelCache) -> None:
    put(kernels, cubin=b"first")
    put(kernels, cubin=b"second")
    stored = kernels.get(NAME)
    assert stored is not None
    assert stored.cubin == b"first"


@pytest.mark.usefixtures("umask_077")
def test_others_can_read_a_bundle_whatever_the_umask(tmp_path: Path) -> None:
    bundle = KernelCache(tmp_path / "new" / "bundle", mode=0o755)
    path = put(bundle)
    bundle.write_manifest()
    for folder in (bundle.root.parent, bundle.root, path):
        assert mode_of(folder) == 0o755
    for file in (*path.iterdir(), bundle.root / "bundle.json"):
        assert mode_of(file) == 0o644


def test_the_users_cache_is_private(kernels: KernelCache) -> None:
    before = os.umask(0)
    try:
        put(kernels.division("V1 CL-1"))
    finally:
        os.umask(before)
    assert mode_of(kernels.root) == 0o700


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    put(KernelCache(tmp_path, mode=0o755))
    assert mode_of(tmp_path) == 0o750


def _store(root: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    kernels = KernelCache(Path(root))
    for n in range(10):
        name = name_of(source=str(n).encode())
        kernels.put(name, b"cubin" * 1000, "source", META)
        assert kernels.get(name) is not None


def test_writers_may_race(kernels: KernelCache) -> None:
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(6)
    racers = [context.Process(target=_store, args=(str(kernels.root), barrier)) for _ in range(6)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0] * 6
    assert len(kernels.entries()) == 10
    assert len(list(kernels.root.iterdir())) == 10  # nothing is left of staging
    assert not kernels.verify()


def test_a_failing_write_leaves_nothing(
    kernels: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        put(kernels)
    assert not list(kernels.root.iterdir())


def test_every_file_and_folder_is_synced_before_the_rename(
    kernels: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def spy_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def spy_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "rename", spy_rename)
    put(kernels)
    at = events.index("rename")
    assert {"kernel.cubin", "kernel.cu", "meta.json"} <= set(events[:at])
    assert events[at - 1].startswith(".staging-")
    assert events[at + 1 :] == [kernels.root.name]


# ---------------------------------------------------------------------------- trust


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722, 0o777])
def test_a_cache_that_others_may_write_to_is_refused(kernels: KernelCache, mode: int) -> None:
    put(kernels)
    kernels.root.chmod(mode)
    for use in (lambda: kernels.get(NAME), lambda: put(kernels), kernels.entries, kernels.verify):
        with pytest.raises(CacheError, match=r"writable by group or others.*chmod go-w"):
            use()
    with pytest.raises(CacheError):
        kernels.division("V1").get(NAME)


def test_a_cache_of_another_user_is_refused(
    kernels: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(kernels)
    if os.geteuid() == 0:
        os.chown(kernels.root, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CacheError, match="owned by user"):
        kernels.get(NAME)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of root")
def test_a_cache_of_root_is_trusted(kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    put(kernels)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert kernels.get(NAME) is not None


def test_a_file_in_place_of_the_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="file is not a folder"):
        KernelCache(tmp_path / "file").get(NAME)


def test_missing_or_unreachable_caches_are_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "missing", tmp_path / "file" / "below"):
        assert KernelCache(root).get(NAME) is None
        assert KernelCache(root).entries() == []
        assert KernelCache(root).divisions() == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            KernelCache(root).recall("key")
    assert not (tmp_path / "missing").exists()


# ---------------------------------------------------------------------------- divisions, notes


def test_divisions_are_separate_and_listed_newest_first(kernels: KernelCache) -> None:
    for compiler in ("V13.0.88 CL-2", "V13.5.37 CL-1", "V12.9.1 CL/3"):
        put(kernels.division(compiler), name_of(compiler[:3].replace("V", "v")))
    names = [division.root.name for division in kernels.divisions()]
    assert names == ["V13.5.37-CL-1", "V13.0.88-CL-2", "V12.9.1-CL-3"]
    assert kernels.division("V13.0.88 CL-2").get(name_of("v12")) is None
    assert len(kernels.entries()) == 3


def test_notes_are_recalled_or_forgotten(kernels: KernelCache) -> None:
    assert kernels.recall("key") is None
    kernels.remember("key", "note")
    kernels.remember("key", "newer")
    assert kernels.recall("key") == "newer"
    kernels.clear()
    assert kernels.recall("key") is None


def test_an_unwritable_cache_forgets_silently() -> None:
    KernelCache(Path("/proc/jitattn")).remember("key", "note")


def test_the_manifest_says_what_made_the_entries(kernels: KernelCache) -> None:
    put(kernels)
    remove_meta(put(kernels, name_of("damaged")))
    kernels.write_manifest()
    assert json.loads((kernels.root / "bundle.json").read_text()) == {
        "format": cache.FORMAT,
        "architectures": ["sm_90a"],
        "compilers": ["V13.5.37 CL-1"],
        "outside_headers": [],
    }


# ---------------------------------------------------------------------------- housekeeping


def test_entries_say_what_they_are(kernels: KernelCache) -> None:
    path = put(kernels.division("V13.5.37-CL-1"))
    (entry,) = kernels.entries()
    assert (entry.name, entry.path, entry.arch, entry.symbol) == (NAME, path, "sm_90a", "k")
    assert entry.compiler == "V13.5.37-CL-1"
    assert entry.size_bytes == sum(file.stat().st_size for file in path.iterdir())
    assert 0 <= entry.age_s < 3600


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path / "kernel.cubin", (then, then))


def test_prune_removes_what_is_idle_for_longest(kernels: KernelCache) -> None:
    names = [name_of(symbol) for symbol in ("a", "b", "c")]
    for seconds, name in zip((30, 20, 10), names, strict=True):
        age(put(kernels.division("V1"), name), seconds)
    size = kernels.entries()[0].size_bytes
    assert kernels.prune(3 * size) == []
    assert [entry.name for entry in kernels.prune(2 * size)] == names[:1]
    assert [entry.name for entry in kernels.prune(0)] == names[1:]
    assert kernels.entries() == []


def test_prune_sweeps_what_killed_writers_left(kernels: KernelCache) -> None:
    put(kernels)
    old, new = kernels.root / ".staging-old", kernels.root / ".staging-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, 0))
    kernels.prune(2**40)
    assert not old.exists()
    assert new.exists()
    assert kernels.get(NAME) is not None


def test_clear_removes_ours_and_nothing_else(kernels: KernelCache) -> None:
    put(kernels)
    put(kernels.division("V13.5 CL-1"))
    kernels.remember("key", "note")
    kernels.write_manifest()
    with kernels.division("V13.5 CL-1").locked(NAME, 1.0):
        pass
    (kernels.root / ".staging-x").mkdir()
    os.utime(kernels.root / ".staging-x", (0, 0))
    theirs = [kernels.root / "V9" / "precious", kernels.root / "sm_90a-notes.txt"]
    theirs[0].parent.mkdir()
    for file in theirs:
        file.touch()
    assert [entry.name for entry in kernels.clear()] == [NAME, NAME]
    assert sorted(p for p in kernels.root.rglob("*") if p.is_file()) == sorted(theirs)
    assert sorted(p.name for p in kernels.root.iterdir()) == ["V9", "sm_90a-notes.txt"]


# ---------------------------------------------------------------------------- locks

HOLD = """
import sys, time
from pathlib import Path
from jitattn.jit.cache import KernelCache
with KernelCache(Path(sys.argv[1])).locked(sys.argv[2], 5.0) as held:
    print(held, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def holder(kernels: KernelCache) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(kernels.root), NAME],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_lock_is_held_and_its_owner_recorded(kernels: KernelCache) -> None:
    lock = kernels.root / "locks" / f"{NAME}.lock"
    with kernels.locked(NAME, 1.0) as held:
        assert held
        owner = lock.with_suffix(".owner")
        assert owner.read_text() == f"pid {os.getpid()} on {os.uname().nodename}"
        with kernels.locked(name_of("other"), 1.0) as other:
            assert other
    assert not lock.exists()


def test_a_stuck_owner_is_named(kernels: KernelCache, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    pattern = rf"0\.1 s \(JITATTN_LOCK_TIMEOUT\).*locks/{NAME}\.lock.*pid {holder.pid} on "
    with (
        pytest.warns(RuntimeWarning, match=pattern),
        kernels.locked(NAME, 0.1) as held,
    ):
        assert not held


def test_a_killed_owner_leaves_no_lock(kernels: KernelCache, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    with kernels.locked(NAME, 1.0) as held:
        assert held


def test_lock_files_from_the_past_do_not_matter(kernels: KernelCache) -> None:
    locks = kernels.root / "locks"
    locks.mkdir(parents=True)
    for name in ("lock", "locks", f"{NAME}.lock", f"{NAME}.owner"):
        (locks / name).touch()
        os.utime(locks / name, (0, 0))
    with kernels.locked(NAME, 1.0) as held:
        assert held


def test_without_flock_there_is_no_lock_at_all(
    kernels: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object) -> None:
        raise OSError(errno.ENOSYS, "no flock here")

    monkeypatch.setattr("fcntl.flock", missing)
    with kernels.locked(NAME, 1.0) as held:
        assert not held
    assert not list((kernels.root / "locks").iterdir())


def test_an_unwritable_cache_has_no_lock() -> None:
    with KernelCache(Path("/proc/jitattn")).locked(NAME, 1.0) as held:
        assert not held


def test_the_lock_is_released_after_an_error(kernels: KernelCache) -> None:
    with pytest.raises(ZeroDivisionError), kernels.locked(NAME, 1.0):
        raise ZeroDivisionError
    with kernels.locked(NAME, 0.0) as held:
        assert held
