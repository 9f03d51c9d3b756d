"""``jitattn doctor``: what this machine has, and what is missing.

Imports no torch and starts no CUDA context. No look raises: a doctor who dies of what the patient
has is of no use.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from jitattn import nvrtc
from jitattn.cache import KernelCache
from jitattn.errors import CompileError, JitAttnError
from jitattn.knobs import Knobs
from jitattn.support import arch_for
from jitattn.version import __version__

_PACKAGES = (
    "torch",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cutlass",
    "jinja2",
    "filelock",
    "platformdirs",
    "rich",
)
_CUDA_13 = (13, 0)
_OLD_DRIVER = (
    "it cannot load what CUDA 13 compiles: pip install 'jitattn[cu12]' && "
    "pip uninstall nvidia-cuda-nvrtc, which would be preferred"
)


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
        Finding("jitattn", f"{__version__} in {Path(__file__).parent}"),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        *_packages(),
        *_compiler(knobs),
        *_devices(),
        *_caches(knobs),
        *_settings(knobs),
    ]


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            # Running from a bundle needs neither compiler nor headers, and a build box no torch.
            optional = name in ("torch", "nvidia-cuda-nvrtc", "nvidia-cutlass")
            yield Finding(name, "not installed", None if optional else False, f"pip install {name}")


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
    yield Finding("NVRTC", f"{toolchain}, for compute capabilities {archs}")


def _devices() -> Iterator[Finding]:
    no_driver = Finding(
        "driver",
        "none: kernels can be compiled here, and the reference backend computes",
        None,
    )
    try:
        from jitattn import driver
    except ImportError as error:
        yield Finding("driver", f"cannot be asked: {error}", False, "pip install cuda-python")
        return
    version = driver.driver_version()
    if version is None or version == (0, 0):
        yield no_driver
        return
    found = f"CUDA {version[0]}.{version[1]}"
    if version < _CUDA_13:
        yield Finding("driver", found, None, _OLD_DRIVER)
    else:
        yield Finding("driver", found)
    yield from _cards()


def _cards() -> Iterator[Finding]:
    from jitattn import driver

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
        yield _cache("cache", knobs.cache_dir, writable=True)
    for bundle in knobs.precompiled:
        yield _cache("bundle", bundle, writable=False)


def _cache(what: str, folder: Path, *, writable: bool) -> Finding:
    try:
        entries = KernelCache(folder).entries()
    except JitAttnError as error:
        return Finding(what, "refused", False, str(error))
    num_bytes = sum(entry.size_bytes for entry in entries)
    found = f"{folder}: {len(entries)} kernels, {num_bytes:,} bytes"
    if writable and not os.access(_nearest(folder), os.W_OK | os.X_OK):
        return Finding(what, f"{found}; cannot be written", None, "set JITATTN_CACHE_DIR")
    if not writable and not entries:
        return Finding(what, found, None, "JITATTN_PRECOMPILED names a folder without kernels")
    return Finding(what, found)


def _nearest(folder: Path) -> Path:
    # The folder appears with the first kernel, so what matters is its nearest existing parent.
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)


def _settings(knobs: Knobs) -> Iterator[Finding]:
    for field in fields(knobs):
        if field.name not in ("cache_dir", "precompiled"):
            value = getattr(knobs, field.name)
            shown = int(value) if isinstance(value, bool) else value
            yield Finding(f"JITATTN_{field.name.upper()}", str(shown), None)
