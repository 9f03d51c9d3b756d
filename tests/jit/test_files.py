"""The door of every file: links, pipes, sizes, depth, owners, and what a cache makes of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitattn.base.errors import CacheError, KernelNotFoundError
from jitattn.base.knobs import Knobs
from jitattn.jit import build, bundle_discovery, locks
from jitattn.jit.cache import KernelCache
from jitattn.jit.files import read_file, read_object, write_file
from tests.support import conduct
from tests.support.conduct import ARCH, SPECS, environment

NAME = "sm_90a-k-" + "0" * 32
ROOT = os.geteuid() == 0


def no_file(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    moved = path.with_name(f"{path.name}.moved")
    path.rename(moved)
    path.symlink_to(moved)


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o644)


def device(path: Path) -> None:
    if not ROOT:
        pytest.skip("only root can make a device")
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 5))  # /dev/zero, which never ends
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")


def huge(path: Path) -> None:
    os.truncate(path, 2**29)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def deep_object(path: Path) -> None:
    path.write_bytes(b'{"a":' * 900 + b"0" + b"}" * 900)


def long_number(path: Path) -> None:
    path.write_bytes(b'{"format": ' + b"9" * 10_000 + b"}")


def surrogate(path: Path) -> None:
    path.write_bytes(b'{"compiler": "\\ud800", "arch": ["\\udfff"], "outside_headers": [{}]}')


def others_write(path: Path) -> None:
    path.chmod(0o666)


def another_users(path: Path) -> None:
    if not ROOT:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)


NO_FILES = (link, dangling_link, link_to_itself, pipe, folder, socket, device)
UNTRUSTED = (others_write, another_users)
DAMAGES = (*NO_FILES, *UNTRUSTED, huge, empty, nested, deep_object, long_number, surrogate)


@pytest.fixture
def kernels(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


# ---------------------------------------------------------------------------- the door


@pytest.mark.parametrize("damage", [*NO_FILES, *UNTRUSTED, huge, nested, long_number])
def test_what_is_wrong_is_an_error_and_neither_followed_nor_waited_for(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "file.json"
    write_file(path, b"{}")
    assert read_object(path, 100) == {}
    damage(path)
    before = open_files()
    with pytest.raises((OSError, ValueError)):
        read_object(path, 2**20)
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_sizes_are_bounded(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="file has 5 bytes: expected at most 4"):
        read_file(tmp_path / "file", 4)
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", b"other")


# ---------------------------------------------------------------------------- entries


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "meta.json"])
@pytest.mark.parametrize("damage", [no_file, *DAMAGES])
def test_a_damaged_entry_is_missing_and_named(
    kernels: KernelCache, name: str, damage: Callable[[Path], None]
) -> None:
    kernels.put(NAME, b"cubin", "source", {})
    damage(kernels.root / NAME / name)
    assert kernels.get(NAME) is None
    (found,) = kernels.verify()
    assert (found.name, found.path) == (NAME, kernels.root / NAME)
    assert found.damage
    assert len(kernels.entries()) == 1
    kernels.write_manifest()
    kernels.put(NAME, b"cubin", "source", {})
    assert kernels.get(NAME) is not None
    assert kernels.verify() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / "kernel.cubin").unlink(), "kernel.cubin is missing"),
        (lambda path: rewrite_format(path, 2), "it has format 2 of a newer jitattn"),
        (lambda path: rewrite_format(path, "2"), "meta.json was altered"),
        (lambda path: (path / "meta.json").chmod(0o622), "writable by group or others"),
    ],
)
def test_an_entry_is_called_what_it_is(
    tmp_path: Path, change: Callable[[Path], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.nvrtc, "compile_cubin", conduct.FakeCompiler())
    monkeypatch.setattr("jitattn.jit.cubin.resources_of", conduct.fake_resources)
    entry = build.fill_bundle(SPECS[0], ARCH, tmp_path).entry
    change(tmp_path / entry)
    build.forget()
    with pytest.raises(KernelNotFoundError, match=f"damaged .*{words}"):
        build.build(SPECS[0], ARCH, Knobs(cache_dir=None, precompiled=(tmp_path,), jit=False))
    (found,) = KernelCache(tmp_path).verify()
    assert words in found.damage


def rewrite_format(path: Path, value: object) -> None:
    meta = json.loads((path / "meta.json").read_bytes())
    (path / "meta.json").write_text(json.dumps({**meta, "format": value}))


# ---------------------------------------------------------------------------- notes and locks


@pytest.mark.parametrize("damage", [no_file, *DAMAGES])
def test_a_damaged_note_is_missing_named_and_replaced(
    kernels: KernelCache, damage: Callable[[Path], None]
) -> None:
    kernels.remember("key", "note")
    damage(kernels.root / "notes" / "key")
    assert kernels.recall("key") is None
    names = [found.name for found in kernels.verify()]
    assert ("notes/key" in names) == (damage is not no_file)
    kernels.remember("key", "note")
    assert kernels.recall("key") == "note"


@pytest.mark.parametrize("damage", NO_FILES)
@pytest.mark.parametrize("suffix", [".lock", ".owner"])
def test_a_lock_file_leads_nowhere(
    kernels: KernelCache, suffix: str, damage: Callable[[Path], None]
) -> None:
    place = kernels.root / "locks"
    place.mkdir(parents=True, mode=0o755)
    path = place / f"{NAME}{suffix}"
    path.write_text("precious")
    damage(path)
    assert f"locks/{path.name}" in [found.name for found in kernels.verify()]
    with kernels.locked(NAME, 1.0) as held:
        assert held
        assert kernels.verify() == [] or damage is link
        assert (place / f"{NAME}.owner").read_text().startswith(f"pid {os.getpid()} on ")
    if damage is link:
        assert path.with_name(f"{path.name}.moved").read_text() == "precious"
    assert not path.is_symlink()
    assert not path.exists()


@pytest.mark.parametrize("name", ["notes", "locks"])
@pytest.mark.parametrize("damage", UNTRUSTED)
def test_notes_and_locks_of_others_are_refused_as_a_cache_is(
    kernels: KernelCache, name: str, damage: Callable[[Path], None]
) -> None:
    kernels.remember("key", "note")
    with kernels.locked(NAME, 1.0):
        pass
    damage(kernels.root / name)
    if damage is others_write:
        (kernels.root / name).chmod(0o777)
    assert [found.name for found in kernels.verify()] == [name]
    uses = {"notes": (lambda: kernels.recall("key"), lambda: kernels.remember("key", "note"))}
    for use in uses.get(name, (lambda: kernels.locked(NAME, 1.0),)):
        with pytest.raises(
            CacheError, match=rf"{name} is refused as part of a kernel cache: it is"
        ):
            use()


@pytest.mark.parametrize("name", ["notes", "locks"])
@pytest.mark.parametrize("damage", [link, dangling_link, link_to_itself, pipe, socket])
def test_notes_and_locks_that_are_no_folders_are_made_anew(
    kernels: KernelCache, name: str, damage: Callable[[Path], None]
) -> None:
    kernels.create()
    path = kernels.root / name
    path.touch()
    damage(path)
    if damage is link:  # to a folder that is somebody's
        moved = path.with_name(f"{name}.moved")
        moved.unlink()
        moved.mkdir()
    assert [found.name for found in kernels.verify()] == [name]
    assert kernels.recall("key") is None
    with kernels.locked(NAME, 1.0) as held:
        assert held
    kernels.remember("key", "note")
    assert kernels.recall("key") == "note"
    assert (name == "locks") or path.is_dir()
    assert not path.is_symlink()
    if damage is link:
        assert not list(moved.iterdir())


def test_a_link_in_place_of_a_division_is_refused(kernels: KernelCache, tmp_path: Path) -> None:
    kernels.create()
    (tmp_path / "elsewhere").mkdir()
    (kernels.root / "V1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="V1 is not a folder"):
        kernels.division("V1").put(NAME, b"cubin", "source", {"compiler": "V1"})
    assert kernels.divisions() == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_named_and_replaced(
    kernels: KernelCache, damage: Callable[[Path], None]
) -> None:
    kernels.put(NAME, b"cubin", "source", {"arch": "sm_90a"})
    kernels.write_manifest()
    damage(kernels.root / "bundle.json")
    readable = damage in (deep_object, surrogate)
    names = [found.name for found in kernels.verify()]
    assert names == ([] if readable else ["bundle.json"])
    kernels.write_manifest()
    assert read_object(kernels.root / "bundle.json", 2**20)["architectures"] == ["sm_90a"]


@pytest.fixture
def holder(kernels: KernelCache) -> Iterator[subprocess.Popen[str]]:
    script = (
        "import sys, time; from pathlib import Path; from jitattn.jit.cache import KernelCache\n"
        "with KernelCache(Path(sys.argv[1])).locked(sys.argv[2], 1.0):\n"
        "    print('held', flush=True); time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", script, str(kernels.root), NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_waits_says_for_whom_before_the_end(
    kernels: KernelCache,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert locks.NOTICE_S == 2.0
    monkeypatch.setattr(locks, "NOTICE_S", 0.05)

    class Ends(logging.Handler):
        """End the holder once we are told that it is waited for."""

        def emit(self, record: logging.LogRecord) -> None:
            holder.send_signal(signal.SIGKILL)

    ends = Ends()
    locks.logger.addHandler(ends)
    try:
        with kernels.locked(NAME, 60.0) as held:
            assert held
    finally:
        locks.logger.removeHandler(ends)
    assert f"waiting for at most 60 s (JITATTN_LOCK_TIMEOUT) for pid {holder.pid} on" in caplog.text
    assert f"which compiles {NAME}" in caplog.text


@pytest.mark.parametrize("damage", [no_file, pipe, huge, link_to_itself, empty])
def test_an_owner_that_cannot_be_read_is_unknown(
    kernels: KernelCache, holder: subprocess.Popen[str], damage: Callable[[Path], None]
) -> None:
    damage(kernels.root / "locks" / f"{NAME}.owner")
    with (
        pytest.warns(RuntimeWarning, match="held by an unknown process"),
        kernels.locked(NAME, 0.05) as held,
    ):
        assert not held


# ---------------------------------------------------------------------------- unreadable folders

AS_ANOTHER_USER = """
import os, shlex, sys, warnings
import jinja2, platformdirs, jitattn.jit.render
from jitattn.base import knobs
from jitattn.jit import build
from tests.support import conduct
for spec in conduct.SPECS:
    jitattn.jit.render.render(spec, conduct.ARCH)  # the next user cannot read the interpreter
