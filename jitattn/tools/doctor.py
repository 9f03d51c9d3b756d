"""``jitattn doctor``: what this machine has, and what is missing.

Imports no torch and starts no CUDA context. No look raises: a doctor who dies of what the patient
has is of no use.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from jitattn.base.errors import CompileError, JitAttnError
from jitattn.base.knobs import Knobs, unknown_variables
from jitattn.jit import bundle_discovery, nvrtc
from jitattn.jit.build import is_of_these_sources, is_there
from jitattn.jit.cache import Entry, KernelCache
from jitattn.jit.files import why_unreadable
from jitattn.spec.arch import arch_for
from jitattn.spec.family import KernelSpec
from jitattn.version import __version__

_PACKAGES = (
    "torch",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvdisasm",
    "nvidia-cutlass",
    "filelock",
    "jinja2",
    "numpy",
    "platformdirs",
    "rich",
)
# Running from a bundle needs neither compiler nor headers, and a build box no torch. NVRTC 12 is
# for old drivers, and the disassembler for `jitattn explain`.
_OPTIONAL = {
    "torch",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvdisasm",
    "nvidia-cutlass",
    "numpy",
}
_PURPOSES = {
    "torch": "for all but compiling and looking at kernels",
    "nvidia-cuda-nvrtc": "to compile",
    "nvidia-cuda-nvdisasm": "for the instructions of jitattn explain",
    "nvidia-cutlass": "to compile prefill and latent attention for compute capability 9.0",
    "numpy": "for jitattn.kv",
}
# Of no use where nothing may be compiled.
_COMPILER = {"nvidia-cuda-nvrtc", "nvidia-cutlass"}
_NAMED = 5  # of the kernels that are missing
# Worth a line only where it is installed, since most machines do without.
_SILENT = {"nvidia-cuda-nvrtc-cu12"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    found: str
    ok: bool | None = True
    """None: worth knowing, and no fault."""
    advice: str = ""


def examine(knobs: Knobs) -> list[Finding]:
    """Look at everything that jitattn depends on."""
    return [
        Finding("jitattn", f"{__version__} in {Path(__file__).parents[1]}"),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        *_packages(knobs),
        *_compiler(knobs),
        *_devices(),
        *_caches(knobs),
        *_settings(knobs),
        *_kernels_without_compiler(knobs),
    ]


def _packages(knobs: Knobs) -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name in _SILENT or (name in _COMPILER and not knobs.jit):
                continue
            if name == "nvidia-cuda-nvrtc" and _has("nvidia-cuda-nvrtc-cu12"):
                continue  # which compiles instead
            ok = None if name in _OPTIONAL else False
            purpose = f", {_PURPOSES[name]}" if name in _PURPOSES else ""
            yield Finding(name, "not installed", ok, f"pip install {name}{purpose}")


def _has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _compiler(knobs: Knobs) -> Iterator[Finding]:
    if not knobs.jit:
        yield Finding("NVRTC", "not asked for: JITATTN_JIT=0 forbids compiling", None)
        return
    try:
        toolchain = nvrtc.toolchain()
    except CompileError as error:
        yield Finding("NVRTC", "cannot be used", False, str(error))
        return
    archs = ", ".join(f"{number // 10}.{number % 10}" for number in nvrtc.supported_archs())
    found = f"{toolchain}, for compute capabilities {archs}"
    reason = nvrtc.why_refused(toolchain)
    yield Finding("NVRTC", found, not reason, reason)


def _devices() -> Iterator[Finding]:
    no_driver = Finding(
        "driver",
        "none: no kernel runs here, the reference backend computes",
        None,
    )
    version = nvrtc.driver_version()
    if version is None:
        yield no_driver
        return
    yield Finding("driver", f"knows CUDA up to {version[0]}.{version[1]}")
    yield from _cards()


def _cards() -> Iterator[Finding]:
    try:
        from jitattn.device import driver
    except ImportError as error:
        yield Finding("device", f"cannot be asked: {error}", False, "pip install cuda-python")
        return
    index = 0
    while True:
        try:
            facts = driver.device_facts(index)
        except (JitAttnError, RuntimeError) as error:
            if index == 0:
                yield Finding("device", f"none: {error}", None)
            return
        major, minor = facts.compute_capability
        arch = arch_for(major, minor)
        yield Finding(
            f"device {index}",
            f"{facts.name}, compute capability {major}.{minor}, {facts.num_sms} SMs: "
            + (f"runs {arch} kernels" if arch else "no kernels"),
            True if arch else None,
        )
        index += 1


def _caches(knobs: Knobs) -> Iterator[Finding]:
    if knobs.cache_dir is None:
        yield Finding(
            "cache", "none: kernels stay in memory", None, "set JITATTN_CACHE_DIR to keep them"
        )
    else:
        yield _user_cache(knobs.cache_dir)
    for bundle in knobs.precompiled:
        yield _bundle("bundle", bundle, knobs)
    for bundle in bundle_discovery.installed_bundles():
        yield _bundle("installed bundle", bundle, knobs)
    if knobs.bundle_sha256:
        yield _pin(knobs)


def _pin(knobs: Knobs) -> Finding:
    try:
        (bundle, *_) = bundle_discovery.bundles(knobs)
    except (JitAttnError, OSError) as error:
        return Finding("pinned bundle", "refused", False, str(error))
    return Finding("pinned bundle", f"{bundle.root}")


def _user_cache(folder: Path) -> Finding:
    try:
        entries = KernelCache(folder).entries()
    except JitAttnError as error:
        return Finding("cache", "refused", False, str(error))
    found = f"{folder}: {_sizes(entries)}"
    if (reason := why_unreadable(folder)) and reason != "missing":
        return Finding("cache", f"{folder} {reason}", False, "set JITATTN_CACHE_DIR to another one")
    if reason := _why_not_writable(_nearest(folder)):
        advice = "kernels stay in memory: set JITATTN_CACHE_DIR to a folder that can be written"
        return Finding("cache", f"{found}; cannot be written ({reason})", None, advice)
    return Finding("cache", found)


def _bundle(what: str, folder: Path, knobs: Knobs) -> Finding:
    """Look at a bundle: whether processes of this jitattn would take kernels from it."""
    if reason := why_unreadable(folder):
        return Finding(what, f"{folder} ({reason})", False, "JITATTN_PRECOMPILED names no bundle")
    bundle = KernelCache(folder)
    try:
        entries = bundle.own_entries()
        damaged = {one.name for one in bundle.own_damage()}
        bundle.check()
    except JitAttnError as error:
        return Finding(what, "refused", False, str(error))
    found = f"{folder}: {_sizes(entries)}"
    if not entries:
        ok = None if knobs.jit else False
        return Finding(what, found, ok, "JITATTN_PRECOMPILED names a folder without kernels")
    if damaged:
        advice = "fill the bundle again: jitattn cache verify says what is wrong"
        return Finding(what, f"{found}, {len(damaged)} damaged", False, advice)
    if others := sum(not is_of_these_sources(bundle, entry.name) for entry in entries):
        # Those of earlier versions may stay in a bundle that was filled again.
        ok = None if others < len(entries) else False
        advice = f"fill the bundle again: jitattn {__version__} makes other kernels than these"
        return Finding(what, f"{found}, {others} of other sources", ok, advice)
    return Finding(what, found)


def _sizes(entries: Sequence[Entry]) -> str:
    num_bytes = sum(entry.size_bytes for entry in entries)
    return f"{len(entries)} kernels, {num_bytes:,} bytes"


def _kernels_without_compiler(knobs: Knobs) -> Iterator[Finding]:
    """Refuse a deployment that may not compile and has nothing to run."""
    if knobs.jit:
        return
    try:
        bundles = bundle_discovery.bundles(knobs)
        places = [*bundles, *([KernelCache(knobs.cache_dir)] if knobs.cache_dir else [])]
        count = sum(len(place.entries()) for place in places)
    except JitAttnError as error:
        yield Finding("kernels", "refused", False, str(error))
        return
    advice = (
        "JITATTN_JIT=0 forbids compiling, and there is no bundle: make one with jitattn precompile "
        "and name it in JITATTN_PRECOMPILED, or install its wheel"
    )
    ok = count > 0
    yield Finding("kernels", f"{count} that need no compiler", ok, "" if ok else advice)


def examine_model(kernels: Sequence[tuple[KernelSpec, str]], knobs: Knobs, command: str) -> Finding:
    """Look for all kernels of a model, which are found without compiling anything.

    Args:
        kernels: what its steps launch, each with an architecture.
        knobs: where to look.
        command: what makes a bundle of them, for the advice.
    """
    try:
        missing = [
            f"{spec.symbol} for {arch}" for spec, arch in kernels if not is_there(spec, arch, knobs)
        ]
    except JitAttnError as error:
        return Finding("model", "kernels are refused", False, str(error))
    found = f"{len(kernels) - len(missing)} of its {len(kernels)} kernels are there"
    if not missing:
        return Finding("model", found)
    more = f", and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return Finding(
        "model", f"{found}; missing: {', '.join(missing[:_NAMED])}{more}", False, command
    )


def archs_here(knobs: Knobs) -> tuple[str, ...]:
    """Return the architectures of this machine's cards; without cards those of its bundles."""
    found: dict[str, None] = {}
    with suppress(ImportError, JitAttnError, RuntimeError):
        from jitattn.device import driver

        for index in itertools.count():
            if arch := arch_for(*driver.device_facts(index).compute_capability):
                found[arch] = None
    if not found:
        with suppress(JitAttnError):
            for bundle in bundle_discovery.bundles(knobs):
                found |= dict.fromkeys(entry.arch for entry in bundle.entries())
    return tuple(found)


def _why_not_writable(folder: Path) -> str:
    if not os.access(folder, os.W_OK | os.X_OK):
        return "permission denied"
    status = os.statvfs(folder)
    if status.f_flag & os.ST_RDONLY:  # which permission bits, and root, do not see
        return "its file system is read-only"
    if status.f_bavail == 0:
        return "its file system is full"
    return ""


def _nearest(folder: Path) -> Path:
    # The folder appears with the first kernel, so what matters is its nearest existing parent.
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)


def _settings(knobs: Knobs) -> Iterator[Finding]:
    for name in unknown_variables():
        advice = "jitattn does not read it: see docs/environment.md"
        yield Finding(f"{name:.80}", "unknown", False, advice)
    for field in fields(knobs):
        if field.name not in ("cache_dir", "precompiled"):
            value = getattr(knobs, field.name)
            shown = "not set" if value is None else int(value) if isinstance(value, bool) else value
            yield Finding(f"JITATTN_{field.name.upper()}", str(shown), None)
