"""Compile CUDA source with NVRTC: the only module that calls the compiler. Needs no GPU.

Importing this module loads neither NVRTC nor its binding; the first call that compiles does. No
toolkit header is involved: a source includes nothing but what it is given in memory.

A driver loads what a compiler of its own CUDA major version made, or of an older one. So NVRTC 12
is taken where the driver is older than CUDA 13 (580), if it is installed, and else NVRTC 13.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from jitattn.base import knobs
from jitattn.base.errors import CompileError, CompilerMissingError

_INSTALL = 'pip install cuda-python "nvidia-cuda-nvrtc>=13,<14"'
_INSTALL_12 = "pip install 'nvidia-cuda-nvrtc-cu12>=12.9,<13'"

# Where the wheels put the library, below a folder on sys.path, and the binding that chooses.
_WHEEL_OF_12 = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
_WHEEL_OF_13 = "nvidia/cu13/lib/libnvrtc.so.13"
_WHEEL_FILES = (_WHEEL_OF_13, _WHEEL_OF_12, "cuda/bindings/__init__.py")


class Compiled(NamedTuple):
    """What the compiler returned: a cubin, and its log, which may be empty."""

    cubin: bytes
    log: str


class _ForkGate:
    """Keeps the process from forking while other threads are in the compiler.

    A child that is forked meanwhile finds NVRTC's locks held by nobody, and hangs when it compiles.
    So a fork waits for those at work, and those who come meanwhile wait for the fork. A thread that
    forks in a signal handler does not wait for the call that the signal interrupted: the handler
    runs between two calls of NVRTC, and the child goes on with what it holds.
    """

    def __init__(self) -> None:
        self._entry = threading.RLock()
        self._changed = threading.Condition()
        # How many calls each thread is in.
        self._inside: dict[int, int] = {}

    @contextmanager
    def no_fork(self) -> Iterator[None]:
        """Keep other threads from forking."""
        thread = threading.get_ident()
        with self._entry, self._changed:
            self._inside[thread] = self._inside.get(thread, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                left = self._inside.pop(thread) - 1
                if left:
                    self._inside[thread] = left
                self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait until no other thread is inside, and let none in."""
        self._entry.acquire()
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._inside.keys() - {thread})

    def after_fork(self) -> None:
        """Let threads in again, in the parent and in the child."""
        self._entry.release()


_gate = _ForkGate()
os.register_at_fork(
    before=_gate.before_fork, after_in_parent=_gate.after_fork, after_in_child=_gate.after_fork
)


