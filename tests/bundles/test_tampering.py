"""Bundles tampered with: no kernel but those that were made, no hang, no raw error."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitattn.base.errors import CacheError, KernelNotFoundError
from jitattn.base.knobs import Knobs
from jitattn.bundles.wheel import write_wheel
from jitattn.jit import build, bundle_discovery
from jitattn.jit.cache import KernelCache
from tests.support import conduct
from tests.support.conduct import ARCH, FACTOR, SEED, SPECS

TOLD = (KernelNotFoundError, CacheError)


@pytest.fixture(autouse=True)
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build.nvrtc, "compile_cubin", conduct.FakeCompiler())
    monkeypatch.setattr(build.nvrtc, "toolchain", lambda: conduct.COMPILER)
    monkeypatch.setattr("jitattn.jit.cubin.resources_of", conduct.fake_resources)
    build.forget()
    yield
    build.forget()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    for spec in SPECS:
        build.fill_bundle(spec, ARCH, tmp_path / "bundle")
    KernelCache(tmp_path / "bundle").write_manifest()
    return tmp_path / "bundle"


def entry_of(bundle: Path) -> Path:
    return sorted(bundle.glob("sm_*"))[0]


def rewrite(bundle: Path, **fields: object) -> None:
    path = entry_of(bundle) / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))


def swap_two(bundle: Path) -> None:
    one, other, *_ = sorted(bundle.glob("sm_*"))
    if (one / "kernel.cubin").stat().st_size >= 2**29:
        return
    data = (one / "kernel.cubin").read_bytes()
    (one / "kernel.cubin").write_bytes((other / "kernel.cubin").read_bytes())
    (other / "kernel.cubin").write_bytes(data)


def copy_under_another_name(bundle: Path) -> None:
    one, other, *_ = sorted(bundle.glob("sm_*"))
    shutil.rmtree(one)
    shutil.copytree(other, one)


def copy_in_part(bundle: Path) -> None:
    for name in ("kernel.cubin", "kernel.cu", "meta.json"):
        path = entry_of(bundle) / name
        os.truncate(path, path.stat().st_size // 2)


def link_out(bundle: Path) -> None:
    entry = entry_of(bundle)
    shutil.move(entry, bundle.parent / "outside")
    entry.symlink_to(bundle.parent / "outside")


def link_a_file_out(bundle: Path) -> None:
    path = entry_of(bundle) / "kernel.cubin"
    shutil.move(path, bundle.parent / "outside")
    path.symlink_to(bundle.parent / "outside")


def bomb(bundle: Path) -> None:
    for name, size in {"kernel.cubin": 2**29, "kernel.cu": 2**27, "meta.json": 2**21}.items():
        os.truncate(entry_of(bundle) / name, size)


def nest(bundle: Path) -> None:
    (entry_of(bundle) / "meta.json").write_bytes(b"[" * 1_000_000)


def repeat_keys(bundle: Path) -> None:
    path = entry_of(bundle) / "meta.json"
    path.write_text('{"cubin_sha256": "0", ' + path.read_text()[1:-1] + ', "cubin_sha256": "1"}')


TAMPERING: list[Callable[[Path], None]] = [
    lambda bundle: rewrite(bundle, cubin_sha256="0" * 64),
    lambda bundle: rewrite(bundle, meta_sha256="0" * 64),
    lambda bundle: rewrite(bundle, entry="../../etc"),
    lambda bundle: rewrite(bundle, entry="/etc"),
    lambda bundle: rewrite(bundle, symbol="../../x"),
    lambda bundle: rewrite(bundle, format=2),
    lambda bundle: rewrite(bundle, format=2**70),
    lambda bundle: rewrite(bundle, format=[]),
    lambda bundle: rewrite(bundle, options=[None]),
    *(swap_two, copy_under_another_name, copy_in_part, link_out, link_a_file_out, bomb, nest),
    repeat_keys,
]


def look_up(bundle: Path, pin: str | None = None) -> int:
    """Look for each kernel as a process that may not compile; return how many are there."""
    found = 0
    for spec in SPECS:
        build.forget()
        settings = Knobs(cache_dir=None, precompiled=(bundle,), bundle_sha256=pin, jit=False)
        try:
            kernel = build.build(spec, ARCH, settings)
        except TOLD as error:
            assert len(str(error)) < 10_000
        else:
            made = conduct.fake_cubin(build.Target(spec, ARCH, False).render()[1], kernel_options())
            assert kernel.cubin == made
            found += 1
    return found


def kernel_options() -> tuple[str, ...]:
    return build.nvrtc.options(ARCH)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("tamper", TAMPERING, ids=range(len(TAMPERING)))
def test_what_was_tampered_with_is_missing(
    bundle: Path, tamper: Callable[[Path], None], pinned: bool
) -> None:
    pin = KernelCache(bundle).sha256() if pinned else None
    assert look_up(bundle, pin) == len(SPECS)
    tamper(bundle)
    assert look_up(bundle, pin) < len(SPECS)
    if pinned:  # then it is another bundle
        assert look_up(bundle, pin) == 0
    if tamper is not link_out:  # of what is a link, nothing is an entry
        assert KernelCache(bundle).verify()
    if tamper is not link_out:
        with pytest.raises(CacheError, match="damaged kernels"):
            write_wheel(bundle, bundle.parent / "wheel")


@pytest.mark.parametrize("text", ['{"format": 2}', "[]", "[" * 100_000, '{"entries": ["../x"]}'])
def test_nothing_is_taken_from_a_manifest(bundle: Path, text: str) -> None:
    (bundle / "bundle.json").write_text(text)
    assert look_up(bundle) == len(SPECS)


def test_random_tampering(bundle: Path) -> None:
    chance, rounds, missing = random.Random(SEED), 60 * FACTOR, 0
    whole = bundle.parent / "whole"
    shutil.copytree(bundle, whole)
    for _ in range(rounds):
        shutil.rmtree(bundle)
        shutil.copytree(whole, bundle)
        for _ in range(chance.randrange(1, 4)):
            try:
                chance.choice(TAMPERING)(bundle)
            except (OSError, ValueError, IndexError, MemoryError, RecursionError):
                continue  # of what an earlier one has left
        missing += len(SPECS) - look_up(bundle)
    assert missing >= rounds // 2
    conduct.tell("bundles tampered with", tried=rounds, missing=missing, wrong=0)


# ---------------------------------------------------------------------------- entry points

VALUES = [
    "..", "../outside", "a..b", ".a", "a.", "/etc", "//etc", "a/../../outside", "a b", "a:b",
    "a\\b", "", "1a", "x" * 5000, ".".join("x" * 3000), "a\0b", "ä", "a-b", "~root", "[extra]",
    "*", "a [x]",
]  # fmt: skip


def install(site: Path, text: str | bytes, name: str = "other-1.0.dist-info") -> Path:
    info = site / name
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return info / "entry_points.txt"


@pytest.fixture
def site(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, with a bundle that is right beside whatever else there is."""
    shutil.copytree(bundle, tmp_path / "site" / "good_bundle")
    install(tmp_path / "site", "[jitattn.bundles]\ngood = good_bundle\n", "good-1.0.dist-info")
    shutil.copytree(bundle, tmp_path / "outside")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_entry_points_lead_to_packages_only(
    site: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, f"[jitattn.bundles]\nbad = {value}\n")
    assert bundle_discovery.installed_bundles() == (site / "good_bundle",)
    assert "entry point 'bad' of jitattn.bundles: " in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize("name", ["", "x" * 5000, "\x1b[31m", "good"])
def test_names_of_entry_points_may_be_anything(site: Path, name: str) -> None:
    install(site, f"[jitattn.bundles]\n{name} = nowhere\n")
    assert bundle_discovery.installed_bundles() == (site / "good_bundle",)


@pytest.mark.parametrize("kind", ["pipe", "link", "huge", "folder", "bytes", "no value", "deep"])
def test_a_broken_list_of_entry_points_is_passed_over(site: Path, kind: str) -> None:
    path = install(site, "[jitattn.bundles]\nbad = good_bundle\n")
    if kind == "huge":
        os.truncate(path, 2**29)
    elif kind in ("bytes", "no value", "deep"):
        texts = {"bytes": b"\xff", "no value": b"[jitattn.bundles]\nbad", "deep": b"[" * 10**5}
        path.write_bytes(texts[kind])
    else:
        path.unlink()
        make = {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda at: at.symlink_to(at.name)}
        make[kind](path)  # type: ignore[operator]
    assert bundle_discovery.installed_bundles() == (site / "good_bundle",)
