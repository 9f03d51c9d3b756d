"""How the cache behaves on damaged, full, read-only, unsafe, foreign and oddly named folders."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jitattn.base import knobs
from jitattn.base.errors import CacheError, KernelNotFoundError
from jitattn.base.knobs import Knobs
from jitattn.jit import build, cache, cubin, nvrtc
from jitattn.jit.build import Kernel
from jitattn.jit.cache import KernelCache
from jitattn.jit.render import render
from jitattn.spec.family import KernelSpec
from tests.support import conduct
from tests.support.conduct import ARCH, COMPILER, FACTOR, SPECS, FakeCompiler, environment, start

ROOT = os.geteuid() == 0
ARCHS = ("sm_90a", "sm_80")
OLD_COMPILER = "V13.0.88 CL-7"


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompiler]:
    fake = FakeCompiler()
    monkeypatch.setattr(nvrtc, "compile_cubin", fake)
    monkeypatch.setattr(cubin, "resources_of", conduct.fake_resources)
    monkeypatch.setattr(nvrtc, "toolchain", lambda: fake.name)
    monkeypatch.setattr(nvrtc, "search_digest", lambda: fake.name.replace(" ", "-"))
    monkeypatch.setattr(nvrtc, "loaded_libraries", lambda: (f"{__file__}|0|0",))
    monkeypatch.setattr(nvrtc, "still_there", lambda libraries: True)
    build.forget()
    yield fake
    build.forget()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fresh(spec: KernelSpec, settings: Knobs, arch: str = ARCH) -> Kernel:
    """Build as a new process would."""
    build.forget()
    return build.build(spec, arch, settings)


def expected(spec: KernelSpec, arch: str = ARCH, compiler: str = COMPILER) -> bytes:
    return conduct.fake_cubin(render(spec, arch), nvrtc.options(arch), compiler)


# ---------------------------------------------------------------------------- corruption


HUGE = 2**29  # more than is read of any file


class Damage:
    """Random damage to a cache; every method returns what it did."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.chance = random.Random(seed)

    def files(self) -> list[Path]:
        """Files that can be read whole; links to one are among them."""
        found = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(path for path in found if path.stat().st_size < HUGE)

    def entries(self) -> list[Path]:
        return sorted(path.parent for path in self.files() if path.name == "meta.json")

    def flip_a_bit(self) -> None:
        path = self.chance.choice(self.files())
        data = bytearray(path.read_bytes())
        if data:
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        path.write_bytes(data)

    def truncate(self) -> None:
        path = self.chance.choice(self.files())
        os.truncate(path, self.chance.randrange(path.stat().st_size + 1))

    def zero_a_block(self) -> None:
        path = self.chance.choice(self.files())
        data = bytearray(path.read_bytes())
        start = self.chance.randrange(len(data) + 1)
        end = min(len(data), start + 512)
        data[start:end] = bytes(end - start)
        path.write_bytes(data)

    def append(self) -> None:
        path = self.chance.choice(self.files())
        path.write_bytes(path.read_bytes() + self.chance.randbytes(self.chance.randrange(1, 64)))

    def remove_a_file(self) -> None:
        self.chance.choice(self.files()).unlink()

    def swap_files(self) -> None:
        one = self.chance.choice(self.files())
        same = [p for p in self.files() if p.name == one.name or p.parent.name == "notes"]
        other = self.chance.choice(same)
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    def swap_entries(self) -> None:
        one, other = self.chance.choice(self.entries()), self.chance.choice(self.entries())
        if one != other:
            aside = self.root / "aside"
            one.rename(aside)
            other.rename(one)
            aside.rename(other)

    def copy_an_entry(self) -> None:
        one, other = self.chance.choice(self.entries()), self.chance.choice(self.entries())
        if one != other:
            shutil.rmtree(other)
            shutil.copytree(one, other, ignore_dangling_symlinks=True, copy_function=self.copy)

    @staticmethod
    def copy(source: str, target: str) -> None:
        # A pipe would wait, and a huge file fill the disk.
        if Path(source).is_file() and Path(source).stat().st_size < HUGE:
            shutil.copyfile(source, target)

    def stale_manifest(self) -> None:
        path = self.chance.choice(self.entries()) / "meta.json"
        field = self.chance.choice(
            ["format", "entry", "compiler", "cubin_sha256", "arch", "symbol"]
        )
        try:
            meta = json.loads(path.read_bytes())
            meta[field] = "old"
            path.write_text(json.dumps(meta))
        except (ValueError, RecursionError):
            path.write_text("{}")

    def stale_bundle(self) -> None:
        path = self.root / "bundle" / "bundle.json"
        if path.is_file():
            path.write_text('{"format": 0, "compilers": ["V1"]}')

    def become_something_else(self) -> None:
        path = self.chance.choice(self.files())
        path.unlink()
        if not self.put_there(path, path.name):
            path.symlink_to(self.chance.choice(self.files()))

    def put_there(self, path: Path, target: Path | str) -> bool:
        """Mostly put a folder, a pipe or a link there."""
        kind = self.chance.randrange(4)
        if kind == 0:
            path.mkdir()
        elif kind == 1:
            os.mkfifo(path)
        elif kind == 2:
            path.symlink_to(target)
        return kind < 3

    def grow(self) -> None:
        os.truncate(self.chance.choice(self.files()), HUGE)

    def nest(self) -> None:
        bracket = self.chance.choice([b"[", b'{"a":'])
        self.chance.choice(self.files()).write_bytes(bracket * self.chance.choice([900, 100_000]))

    def let_others_write(self) -> None:
        self.chance.choice(self.files()).chmod(0o666)

    def spoil_locks(self) -> None:
        division = self.chance.choice([path for path in self.root.glob("V*") if path.is_dir()])
        locks, entries = division / "locks", self.entries()
        suffix = self.chance.choice([".lock", ".owner"])
        path = locks / f"{self.chance.choice(entries).name}{suffix}"
        if not locks.is_dir() or path.exists() or path.is_symlink():
            return
        if not self.put_there(path, self.chance.choice(self.files())):
            path.write_bytes(self.chance.randbytes(100))

    def spoil_a_folder(self) -> None:
        folders = [
            path
            for path in self.root.rglob("*")
            if path.name in ("notes", "locks") and path.is_dir() and not path.is_symlink()
        ]
        path = self.chance.choice(folders)
        shutil.rmtree(path)
        kind = self.chance.randrange(3)
        if kind == 0:
            path.write_bytes(b"")
        elif kind == 1:
            os.mkfifo(path)
        else:
            path.symlink_to(self.root / "bundle")