conduct.use_fake_compiler()
os.setgroups([]); os.setgid(54321); os.setuid(54321)
try:
    print(build.build(conduct.SPECS[0], conduct.ARCH, knobs.load()).origin)
except Exception as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
"""


@pytest.mark.skipif(not ROOT, reason="only root can become another user")
@pytest.mark.parametrize("variable", ["JITATTN_PRECOMPILED", "JITATTN_CACHE_DIR"])
@pytest.mark.parametrize("depth", ["folder", "parent", "files"])
def test_an_unreadable_folder_is_named(tmp_path: Path, variable: str, depth: str) -> None:
    private = tmp_path / "private"
    target = private / "bundle"
    for spec in SPECS:
        KernelCache(target).put(f"{ARCH}-{spec.symbol}-{'0' * 32}", b"x", "x", {})
    for path in tmp_path.parents:
        if path.stat().st_uid == 0 and not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    private.chmod(0o755)
    target.chmod(0o700 if depth == "folder" else 0o755)
    if depth == "parent":
        private.chmod(0o700)
    env = environment(tmp_path / "none", JITATTN_JIT="0") | {variable: str(target)}
    told = conduct.run(AS_ANOTHER_USER, env=env)
    private.chmod(0o755)
    assert told.startswith(("KernelNotFoundError", "CacheError"))
    assert str(target) in told


@pytest.mark.parametrize("damage", NO_FILES)
def test_a_pinned_bundle_with_what_is_no_file_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    KernelCache(tmp_path).put(NAME, b"cubin", "source", {})
    damage(tmp_path / NAME / "kernel.cu")
    build.forget()
    with pytest.raises(CacheError, match=rf"{NAME}/kernel\.cu must not be used: "):
        bundle_discovery.bundles(
            Knobs(cache_dir=None, precompiled=(tmp_path,), bundle_sha256="0" * 64)
        )


def test_a_cache_can_be_cleared_of_all_of_it(kernels: KernelCache) -> None:
    kernels.put(NAME, b"cubin", "source", {})
    (kernels.root / "notes").symlink_to("/")
    os.mkfifo(kernels.root / "locks")
    (kernels.root / "bundle.json").mkdir()
    kernels.clear()
    assert list(kernels.root.iterdir()) == []
