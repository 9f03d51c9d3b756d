"""The headers of nvidia-cutlass: who gets them, and what is said where they are missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from jitattn.base.errors import CompilerMissingError
from jitattn.base.knobs import Knobs
from jitattn.jit import build, cutlass, nvrtc, render
from jitattn.jit.cache import KernelCache
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.registry import specs_of
from tests.support.cases import D128
from tests.support.compiler import skip_unless_compiled

SPEC = ScheduleSpec()
ARCH = "sm_90a"
INCLUDES = "".join(f"#include <{name}>\n" for name in cutlass.WRAPPERS)
PLAIN = f'extern "C" __global__ void {SPEC.symbol}() {{}}\n'
WGMMA = INCLUDES + f'extern "C" __global__ void {SPEC.symbol}() {{ cute::warpgroup_arrive(); }}\n'


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not read the headers, and finds no package."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for cached in (cutlass._headers, cutlass._headers_with):
        cached.cache_clear()
    yield
    for cached in (cutlass._headers, cutlass._headers_with):
        cached.cache_clear()


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a spec render to a kernel with wrappers."""
    monkeypatch.setattr(render, "render", lambda spec, arch: WGMMA)
    monkeypatch.setattr(build, "inputs", lambda spec, arch: {"source": WGMMA.encode()})
    build.forget()
    yield
    build.forget()


# ---------------------------------------------------------------------------- headers


@pytest.mark.usefixtures("missing")
def test_a_source_without_wrappers_gets_nothing_and_needs_no_package() -> None:
    assert cutlass.wrapper_headers(PLAIN) == ()
    assert cutlass.wrapper_package(PLAIN) == ()


def test_a_source_with_wrappers_gets_them_and_the_stand_ins() -> None:
    headers = cutlass.wrapper_headers(WGMMA)
    names = dict(headers)
    assert {*cutlass.WRAPPERS, *cutlass._STAND_INS, "cute/config.hpp"} <= set(names)
    assert not any(name.startswith(("/", ".")) for name in names)
    assert cutlass.wrapper_headers(WGMMA) is headers
    version = importlib.metadata.version("nvidia-cutlass")
    assert cutlass.wrapper_package(WGMMA) == (f"nvidia-cutlass {version}",)


def test_none_of_them_is_ours() -> None:
    # NVRTC would take one of two that are named alike, and say nothing.
    assert not dict(render.headers()).keys() & dict(cutlass.wrapper_headers(WGMMA)).keys()


def no_spec(name: str) -> ModuleSpec | None:
    raise ImportError(name)


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("why", ["not installed", "refused", "older"])
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    if why == "refused":
        monkeypatch.setattr(importlib.util, "find_spec", no_spec)
    if why == "older":  # the package is there, and not what is asked of it
        found = ModuleSpec("cutlass_library", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(CompilerMissingError, match=r"pip install 'nvidia-cutlass.*precompiled"):
        cutlass.wrapper_headers(WGMMA)


def test_a_package_without_metadata_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cutlass._version.__wrapped__() == "unknown"


# ---------------------------------------------------------------------------- build


@pytest.mark.usefixtures("rendered")
def test_a_kernel_is_compiled_with_them_and_says_so(tmp_path: Path) -> None:
    kernel = build.fill_bundle(SPEC, ARCH, tmp_path)
    stored = KernelCache(tmp_path).get(kernel.entry)
    assert stored is not None
    assert stored.meta["outside_headers"] == list(cutlass.wrapper_package(WGMMA))
    assert stored.meta["options"] == list(nvrtc.options(ARCH))
    assert str(cutlass._include_folder()).encode() not in kernel.cubin


@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("jit", [True, False])
def test_a_stored_kernel_needs_no_package(
    request: pytest.FixtureRequest, tmp_path: Path, jit: bool
) -> None:
    bundle = tmp_path / "bundle"
    entries = {
        build.fill_bundle(SPEC, ARCH, bundle).entry,
        build.build(SPEC, ARCH, Knobs(cache_dir=tmp_path / "cache")).entry,
    }
    assert len(entries) == 1
    request.getfixturevalue("missing")
    for settings in (
        Knobs(cache_dir=None, precompiled=(bundle,), jit=jit),
        Knobs(cache_dir=tmp_path / "cache", jit=jit),
    ):
        build.forget()
        kernel = build.build(SPEC, ARCH, settings)
        assert kernel.origin in ("precompiled", "disk")
        assert kernel.entry in entries


@pytest.mark.usefixtures("rendered", "missing")
def test_compiling_one_without_the_package_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CompilerMissingError, match="pip install 'nvidia-cutlass"):
        build.build(SPEC, ARCH, Knobs(cache_dir=tmp_path / "cache"))
    with pytest.raises(CompilerMissingError, match="pip install 'nvidia-cutlass"):
        build.fill_bundle(SPEC, ARCH, tmp_path / "bundle")


# ---------------------------------------------------------------------------- tests that compile


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(("arch", "is_skipped"), [("sm_90a", True), ("sm_80", False)])
def test_tests_of_kernels_that_need_it_are_skipped(arch: str, is_skipped: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    why = None
    try:
        skip_unless_compiled(specs_of(D128.config(), arch), arch)
    except pytest.skip.Exception as skipped:
        why = str(skipped)
    assert (why is not None) == is_skipped
    assert why is None or re.search("jitattn_prefill.*: nvidia-cutlass.* is missing", why)