KINDS = (
    "flip_a_bit", "flip_a_bit", "flip_a_bit", "truncate", "zero_a_block", "append",
    "remove_a_file", "swap_files", "swap_files", "swap_entries", "copy_an_entry",
    "stale_manifest", "stale_bundle", "become_something_else", "grow", "nest",
    "let_others_write", "spoil_locks", "spoil_a_folder",
)  # fmt: skip


def check_what_is_named(root: Path) -> int:
    """What is missing to ``get`` is named by ``verify``; return how much is named."""
    named = [found.path for found in KernelCache(root).verify()]
    for part in (KernelCache(root), *KernelCache(root).divisions()):
        for entry in part.entries():
            if entry.path.parent == part.root:
                assert (part.get(entry.name) is None) == (entry.path in named), entry.name
    return len(named)


def test_random_corruption_loads_nothing_wrong(
    root: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was built, by which of two compilers, is what is loaded, or nothing.

    And what is not loaded is named by ``verify``.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a thousand rounds, not durability
    settings = Knobs(cache_dir=root)
    bundle = root / "bundle"
    combinations = [
        (spec, arch, name) for spec in SPECS for arch in ARCHS for name in (COMPILER, OLD_COMPILER)
    ]
    for spec, arch, compiler.name in combinations:
        fresh(spec, settings, arch)
    compiler.name = COMPILER
    for spec in SPECS:
        build.fill_bundle(spec, ARCH, bundle)
    KernelCache(bundle).write_manifest()
    damage = Damage(root, seed=conduct.SEED)
    rebuilt = refused = named = 0
    rounds = 250 * FACTOR
    for number in range(rounds):
        getattr(damage, damage.chance.choice(KINDS))()
        if number % 5 == 0:
            named += check_what_is_named(root)
        for spec, arch, compiler.name in damage.chance.sample(combinations, 3):
            kernel = fresh(spec, settings, arch)
            assert kernel.cubin == expected(spec, arch, compiler.name), number
            rebuilt += kernel.origin == "compiled"
        compiler.name = COMPILER
        try:
            kernel = fresh(
                damage.chance.choice(SPECS), Knobs(cache_dir=None, precompiled=(bundle,), jit=False)
            )
            # Bundles of any compiler are right, so an entry from anywhere in the cache is, too.
            made = [expected(kernel.spec, compiler=name) for name in (COMPILER, OLD_COMPILER)]
            assert kernel.cubin in made, number
        except KernelNotFoundError:
            refused += 1
            for spec in SPECS:
                build.fill_bundle(spec, ARCH, bundle)
    assert rebuilt > rounds // 10
    assert refused > rounds // 100
    assert named > rounds // 10
    conduct.tell(
        "random damages", tried=rounds, rebuilt=rebuilt, refused=refused, named=named, wrong=0
    )
    for spec, arch, compiler.name in combinations:
        assert fresh(spec, settings, arch).cubin == expected(spec, arch, compiler.name)


# ---------------------------------------------------------------------------- full and read-only

# Runs in a mount namespace of its own, so that nothing stays mounted.
FAULT = """
import json, os, shutil, subprocess, sys, warnings
from pathlib import Path
from jitattn.jit import build
from jitattn.base import knobs
from jitattn.jit.cache import KernelCache
from tests.support import conduct

folder, options, then, notes = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
conduct.use_fake_compiler()
root = Path(folder) / "cache"
settings = knobs.Knobs(cache_dir=root)
if then:
    origins = [build.build(spec, conduct.ARCH, settings).origin for spec in conduct.SPECS[:2]]
    if notes == "no notes":
        shutil.rmtree(root / "notes")
    subprocess.run(["mount", "-o", then, folder], check=True)
build.forget()
before = sorted(str(path) for path in root.rglob("*"))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kernels = [build.build(spec, conduct.ARCH, settings) for spec in conduct.SPECS]
    again = [build.build(spec, conduct.ARCH, settings).origin for spec in conduct.SPECS]
from jitattn.jit.render import render
from jitattn.jit import nvrtc
options = nvrtc.options(conduct.ARCH)
right = [
    kernel.cubin == conduct.fake_cubin(render(kernel.spec, conduct.ARCH), options)
    for kernel in kernels
]
print(json.dumps({
    "origins": [kernel.origin for kernel in kernels],
    "again": again,
    "right": all(right),
    "warnings": [str(warning.message) for warning in caught],
    "damaged": len(KernelCache(root).verify()),
    "staging": [str(path) for path in root.rglob(".staging-*")],
    "locks": [str(path) for path in root.rglob("locks/*")],
    "changed": before != sorted(str(path) for path in root.rglob("*")),
}))
"""


def on_a_file_system(
    folder: Path, options: str, then: str = "", notes: str = "notes"
) -> dict[str, object]:
    """Build on a new file system; ``then`` is how it is remounted after two of three kernels."""
    folder.mkdir()
    namespace = ["unshare", "--mount"]
    try:
        probe = ["sh", "-c", f"mount -t tmpfs tmpfs '{folder}'"]
        subprocess.run([*namespace, *probe], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs to mount a file system in a namespace: {error}")
    command = [*namespace, sys.executable, "-c", FAULT, str(folder), options, then, notes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("notes", ["notes", "no notes"])
def test_a_read_only_file_system_serves_what_it_has(tmp_path: Path, notes: str) -> None:
    result = on_a_file_system(tmp_path / "mnt", "size=4m,mode=0755", "remount,ro", notes)
    assert result["origins"] == ["disk", "disk", "compiled"]
    assert result["again"] == ["memory"] * 3
    assert result["right"]
    (warning,) = result["warnings"]  # type: ignore[misc]
    assert "stay in memory" in warning
    assert "JITATTN_CACHE_DIR" in warning
    assert not result["changed"]


def test_a_read_only_file_system_without_a_cache(tmp_path: Path) -> None:
    result = on_a_file_system(tmp_path / "mnt", "size=4m,mode=0755,ro")
    assert result["origins"] == ["compiled"] * 3
    assert len(result["warnings"]) == 1  # type: ignore[arg-type]
    assert not result["changed"]


@pytest.mark.parametrize("pages", [1, 2, 4, 8, 12, 20, 28])
def test_a_file_system_that_is_full_at_any_point(tmp_path: Path, pages: int) -> None:
    result = on_a_file_system(tmp_path / "mnt", f"size={4096 * pages},mode=0755")
    assert result["right"]
    assert result["again"] == ["memory"] * 3
    assert result["damaged"] == 0
    assert result["staging"] == []
    assert result["locks"] == []
    for warning in result["warnings"]:  # type: ignore[attr-defined]
        assert "No space left on device" in warning
        assert "stay in memory" in warning


@pytest.mark.parametrize("inodes", [2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_a_file_system_without_inodes_at_any_point(tmp_path: Path, inodes: int) -> None:
    result = on_a_file_system(tmp_path / "mnt", f"size=4m,nr_inodes={inodes},mode=0755")
    assert result["right"]
    assert result["damaged"] == 0
    assert result["staging"] == []
    assert result["origins"] == ["compiled"] * 3
    assert result["warnings"]


@pytest.mark.parametrize(
    "failure", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EBUSY]
)
@pytest.mark.parametrize("call", ["mkdir", "open", "rename", "fsync", "chmod"])
def test_any_failing_call_costs_a_warning_only(
    root: Path, monkeypatch: pytest.MonkeyPatch, failure: int, call: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(failure, os.strerror(failure))

    settings = Knobs(cache_dir=root)
    fresh(SPECS[0], settings)
    owner = os if call in ("fsync", "mkdir") else Path
    if call == "open":
        real = Path.open

        def open_to_read(self: Path, mode: str = "r", *rest: object, **options: object) -> object:
            return real(self, mode) if mode.startswith("r") else fail()

        monkeypatch.setattr(Path, "open", open_to_read)
    else:
        monkeypatch.setattr(owner, call, fail)
    assert fresh(SPECS[0], settings).origin == "disk"
    with pytest.warns(RuntimeWarning, match="stay in memory") as caught:
        assert fresh(SPECS[1], settings).origin == "compiled"
    assert len(caught) == 1
    monkeypatch.undo()
    if call != "mkdir":
        assert not list(root.rglob(".staging-*"))
    assert KernelCache(root).verify() == []


# ---------------------------------------------------------------------------- homes

HOMELESS = """
import importlib.metadata, os, sys, warnings
import platformdirs, platformdirs.unix
import jinja2, jitattn.jit.render
from jitattn.jit import build
from jitattn.base import knobs
from tests.support import conduct
conduct.use_fake_compiler()
for spec in conduct.SPECS:
    jitattn.jit.render.render(spec, conduct.ARCH)  # the next user cannot read the interpreter
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
warnings.simplefilter("always")
settings = knobs.load()
kernels = [build.build(spec, conduct.ARCH, settings) for spec in conduct.SPECS]
print(settings.cache_dir, *(kernel.origin for kernel in kernels))
"""


@pytest.mark.skipif(not ROOT, reason="only root can become a user without an entry")
@pytest.mark.parametrize("home", [None, "/nonexistent", "/proc/1"])
def test_without_a_usable_home_kernels_stay_in_memory(home: str | None) -> None:
    env = environment()
    for name in ("HOME", "XDG_CACHE_HOME", "JITATTN_CACHE_DIR"):
        env.pop(name, None)
    if home is not None:
        env["HOME"] = home
    out, err = start(HOMELESS, env=env).communicate()
    folder = "None" if home is None else f"{home}/.cache/jitattn"
    assert out.split() == [folder, "compiled", "compiled", "compiled"], err
    assert err.count("RuntimeWarning") == 1
    assert "JITATTN_CACHE_DIR" in err


def test_a_file_in_place_of_the_cache_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="file is not a folder: remove it or choose another path"):
        fresh(SPECS[0], Knobs(cache_dir=tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"stay in memory.*tmp.*file"):
        assert fresh(SPECS[0], Knobs(cache_dir=tmp_path / "file" / "below")).origin == "compiled"


# ---------------------------------------------------------------------------- trust


@pytest.mark.parametrize("place", ["cache", "division"])
@pytest.mark.parametrize("fault", ["0777", "0770", "foreign"])
def test_an_unsafe_cache_is_refused(root: Path, place: str, fault: str) -> None:
    settings = Knobs(cache_dir=root)
    fresh(SPECS[0], settings)
    folder = root if place == "cache" else KernelCache(root).divisions()[0].root
    make_unsafe(folder, fault)
    for jit in (True, False):
        with pytest.raises(CacheError, match=r"is refused as a kernel cache: it is"):
            fresh(SPECS[0], replace(settings, jit=jit))
    with pytest.raises(CacheError):
        fresh(SPECS[1], settings)
    with pytest.raises(CacheError):
        KernelCache(root).clear()


@pytest.mark.parametrize("fault", ["0777", "0770", "foreign"])
def test_an_unsafe_bundle_is_refused(tmp_path: Path, fault: str) -> None:
    bundle = tmp_path / "bundle"
    build.fill_bundle(SPECS[0], ARCH, bundle)
    make_unsafe(bundle, fault)
    with pytest.raises(CacheError, match=r"is refused as a kernel cache: it is"):
        fresh(SPECS[0], Knobs(cache_dir=None, precompiled=(bundle,)))


@pytest.mark.parametrize("place", ["entry", "kernel.cubin", "kernel.cu", "meta.json"])
@pytest.mark.parametrize("fault", ["0777", "0770", "foreign", "link"])
def test_an_unsafe_entry_is_a_miss_and_heals(root: Path, place: str, fault: str) -> None:
    settings = Knobs(cache_dir=root)
    entry = fresh(SPECS[0], settings).entry
    (folder,) = root.rglob(entry)
    path = folder if place == "entry" else folder / place
    if fault == "link":
        moved = root / "elsewhere"
        path.rename(moved)
        path.symlink_to(moved)
    else:
        make_unsafe(path, fault)
    assert fresh(SPECS[0], settings).origin == "compiled"
    assert fresh(SPECS[0], settings).origin == "disk"
    assert not folder.is_symlink()


def make_unsafe(path: Path, fault: str) -> None:
    if fault != "foreign":
        path.chmod(int(fault, 8))
    elif ROOT:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root can give a file away")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o027, 0o077])
def test_the_umask_widens_and_narrows_nothing(root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        fresh(SPECS[0], Knobs(cache_dir=root / "deep" / "cache"))
        build.fill_bundle(SPECS[0], ARCH, root / "bundle")
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "deep" / "cache").stat().st_mode) == 0o700
    for top in (root / "deep" / "cache", root / "bundle"):
        for path in top.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644)
    assert fresh(SPECS[0], Knobs(cache_dir=root / "deep" / "cache")).origin == "disk"


# ---------------------------------------------------------------------------- odd names

ODD = """
import sys
from jitattn.jit import build
from jitattn.base import knobs
from jitattn.tools import cli
from tests.support import conduct
conduct.use_fake_compiler()
origins = [build.build(spec, conduct.ARCH, knobs.load()).origin for spec in conduct.SPECS]
assert set(origins) == {sys.argv[1]}, origins
for command in (["list"], ["list", "--json"], ["verify"], ["path"], ["prune", "--max-size", "1G"]):
    assert cli.main(["cache", *command]) == 0
"""

NAMES = ["日本 Ü ñ", "two\nlines", "'quotes\" $HOME `x`", "[red]markup[/]", b"\xff\xfe latin \xe9"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_names_of_folders_may_be_anything(tmp_path: Path, name: str | bytes, locale: str) -> None:
    folder = os.fsencode(tmp_path) + b"/" + (name if isinstance(name, bytes) else name.encode())
    env = {os.fsencode(k): os.fsencode(v) for k, v in environment().items()}
    env[b"JITATTN_CACHE_DIR"] = folder
    env |= {b"LC_ALL": locale.encode(), b"PYTHONUTF8": b"0", b"PYTHONCOERCECLOCALE": b"0"}
    for origin in ("compiled", "disk"):
        done = subprocess.run(
            [sys.executable, "-c", ODD, origin], env=env, capture_output=True, cwd=tmp_path
        )
        assert (done.returncode, done.stderr) == (0, b"")
    assert folder in done.stdout.splitlines(keepends=False) or b"\n" in folder


# ---------------------------------------------------------------------------- other versions


def test_entries_of_another_architecture_are_not_used(root: Path) -> None:
    settings = Knobs(cache_dir=root)
    entries = {fresh(SPECS[1], settings, arch).entry for arch in ARCHS}
    assert len(entries) == 2
    for arch in ARCHS:
        kernel = fresh(SPECS[1], settings, arch)
        assert (kernel.origin, kernel.arch) == ("disk", arch)
        assert kernel.cubin == expected(SPECS[1], arch)


def test_entries_of_another_compiler_are_not_used(root: Path, compiler: FakeCompiler) -> None:
    settings = Knobs(cache_dir=root)
    fresh(SPECS[0], settings)
    compiler.name = OLD_COMPILER
    assert fresh(SPECS[0], settings).cubin == expected(SPECS[0], compiler=OLD_COMPILER)
    old, new = (KernelCache(root).division(name).root for name in (OLD_COMPILER, COMPILER))
    shutil.rmtree(old)
    shutil.copytree(new, old)  # by hand, with the best intentions
    assert [entry.damage for entry in KernelCache(root).verify()] == [
        f"it was made by another compiler, {COMPILER}"
    ]
    kernel = fresh(SPECS[0], settings)
    assert kernel.origin == "compiled"
    assert kernel.cubin == expected(SPECS[0], compiler=OLD_COMPILER)


def test_entries_of_another_package_version_are_used_when_the_source_is_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Knobs(cache_dir=root)
    fresh(SPECS[0], settings)
    monkeypatch.setattr(build, "__version__", "99.0")
    assert fresh(SPECS[0], settings).origin == "disk"
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert fresh(SPECS[0], settings).origin == "compiled"


def test_a_note_of_an_older_rendering_does_not_matter(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Knobs(cache_dir=root)
    first = fresh(SPECS[0], settings).entry
    monkeypatch.setattr(build, "headers", lambda: (("new.cuh", "// changed"),))
    # As if ``inputs`` had missed the change: the note leads to the old entry, which is whole and
    # right for what was noted. Without it, the new source decides.
    for note in (root / "notes").iterdir():
        note.unlink()
    second = fresh(SPECS[0], settings)
    assert second.origin == "compiled"
    assert second.entry != first


def test_without_notes_reading_costs_no_compilation(root: Path) -> None:
    settings = Knobs(cache_dir=root)
    fresh(SPECS[0], settings)
    shutil.rmtree(root / "notes")
    assert fresh(SPECS[0], settings).origin == "disk"
    assert list((root / "notes").iterdir())  # noted again


def test_settings_load_in_any_of_these_folders(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert knobs.load({"JITATTN_CACHE_DIR": str(root)}).cache_dir == root
