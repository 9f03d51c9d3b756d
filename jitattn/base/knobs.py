"""All environment variables of jitattn. No other module reads os.environ."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from jitattn.base.record import Value


class Knobs(Value):
    """The settings of a process, read by ``load()``."""

    cache_dir: Path | None
    """JITATTN_CACHE_DIR: folder of compiled kernels. Default: ``jitattn`` in the platform's user
    cache; None for a user without a home, whose kernels stay in memory."""

    precompiled: tuple[Path, ...] = ()
    """JITATTN_PRECOMPILED: bundles made by ``jitattn precompile``, searched first, separated by
    ``:`` and read-only. Installed wheels of bundles are searched after them."""

    bundle_sha256: str | None = None
    """JITATTN_BUNDLE_SHA256: digest, from ``jitattn bundle sha256``, of the only bundle that may
    be used; all others are refused."""

    jit: bool = True
    """JITATTN_JIT: ``0`` forbids compilation, except by ``precompile``; a missing kernel raises
    KernelNotFoundError."""

    lock_timeout: float = 120.0
    """JITATTN_LOCK_TIMEOUT: seconds to wait for another process that compiles the same kernel."""

    lineinfo: bool = False
    """JITATTN_LINEINFO: ``1`` compiles with source lines, for Nsight Compute and the sanitizer."""

    check: bool = False
    """JITATTN_CHECK: ``1`` verifies page ids, lengths and offsets on the device."""


_PREFIX = "JITATTN_"
# Of the benchmarks and tests, which are none of the package's.
_OTHERS = ("JITATTN_BENCH_", "JITATTN_TEST_")

_named: set[str] = set()


def load(environ: Mapping[str, str] = os.environ) -> Knobs:
    """Read the settings, or raise ValueError with the variable and its accepted values.

    Variables of our prefix that nobody reads are named in a RuntimeWarning, each once.
    """
    if told := tell_unknown(environ):
        warnings.warn(told, RuntimeWarning, stacklevel=2)
    folder = environ.get("JITATTN_CACHE_DIR", "")
    bundles = environ.get("JITATTN_PRECOMPILED", "").split(":")
    return Knobs(
        cache_dir=_path("JITATTN_CACHE_DIR", folder) if folder else _user_cache(),
        precompiled=tuple(_path("JITATTN_PRECOMPILED", bundle) for bundle in bundles if bundle),
        bundle_sha256=_digest(environ, "JITATTN_BUNDLE_SHA256"),
        jit=_flag(environ, "JITATTN_JIT", default=True),
        lock_timeout=_seconds(environ, "JITATTN_LOCK_TIMEOUT", default=120.0),
        lineinfo=_flag(environ, "JITATTN_LINEINFO", default=False),
        check=_flag(environ, "JITATTN_CHECK", default=False),
    )


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that look like settings and are none, such as ``JITATTN_JTI``."""
    known = {f"{_PREFIX}{field.name.upper()}" for field in fields(Knobs)}
    return sorted(
        name
        for name in environ
        if name.startswith(_PREFIX) and name not in known and not name.startswith(_OTHERS)
    )


def tell_unknown(environ: Mapping[str, str] = os.environ) -> str:
    """Return a sentence that names ``unknown_variables``, each once in a process; or nothing."""
    names = [name for name in unknown_variables(environ) if name not in _named]
    if not names:
        return ""
    _named.update(names)
    known = ", ".join(f"{_PREFIX}{field.name.upper()}" for field in fields(Knobs))
    shown = ", ".join(f"{name:.80}" for name in names[:10])
    return f"jitattn does not know {shown}: it reads {known}"


def _path(name: str, text: str) -> Path:
    # Absolute, so that a later chdir has no effect. Container files pass "~" unexpanded.
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{name}={text!r}: expected a path ({error})") from error


def _user_cache() -> Path | None:
    import platformdirs  # 6 ms, and not needed where JITATTN_CACHE_DIR is set

    try:
        folder = platformdirs.user_cache_path("jitattn", appauthor=False)
    except (RuntimeError, KeyError, OSError):
        return None  # neither HOME nor a passwd entry
    return folder if folder.is_absolute() else None


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1")
    return default if value == "" else value == "1"


def _digest(environ: Mapping[str, str], name: str) -> str | None:
    if name not in environ:
        return None
    value = environ[name].lower()
    if not (len(value) == 64 and set(value) <= set("0123456789abcdef")):
        # Empty, too: a command that fails gives nothing, and must not take the pin away.
        raise ValueError(f"{name}={value!r}: expected the 64 hexadecimal digits of a SHA-256")
    return value


def _seconds(environ: Mapping[str, str], name: str, *, default: float) -> float:
    value = environ.get(name, "")
    try:
        seconds = float(value) if value else default
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name}={value!r}: expected a number of seconds, 0 or more")
    return seconds


def library_search(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the variables by which the CUDA bindings find NVRTC, in a fixed order.

    jitattn does not act on them; they distinguish toolchains.
    """
    names = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")
    return tuple(environ.get(name, "") for name in names)
