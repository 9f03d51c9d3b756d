"""From a spec to a cubin: look in memory, bundles and the user's cache, else compile and store.

Reading an entry loads neither NVRTC nor Jinja, once the user's cache has notes of the compiler that
this machine has and of what the templates render to; where compiling is forbidden (JITATTN_JIT=0)
NVRTC is never touched.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from jitattn.base.errors import CacheError, CompilerMissingError, KernelNotFoundError
from jitattn.base.knobs import Knobs
from jitattn.base.record import Value
from jitattn.jit import bundle_discovery, nvrtc
from jitattn.jit.cache import KernelCache, Meta, digest, entry_name
from jitattn.jit.files import why_unreadable
from jitattn.jit.sources import headers, inputs, templates_digest
from jitattn.spec.family import KernelSpec
from jitattn.spec.variant import READY
from jitattn.version import __version__

logger = logging.getLogger("jitattn")


class Kernel(Value):
    """A compiled kernel and where it came from."""

    spec: KernelSpec
    symbol: str
    """Name of the function in the cubin."""
    arch: str
    cubin: bytes
    origin: str
    """``"memory"``, ``"disk"`` (the user's cache), ``"precompiled"`` (a bundle), ``"compiled"``."""
    seconds: float
    """What finding or compiling it took this time."""
    registers: int
    """Per thread."""
    spill_bytes: int
    """Spill stores and loads, per thread."""
    smem_bytes: int
    """Static shared memory per CTA."""
    compiler: str
    """The NVRTC build that made it, for example ``"V13.5.37 CL-39125733"``."""
    entry: str
    """Its name in a cache."""


class Target(NamedTuple):
    """A kernel of an architecture, and how it is compiled."""

    spec: KernelSpec
    arch: str
    lineinfo: bool

    @property
    def options(self) -> tuple[str, ...]:
        """What NVRTC is told."""
        return nvrtc.options(self.arch, lineinfo=self.lineinfo)

    def render(self) -> tuple[str, str]:
        """Return the entry's name and the source that it covers."""
        from jitattn.jit.render import (
            render,  # imports Jinja, which reading an entry can do without
        )

        source = render(self.spec, self.arch)
        return _entry_of(self.arch, self.spec.symbol, source, self.options), source

    def note_key(self) -> str:
        """Return what the entry's name is noted under: a digest of all that it depends on."""
        options = "\0".join(self.options).encode()
        return digest({"options": options, **inputs(self.spec, self.arch)})


def _entry_of(arch: str, symbol: str, source: str, options: Sequence[str]) -> str:
    fields = {"source": source.encode(), "options": "\0".join(options).encode()}
    # Not the headers of nvidia-cutlass: each wrapper is one asm statement, so their version cannot
    # change what a kernel computes. Who reads an entry need not have them, nor hash a megabyte.
    fields |= {f"header {name}": text.encode() for name, text in headers()}
    return entry_name(arch, symbol, fields)


class _Memory:
    """This process's kernels, and one lock for each, so that threads compile a kernel once."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[Target, Knobs], Kernel] = {}
        self._locks: dict[tuple[Target, Knobs], threading.Lock] = {}
        self._guard = threading.Lock()

    def lock(self, key: tuple[Target, Knobs]) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(key, threading.Lock())

    def forget_locks(self) -> None:
        self._locks = {}
        self._guard = threading.Lock()


_memory = _Memory()
# A lock that some thread held at a fork would never be released in the child.
os.register_at_fork(after_in_child=_memory.forget_locks)

_warned: set[str] = set()


def build(spec: KernelSpec, arch: str, knobs: Knobs, *, hint: str = "") -> Kernel:
    """Return the kernel of ``spec`` for ``arch``, compiling it at most once.

    Bundles come first, whoever compiled them; of the user's cache only what this machine's compiler
    made is used, unless there is no compiler to ask.

    Args:
        spec: what to build.
        arch: for example ``"sm_90a"``.
        knobs: where to look and whether to compile.
        hint: the planner's arguments as ``jitattn precompile --config`` takes them, for the error.

    Raises:
        KernelNotFoundError: ``knobs.jit`` is off and the kernel is in no bundle or cache.
        CompileError: the kernel does not compile, or there is no compiler.
        CacheError: a bundle or the user's cache must not be used.
    """
    started = time.perf_counter()
    key = (Target(spec, arch, knobs.lineinfo), knobs)
    kernel = _from_caches(*key)
    if kernel is None:
        with _memory.lock(key):
            kernel = _from_caches(*key) or _compile_if_allowed(*key, hint)
    return replace(kernel, seconds=time.perf_counter() - started)


class Pending:
    """A kernel that was found, or that another thread compiles."""

    def __init__(self, work: Kernel | Future[Kernel], build: Callable[[], Kernel]) -> None:
        """Made by ``start``; ``build`` builds the kernel on the calling thread."""
        self._work = work
        self._build = build
        self._process = os.getpid()

    @property
    def was_found(self) -> bool:
        """Whether nothing had to be compiled."""
        return isinstance(self._work, Kernel)

    def result(self) -> Kernel:
        """Wait for the kernel and return it; raise what ``build`` raises, at every call."""
        if isinstance(self._work, Kernel):
            return self._work
        if os.getpid() != self._process:
            return self._build()  # forked, and the other thread stayed with the parent
        if (error := self._work.exception()) is not None:
            # One object is raised at every call: it must not collect the frames of each.
            raise error.with_traceback(None)
        return self._work.result()


def start(
    specs: Sequence[KernelSpec], arch: str, knobs: Knobs, *, hint: str = ""
) -> tuple[Pending, ...]:
    """Look up several kernels and let other threads compile the rest; see ``build``.

    They compile as many at a time as there are cores, in the order of ``specs``, so that who needs
    only the first ones hardly notices the others. At its end the process waits for all of them.

    Raises:
        KernelNotFoundError, CacheError: as ``build`` does; a failing compilation raises later, from
            ``Pending.result``.
    """
    # Threads only delay reading, but NVRTC lets them work side by side.
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="jitattn-build")
    pending = []
    for spec in specs:
        started = time.perf_counter()
        make = functools.partial(build, spec, arch, knobs, hint=hint)
        work: Kernel | Future[Kernel]
        if (kernel := _from_caches(Target(spec, arch, knobs.lineinfo), knobs)) is not None:
            work = replace(kernel, seconds=time.perf_counter() - started)
        else:
            work = _submit(pool, make) if knobs.jit else make()
        pending.append(Pending(work, make))
    pool.shutdown(wait=False)
    return tuple(pending)


def _submit(pool: ThreadPoolExecutor, make: Callable[[], Kernel]) -> Kernel | Future[Kernel]:
    try:
        return pool.submit(make)
    except RuntimeError:
        # The main thread has ended, though others go on: pools take no more work.
        return make()


def build_all(
    specs: Sequence[KernelSpec], arch: str, knobs: Knobs, *, hint: str = ""
) -> tuple[Kernel, ...]:
    """Build several kernels, those to compile at the same time; see ``build``."""
    return tuple(pending.result() for pending in start(specs, arch, knobs, hint=hint))


def is_there(spec: KernelSpec, arch: str, knobs: Knobs) -> bool:
    """Say whether ``build`` finds the kernel and would compile nothing.

    Raises:
        CacheError: a bundle or the user's cache must not be used.
    """
    return _from_caches(Target(spec, arch, knobs.lineinfo), knobs) is not None


def is_of_these_sources(bundle: KernelCache, entry: str) -> bool:
    """Say whether an entry was made from the headers and templates that this jitattn has.

    Its name is that of the source that it holds and of today's headers, else this jitattn asks for
    others. What the source was rendered from, its record says.
    """
    try:
        stored = bundle.read(entry)
    except (OSError, ValueError):
        return False
    arch, symbol, _ = entry.split("-")
    options = stored.meta.get("options")
    if not isinstance(options, list):
        return False
    return (
        entry == _entry_of(arch, symbol, stored.source, [str(option) for option in options])
        and stored.meta.get("templates") == templates_digest()
    )


def read_bundle(spec: KernelSpec, arch: str, folder: Path) -> Kernel | None:
    """Return a kernel that the bundle ``folder`` holds; None where it doesn't.

    Raises:
        CacheError: the bundle must not be used.
    """
    started = time.perf_counter()
    target = Target(spec, arch, lineinfo=False)
    kernel = _read_bundle(target, target.render()[0], KernelCache(folder))
    return kernel and replace(kernel, seconds=time.perf_counter() - started)


def _read_bundle(target: Target, entry: str, bundle: KernelCache) -> Kernel | None:
    found = bundle.get(entry)
    return None if found is None else _kernel(target, entry, found.cubin, found.meta, "precompiled")


def fill_bundle(spec: KernelSpec, arch: str, folder: Path) -> Kernel:
    """Put one kernel into the bundle ``folder`` unless it is there, and return it.

    Its origin is ``"precompiled"`` or ``"compiled"``.

    Raises:
        CompileError: the kernel does not compile, or there is no compiler.
        CacheError: the bundle must not be used.
        OSError: the bundle cannot be written.
    """
    started = time.perf_counter()
    bundle = KernelCache(folder, mode=0o755)
    target = Target(spec, arch, lineinfo=False)
    entry, source = target.render()
    if (kernel := _read_bundle(target, entry, bundle)) is None:
        cubin, meta = _compile(target, source)
        bundle.put(entry, cubin, source, meta)
        kernel = _kernel(target, entry, cubin, meta, "compiled")
    return replace(kernel, seconds=time.perf_counter() - started)


def headers_of(source: str) -> dict[str, str]:
    """Return the text of every header that a rendered kernel is compiled with, by its name.

    Raises:
        CompilerMissingError: it includes nvidia-cutlass' wrappers, which are not installed.
    """
    from jitattn.jit.cutlass import wrapper_headers  # only a compilation needs them

    return dict((*headers(), *wrapper_headers(source)))


def forget() -> None:
    """Drop the kernels in this process's memory, so that the next ``build`` looks on disk again."""
    _memory.kernels.clear()
    _warned.clear()
    bundle_discovery.forget()


def _from_caches(target: Target, knobs: Knobs) -> Kernel | None:
    """Return the kernel from memory, a bundle or the user's cache."""
    if (kernel := _memory.kernels.get((target, knobs))) is not None:
        return replace(kernel, origin="memory")
    noted = _recall_entry(target, knobs)
    kernel = _read_entry(target, noted, knobs) if noted else None
    if kernel is None:
        entry, _ = target.render()
        if (
            entry != noted
            and (kernel := _read_entry(target, entry, knobs))
            and kernel.origin == "disk"
        ):
            _remember_entry(target, entry, knobs)
    if kernel is not None:
        _memory.kernels[target, knobs] = kernel
    return kernel


def _read_entry(target: Target, entry: str, knobs: Knobs) -> Kernel | None:
    for origin, cache in _cache_places(knobs):
        if (stored := cache.get(entry)) is not None:
            logger.debug("%s comes from %s", entry, cache.root)
            return _kernel(target, entry, stored.cubin, stored.meta, origin)
    return None


def _recall_entry(target: Target, knobs: Knobs) -> str | None:
    """Return the entry's name from an earlier process's note."""
    if knobs.cache_dir is None:
        return None
    try:
        entry = KernelCache(knobs.cache_dir).recall(target.note_key())
    except CacheError:
        return None  # a bundle may have the kernel, and then the cache does not matter
    return entry if entry and entry.startswith(f"{target.arch}-{target.spec.symbol}-") else None


def _remember_entry(target: Target, entry: str, knobs: Knobs) -> None:
    if knobs.cache_dir is not None:
        KernelCache(knobs.cache_dir).remember(target.note_key(), entry)


def _compile_if_allowed(target: Target, knobs: Knobs, hint: str) -> Kernel:
    if not knobs.jit:
        raise KernelNotFoundError(_not_found_message(target, knobs, hint))
    kernel = _compile_and_store(target, knobs)
    _memory.kernels[target, knobs] = kernel
    return kernel


def _cache_places(knobs: Knobs) -> Iterator[tuple[str, KernelCache]]:
    """Yield where to look, in order; the compiler is asked for after the bundles had nothing."""
    for bundle in bundle_discovery.bundles(knobs):
        yield "precompiled", bundle
    if knobs.cache_dir is None:
        return
    cache = KernelCache(knobs.cache_dir)
    cache.check()
    if knobs.jit:
        try:
            compiler = _usable_compiler(cache)
        except CompilerMissingError:
            pass  # then what any other compiler made is better than nothing
        else:
            yield "disk", cache.division(compiler)
            return
    for division in cache.divisions():
        if not nvrtc.why_refused(division.root.name):
            yield "disk", division


def _usable_compiler(cache: KernelCache) -> str:
    """Return ``nvrtc.toolchain()``; from a note, if possible, instead of loading NVRTC.

    Raises:
        CompilerMissingError: there is none, or the driver cannot load what it makes.
    """
    compiler = _recall_compiler(cache)
    if reason := nvrtc.why_refused(compiler):
        raise CompilerMissingError(reason)
    return compiler


def _recall_compiler(cache: KernelCache) -> str:
    key = nvrtc.search_digest()
    noted, *libraries = (cache.recall(key) or "").splitlines() or [""]
    if noted and libraries and nvrtc.still_there(libraries):
        return noted
    toolchain = nvrtc.toolchain()
    if loaded := nvrtc.loaded_libraries():
        cache.remember(key, "\n".join((toolchain, *loaded)))
    return toolchain


def _compile_and_store(target: Target, knobs: Knobs) -> Kernel:
    entry, source = target.render()
    compiler = nvrtc.toolchain()
    if reason := nvrtc.why_refused(compiler):
        raise CompilerMissingError(reason)
    if knobs.cache_dir is None:
        _warn_once("there is no home folder, so compiled kernels stay in memory")
        return _kernel(target, entry, *_compile(target, source), "compiled")
    cache = KernelCache(knobs.cache_dir).division(compiler)
    with cache.locked(entry, knobs.lock_timeout):
        # Another process may have compiled it while this one waited.
        if (stored := cache.get(entry)) is not None:
            return _kernel(target, entry, stored.cubin, stored.meta, "disk")
        cubin, meta = _compile(target, source)
        try:
            cache.put(entry, cubin, source, meta)
        except CacheError:
            raise
        except OSError as error:
            _warn_once(f"compiled kernels stay in memory, because they cannot be stored: {error}")
        else:
            _remember_entry(target, entry, knobs)
    return _kernel(target, entry, cubin, meta, "compiled")


def _compile(target: Target, source: str) -> tuple[bytes, Meta]:
    from jitattn.jit.cubin import resources_of  # only a compilation needs them
    from jitattn.jit.cutlass import wrapper_package

    started = time.perf_counter()
    symbol = target.spec.symbol
    compiled = nvrtc.compile_cubin(
        source,
        name=f"{symbol}.cu",
        headers=headers_of(source),
        options=target.options,
    )
    seconds = time.perf_counter() - started
    logger.info("compiled %s for %s in %.2f s", symbol, target.arch, seconds)
    resources = resources_of(compiled.cubin, symbol, target.arch)
    # No clock, host or path in it: machines with the same packages make equal bundles.
    meta: Meta = {
        "symbol": symbol,
        "arch": target.arch,
        "options": list(target.options),
        "compiler": nvrtc.toolchain(),
        "outside_headers": list(wrapper_package(source)),
        "jitattn": __version__,
        "templates": templates_digest(),
        **asdict(resources),
    }
    return compiled.cubin, meta


def _kernel(target: Target, entry: str, cubin: bytes, meta: Meta, origin: str) -> Kernel:
    return Kernel(
        spec=target.spec,
        symbol=target.spec.symbol,
        arch=target.arch,
        cubin=cubin,
        origin=origin,
        seconds=0.0,
        registers=_count(meta, "registers"),
        spill_bytes=_count(meta, "spill_bytes"),
        smem_bytes=_count(meta, "smem_bytes"),
        compiler=str(meta.get("compiler", "unknown")),
        entry=entry,
    )


def _count(meta: Meta, name: str) -> int:
    value = meta.get(name)
    return value if isinstance(value, int) else 0


def _not_found_message(target: Target, knobs: Knobs, hint: str) -> str:
    from shlex import quote

    found = [
        bundle.root
        for bundle in bundle_discovery.bundles(knobs)
        if bundle.root not in knobs.precompiled
    ]
    places = [*knobs.precompiled, *found, *([knobs.cache_dir] if knobs.cache_dir else [])]
    searched = ", ".join(_searched(place) for place in places) or "nowhere"
    if target.lineinfo:
        return (
            f"{target.spec.symbol} for {target.arch} with source lines (JITATTN_LINEINFO=1) is not "
            f"there, and JITATTN_JIT=0 forbids compiling it. Searched: {searched}. Bundles have no "
            "source lines: unset JITATTN_LINEINFO, or unset JITATTN_JIT"
        )
    unusable = "".join(_unusable_entry(target, KernelCache(place)) for place in places)
    folder = quote(str(knobs.precompiled[0])) if knobs.precompiled else "DIR"
    return (
        f"{target.spec.symbol} for {target.arch} is not precompiled, and JITATTN_JIT=0 forbids "
        f"compiling it. Searched: {searched}.{unusable} Make it {_advice(target, hint, folder)}\n"
        f"and set JITATTN_PRECOMPILED={folder}"
    )


def _searched(place: Path) -> str:
    reason = why_unreadable(place)
    return f"{place} ({reason})" if reason else f"{place}"


def _advice(target: Target, hint: str, folder: str) -> str:
    from shlex import quote

    variant = target.spec.transform
    if variant is not None and variant not in [ready.code for ready in READY.values()]:
        return (
            f"where its variant {variant.name!r} is defined, from the planner's arguments, with\n"
            f"    jitattn.precompile(..., arch={target.arch!r}, out={folder!r})"
        )
    config = quote(hint or target.spec.config_text())
    return f"with\n    jitattn precompile --arch {target.arch} --config {config} -o {folder}"


def _unusable_entry(target: Target, place: KernelCache) -> str:
    """Say what of the kernel a bundle or cache has that can't be taken."""
    entry, _ = target.render()
    if place.names(entry):
        try:
            place.read(entry)
        except (OSError, ValueError) as error:
            return f" {place.root} has it damaged ({error}): fill that bundle again."
        return ""
    if place.names(f"{target.arch}-{target.spec.symbol}-"):
        return (
            f" {place.root} has it as another version of jitattn renders it: fill that bundle "
            "again."
        )
    return ""


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"jitattn: {reason}; set JITATTN_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
