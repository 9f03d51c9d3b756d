"""Bundles as wheels: what is in one, where pip puts it, how it is found, and pins."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitattn.base import knobs
from jitattn.base.errors import CacheError, ConfigError, KernelNotFoundError
from jitattn.bundles.wheel import write_wheel
from jitattn.jit import build, bundle_discovery
from jitattn.jit.build import fill_bundle
from jitattn.jit.cache import KernelCache
from jitattn.kernels.merge.spec import MergeSpec
from jitattn.kernels.pages.spec import LayerTablesSpec
from jitattn.spec.dtype import DType
from jitattn.tools import cli
from jitattn.version import __version__

REPOSITORY = Path(__file__).parents[2]
ARCH = "sm_90a"
SPEC = LayerTablesSpec()  # which compiles quickly

# Build a kernel in a process that has only what is on its path.
SCRIPT = """
import sys
from jitattn.jit import build
from jitattn.base import knobs
from jitattn.base.errors import JitAttnError
from jitattn.kernels.pages.spec import LayerTablesSpec
try:
    kernel = build.build(LayerTablesSpec(), "sm_90a", knobs.load())
except JitAttnError as error:
    print(type(error).__name__, error)
else:
    print(kernel.origin, "cuda.bindings.nvrtc" in sys.modules)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled") / "bundle"
    fill_bundle(SPEC, ARCH, folder)
    KernelCache(folder).write_manifest()
    return folder