def options(arch: str, *, lineinfo: bool = False) -> tuple[str, ...]:
    """Return the options of every compilation for ``arch``, for example ``"sm_90a"``.

    ``lineinfo`` puts the working directory into the cubin, so bundles never use it.
    """
    # ptxas' report can change the cubin, so it is always on, and its numbers are kept.
    always = (f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v")
    return (*always, "-lineinfo") if lineinfo else always


@_gate.no_fork()
def compile_cubin(
    source: str, *, name: str, headers: Mapping[str, str], options: Sequence[str]
) -> Compiled:
    """Compile ``source`` to machine code.

    Args:
        source: CUDA C++, complete except for ``headers``.
        name: file name used in messages.
        headers: text of every header that ``source`` includes, by the name it includes it under.
            They are passed in memory, so no path on this machine can reach the cubin.
        options: NVRTC options, architecture included.

    Raises:
        CompileError: NVRTC rejected the source; the source has been saved for inspection.
        CompilerMissingError: NVRTC or its binding is not installed.
    """
    nvrtc = _binding()
    texts = [text.encode() for text in headers.values()]
    names = [header.encode() for header in headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names)
    )
    try:
        flags = [option.encode() for option in (*options, *_dialect())]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            text = _explain(text, status, options)
            raise CompileError(name, text, source, _save(name, source))
        return Compiled(_fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _dialect() -> tuple[str, ...]:
    """Return what an older NVRTC has to be told, and 13.5 is not.

    Generic lambdas in device code are host functions to it otherwise. Nothing else in our sources
    lacks an execution space, and it goes by the compiler, so it is not among ``options``.
    """
    return ("-default-device",) if version() < (13, 5) else ()


@functools.cache
@_gate.no_fork()
def toolchain() -> str:
    """Identify the compiler build, for example ``"V13.5.37 CL-39125733"``.

    ``version()`` stops at 13.5; the PTX of an empty program also names the patch and the build.
    """
    nvrtc = _binding()
    program = _check(nvrtc.nvrtcCreateProgram(b"", b"empty.cu", 0, [], []))
    try:
        _check(nvrtc.nvrtcCompileProgram(program, 0, []))
        ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    release = re.search(r"^//.*release.*\b(V[\d.]+)\s*$", ptx, re.MULTILINE)
    build = re.search(r"^//.*Build ID:\s*(\S+)\s*$", ptx, re.MULTILINE)
    major, minor = version()
    return " ".join(
        [
            release[1] if release else f"V{major}.{minor}",
            build[1] if build else "unknown-build",
        ]
    )


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's version, for example ``(13, 5)``."""
    nvrtc = _binding()
    status, major, minor = nvrtc.nvrtcVersion()
    _check((status,))
    return int(major), int(minor)


def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that this machine's driver knows; None without a driver.

    Asking starts no context and costs a millisecond at most.
    """
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    if status != 0 or version.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def why_refused(compiler: str) -> str:
    """Return why this machine's driver cannot load what ``compiler`` makes; empty when it can.

    Args:
        compiler: as ``toolchain()`` names it, for example ``"V13.5.37 CL-39125733"``.
    """
    driver = driver_version()
    release = re.match(r"V(\d+)", compiler)
    if driver is None or release is None or int(release[1]) <= driver[0]:
        return ""
    if driver[0] < 12:
        advice = "update the driver: NVRTC 12 needs version 525 or newer, NVRTC 13 580 or newer"
    else:
        advice = f"{_INSTALL_12} for NVRTC 12, or update the driver to version 580 or newer"
    return (
        f"the driver knows CUDA up to {driver[0]}.{driver[1]} and cannot load what NVRTC "
        f"{compiler} compiles: {advice}"
    )


def supported_archs() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC has code for, as ``10 * major + minor``."""
    nvrtc = _binding()
    return tuple(int(arch) for arch in _check(nvrtc.nvrtcGetSupportedArchs()))


def loaded_libraries() -> tuple[str, ...]:
    """Return path, size and time of every NVRTC library in this process."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return ()
    paths = {line[line.index("/") :] for line in maps.splitlines() if "libnvrtc.so" in line}
    return tuple(fact for path in sorted(paths) if (fact := _fact(path)))


def still_there(libraries: Sequence[str]) -> bool:
    """Say whether every library that ``loaded_libraries()`` described is what it was."""
    return all(fact == _fact(fact.rpartition("|")[0].rpartition("|")[0]) for fact in libraries)


def search_digest() -> str:
    """Digest what decides which NVRTC the binding would load now, without loading it.

    Loading NVRTC and asking for its build takes a third of a second. A cache that remembers the
    answer under this digest can skip that when all it does is read an entry.
    """
    facts = [*knobs.library_search(), *loaded_libraries(), str(driver_version())]
    facts += [_fact(os.path.join(root, file)) for root in sys.path for file in _WHEEL_FILES]  # noqa: PTH118
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _fact(path: str) -> str:
    try:
        info = os.stat(path)  # noqa: PTH116  # a Path for each candidate costs more than the call
    except OSError:
        return ""
    return f"{path}|{info.st_size}|{info.st_mtime_ns}"


@functools.cache
def _binding() -> Any:
    _prefer_what_the_driver_accepts()
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the binding looks for the library at its first call
    except ImportError as error:
        raise CompilerMissingError(
            f"cuda.bindings.nvrtc is missing ({error}): {_INSTALL}"
        ) from error
    except RuntimeError as error:
        # cuda.pathfinder lists every place it searched; its first line is enough.
        reason = (str(error).splitlines() or ["not found"])[0]
        raise CompilerMissingError(f"libnvrtc cannot be loaded ({reason}): {_INSTALL}") from error
    return nvrtc


def _prefer_what_the_driver_accepts() -> None:
    """Load what is to be used: the binding takes what is loaded, of 12 and 13 the latter.

    That is NVRTC 12 where the driver is too old for 13. Elsewhere it is 13, also where torch for
    CUDA 12 has loaded an NVRTC of its own, which may be too old for some architectures.
    """
    driver, loaded = driver_version(), loaded_libraries()
    takes_13 = driver is None or driver[0] >= 13
    if any("libnvrtc.so.13" in library for library in loaded) or takes_13 != bool(loaded):
        return
    wheel = _WHEEL_OF_13 if takes_13 else _WHEEL_OF_12
    paths = [os.path.join(folder, wheel) for folder in sys.path]  # noqa: PTH118
    for path in paths if takes_13 else (*paths, "libnvrtc.so.12"):  # the last: the loader's to find
        with suppress(OSError):
            ctypes.CDLL(path)
            return


def _explain(log: str, status: Any, options: Sequence[str]) -> str:
    if "gpu-architecture" not in log:
        return log or f"error: NVRTC returned {status.name} without a log"
    major, minor = version()
    archs = ", ".join(map(str, supported_archs()))
    asked = next((o for o in options if "arch" in o), "no architecture")
    return f"{log}\n{asked} was asked of NVRTC {major}.{minor}, which compiles for {archs}"


def _save(name: str, source: str) -> Path | None:
    import tempfile  # 10 ms, and only a failure needs it

    try:
        folder = Path(tempfile.mkdtemp(prefix="jitattn-"))
        path = folder / Path(name).name
        path.write_text(source)
    except OSError:
        return None
    return path


def _fetch(size: Any, copy: Any, program: Any) -> bytes:
    # The binding writes into the object. Zeros, because Python shares one-byte strings: a log of
    # one NUL must not overwrite every b" " of the process.
    buffer = bytes(_check(size(program)))
    _check(copy(program, buffer))
    return buffer


def _check(result: Any) -> Any:
    status, *values = result
    if status.value != 0:
        raise CompileError("NVRTC", f"error: a call returned {status.name}", "")
    return values[0] if values else None