@pytest.fixture
def bundle(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return copy_of(filled, tmp_path / "bundle")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put folders where packages are looked for."""
    build.forget()
    yield lambda *folders: [monkeypatch.syspath_prepend(str(folder)) for folder in folders]
    build.forget()


def copy_of(bundle: Path, target: Path) -> Path:
    for path in sorted(bundle.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(bundle)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def install(wheel: Path, target: Path) -> Path:
    """Install as pip does, with its permissions; return the folder."""
    old = os.umask(0o022)
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--target", str(target), str(wheel)],
            capture_output=True, text=True,
        )  # fmt: skip
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr
    return target


def unpack(wheel: Path, target: Path) -> Path:
    """Install quickly."""
    zipfile.ZipFile(wheel).extractall(target)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def run(*path: Path, **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JITATTN")}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, (*path, *sys.path))), **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def settings(**values: object) -> knobs.Knobs:
    return knobs.Knobs(**({"cache_dir": None, "jit": False} | values))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- the archive


def test_equal_bundles_make_equal_wheels(bundle: Path, tmp_path: Path) -> None:
    first = write_wheel(bundle, tmp_path / "a")
    os.utime(next(bundle.rglob("*.cubin")), (0, 0))
    (bundle / "notes").mkdir()
    (bundle / ".staging-x").mkdir()
    second = write_wheel(copy_of(bundle, tmp_path / "other"), tmp_path / "b")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    digest = KernelCache(bundle).sha256()
    assert first.name == f"jitattn_bundle-{__version__}+{digest[:12]}-py3-none-any.whl"
    assert list((tmp_path / "a").iterdir()) == [first]  # nothing half written beside it


def test_a_wheel_holds_the_entries_and_a_true_record(bundle: Path, tmp_path: Path) -> None:
    wheel = write_wheel(bundle, tmp_path, name="Acme.Kernels", version="1.2.post3")
    assert wheel.name == "acme_kernels-1.2.post3-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = "acme_kernels-1.2.post3.dist-info"
        entries = {
            f"jitattn_bundle_acme_kernels/{path.relative_to(bundle)}"
            for path in bundle.glob("sm_*/*")
        }
        assert len(entries) == 3
        own = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "RECORD")}
        assert set(names) == entries | own | {"jitattn_bundle_acme_kernels/__init__.py"}
        lines = archive.read(f"{info}/RECORD").decode().splitlines()
        assert [line.split(",")[0] for line in lines] == names
        for line in lines[:-1]:
            name, _, size = line.split(",")
            assert len(archive.read(name)) == int(size)
        assert b"Name: Acme.Kernels\nVersion: 1.2.post3\n" in archive.read(f"{info}/METADATA")
        assert {stored.date_time[0] for stored in archive.infolist()} == {1980}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "jitattn"}, "is the package that holds jitattn itself"),
        ({"name": "JitAttn"}, "is the package that holds jitattn itself"),
        ({"name": "a b"}, "is no package name"),
        ({"name": "../x"}, "is no package name"),
        ({"name": "x\n"}, "is no package name"),
        ({"version": "1.0-beta"}, "is no version in normal form"),
        ({"version": "1.02"}, "is no version in normal form"),
        ({"version": ""}, "is no version in normal form"),
    ],
    ids=str,
)
def test_names_that_pip_would_not_take(
    bundle: Path, tmp_path: Path, arguments: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        write_wheel(bundle, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_what_is_no_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(CacheError, match="holds no kernels"):
            write_wheel(folder, tmp_path / "out")
    with pytest.raises(CacheError, match="is no folder"):
        write_wheel(bundle, tmp_path / "my.whl")
    source = next(bundle.glob("*/kernel.cu"))
    source.write_text("// other")
    with pytest.raises(CacheError, match=r"damaged kernels.*kernel\.cu was altered"):
        write_wheel(bundle, tmp_path / "out")
    source.unlink()
    with pytest.raises(CacheError, match="damaged kernels"):
        write_wheel(bundle, tmp_path / "out")
    bundle.chmod(0o777)
    with pytest.raises(CacheError, match="writable by group or others"):
        write_wheel(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------- found


def test_pip_installs_it_and_it_is_found(filled: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    site = install(write_wheel(filled, tmp_path), tmp_path / "site")
    cache = {"JITATTN_CACHE_DIR": str(tmp_path / "none")}
    assert run(site, JITATTN_JIT="0", **cache) == "precompiled False"
    assert run(site, **cache) == "precompiled False"  # with a compiler, too
    told = run(JITATTN_JIT="0", **cache)
    assert told.startswith("KernelNotFoundError jitattn_layer_tables for sm_90a")
    assert not (tmp_path / "none").exists()


def test_looking_imports_no_package(
    filled: Path, tmp_path: Path, found: Callable[..., None]
) -> None:
    site = unpack(write_wheel(filled, tmp_path), tmp_path / "site")
    (site / "jitattn_bundle/__init__.py").write_text("raise SystemExit(1)")
    found(site)
    assert build.build(SPEC, ARCH, settings()).origin == "precompiled"
    assert bundle_discovery.installed_bundles() == (site / "jitattn_bundle",)
    assert "jitattn_bundle" not in sys.modules


def test_two_bundles_are_both_found(
    filled: Path, tmp_path: Path, found: Callable[..., None]
) -> None:
    other = tmp_path / "other"
    fill_bundle(MergeSpec(dtype=DType.FLOAT16), ARCH, other)
    sites = [
        unpack(write_wheel(folder, tmp_path, name=name), tmp_path / name)
        for name, folder in (("b", filled), ("a", other))
    ]
    found(*sites)
    names = [folder.name for folder in bundle_discovery.installed_bundles()]
    assert names == ["jitattn_bundle_a", "jitattn_bundle_b"]
    for spec in (SPEC, MergeSpec(dtype=DType.FLOAT16)):
        assert build.build(spec, ARCH, settings()).origin == "precompiled"


def test_a_wheel_of_other_kernels_is_none(tmp_path: Path, found: Callable[..., None]) -> None:
    """As one is that an older jitattn made."""
    other = tmp_path / "other"
    fill_bundle(MergeSpec(dtype=DType.FLOAT16), ARCH, other)
    site = unpack(write_wheel(other, tmp_path), tmp_path / "site")
    found(site)
    with pytest.raises(KernelNotFoundError, match=r"Searched: .*jitattn_bundle"):
        build.build(SPEC, ARCH, settings())


def test_a_wheel_of_an_older_jitattn_is_named(
    bundle: Path, tmp_path: Path, found: Callable[..., None]
) -> None:
    (entry,) = bundle.glob("sm_*/")
    old = entry.rename(f"{entry.parent / entry.name[:-32]}{'0' * 32}")
    site = tmp_path / "site"
    copy_of(bundle, site / "jitattn_bundle")
    info = site / "jitattn_bundle-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jitattn-bundle\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[jitattn.bundles]\na = jitattn_bundle\n")
    found(site)
    with pytest.raises(KernelNotFoundError, match="has it as another version of jitattn renders"):
        build.build(SPEC, ARCH, settings())
    assert old.is_dir()


def test_a_damaged_kernel_is_called_damaged(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not another version's; nor does a broken bundle get a digest to be pinned."""
    (kernel,) = bundle.glob("sm_*/kernel.cubin")
    kernel.write_bytes(kernel.read_bytes() + b"x")
    with pytest.raises(KernelNotFoundError, match="has it damaged"):
        build.build(SPEC, ARCH, settings(precompiled=(bundle,)))
    assert cli.main(["bundle", "sha256", str(bundle)]) == 1
    assert "damaged kernels" in capsys.readouterr().err


def test_an_entry_point_that_leads_nowhere_is_passed_over(
    filled: Path, tmp_path: Path, found: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    site = unpack(write_wheel(filled, tmp_path), tmp_path / "site")
    (site / "jitattn_bundle").rename(site / "elsewhere")
    found(site)
    assert bundle_discovery.installed_bundles() == ()
    assert f"there is no {site / 'jitattn_bundle'}" in caplog.text
    broken = site / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_bytes(b"\xff")
    bundle_discovery.forget()
    assert bundle_discovery.installed_bundles() == ()


def test_an_installed_bundle_that_others_may_write_to_is_refused(
    filled: Path, tmp_path: Path, found: Callable[..., None]
) -> None:
    site = unpack(write_wheel(filled, tmp_path), tmp_path / "site")
    (site / "jitattn_bundle").chmod(0o775)
    found(site)
    with pytest.raises(CacheError, match=r"jitattn_bundle is refused.*writable by group or others"):
        build.build(SPEC, ARCH, settings())


def test_a_read_only_bundle_is_found(
    filled: Path, tmp_path: Path, found: Callable[..., None]
) -> None:
    site = unpack(write_wheel(filled, tmp_path), tmp_path / "site")
    for path in (site, *site.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    found(site)
    assert build.build(SPEC, ARCH, settings()).origin == "precompiled"
    for path in (site, *site.rglob("*")):
        path.chmod(0o755)


def test_who_has_a_kernel_in_memory_asks_nobody(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.forget()
    named = settings(precompiled=(filled,))
    build.build(SPEC, ARCH, named)
    monkeypatch.setattr(bundle_discovery, "bundles", None)
    assert build.build(SPEC, ARCH, named).origin == "memory"
    build.forget()


# ---------------------------------------------------------------------------- pins


def test_the_digest_is_that_of_sha256sum(filled: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(filled)}\n"
        for path in sorted(filled.glob("sm_*/*"))
    ]
    assert KernelCache(filled).sha256() == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_digest_covers_every_file_and_no_other(bundle: Path, tmp_path: Path) -> None:
    digest = KernelCache(bundle).sha256()
    (bundle / "bundle.json").unlink()
    (bundle / "README").touch()
    (bundle / "locks").mkdir()
    next(bundle.glob("sm_*/")).joinpath("other").touch()
    assert KernelCache(bundle).sha256() == digest
    for name in ("kernel.cubin", "kernel.cu", "meta.json"):
        changed = copy_of(bundle, tmp_path / name)
        with next(changed.glob(f"*/{name}")).open("ab") as file:
            file.write(b" ")
        assert KernelCache(changed).sha256() != digest
    next(bundle.glob("*/kernel.cu")).chmod(0o666)
    with pytest.raises(CacheError, match="writable by group or others"):
        KernelCache(bundle).sha256()


def test_a_pinned_bundle_is_used(filled: Path, tmp_path: Path, found: Callable[..., None]) -> None:
    pin = KernelCache(filled).sha256()
    named = settings(precompiled=(filled, tmp_path / "missing"), bundle_sha256=pin)
    assert build.build(SPEC, ARCH, named).origin == "precompiled"
    other = tmp_path / "other"
    fill_bundle(MergeSpec(dtype=DType.FLOAT16), ARCH, other)
    found(
        unpack(write_wheel(other, tmp_path, name="a"), tmp_path / "a"),
        unpack(write_wheel(filled, tmp_path, name="b"), tmp_path / "b"),
    )
    build.forget()
    # Of installed ones the others are passed over.
    only = settings(bundle_sha256=pin)
    assert build.build(SPEC, ARCH, only).origin == "precompiled"
    with pytest.raises(KernelNotFoundError):
        build.build(MergeSpec(dtype=DType.FLOAT16), ARCH, only)


def test_a_bundle_that_does_not_match_is_refused(
    filled: Path, tmp_path: Path, found: Callable[..., None]
) -> None:
    pin, digest = "0" * 64, KernelCache(filled).sha256()
    for jit in (False, True):
        with pytest.raises(CacheError, match=f"asks for {pin}: {filled} has {digest}"):
            build.build(SPEC, ARCH, settings(precompiled=(filled,), bundle_sha256=pin, jit=jit))
    with pytest.raises(CacheError, match="no bundle is installed, nor is there one"):
        build.build(SPEC, ARCH, settings(precompiled=(tmp_path / "no",), bundle_sha256=pin))
    found(unpack(write_wheel(filled, tmp_path), tmp_path / "site"))
    bundle_discovery.forget()
    with pytest.raises(CacheError, match=f"asks for {pin}: .*jitattn_bundle has {digest}"):
        build.build(SPEC, ARCH, settings(bundle_sha256=pin))
    # One that is named is not passed over, though another matches.
    other = tmp_path / "other"
    fill_bundle(MergeSpec(dtype=DType.FLOAT16), ARCH, other)
    with pytest.raises(CacheError, match=f"asks for {digest}: {other} has"):
        build.build(SPEC, ARCH, settings(precompiled=(other,), bundle_sha256=digest))


def test_what_changes_after_the_pin_was_checked_is_missing(bundle: Path) -> None:
    build.forget()
    named = settings(precompiled=(bundle,), bundle_sha256=KernelCache(bundle).sha256())
    assert bundle_discovery.bundles(named)
    (entry,) = bundle.glob("sm_*/")
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "kernel.cubin").write_bytes(b"other")
    meta.pop("meta_sha256")
    meta["cubin_sha256"] = hashlib.sha256(b"other").hexdigest()
    canonical = json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()
    meta["meta_sha256"] = hashlib.sha256(canonical).hexdigest()
    (entry / "meta.json").write_text(json.dumps(meta))
    assert not KernelCache(bundle).verify()
    with pytest.raises(KernelNotFoundError):
        build.build(SPEC, ARCH, named)
    build.forget()


def test_the_pin_is_read_from_the_environment(filled: Path, tmp_path: Path) -> None:
    named = {"JITATTN_PRECOMPILED": str(filled), "JITATTN_CACHE_DIR": str(tmp_path / "none")}
    pin = KernelCache(filled).sha256()
    assert run(JITATTN_BUNDLE_SHA256=pin.upper(), JITATTN_JIT="0", **named) == "precompiled False"
    told = run(JITATTN_BUNDLE_SHA256="f" * 64, **named)
    assert told == f"CacheError JITATTN_BUNDLE_SHA256 asks for {'f' * 64}: {filled} has {pin}"
