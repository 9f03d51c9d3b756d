"""Finding or compiling a kernel, with tiny kernels in place of the real ones."""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jitattn.base import knobs
from jitattn.base.errors import (
    CacheError,
    CompileError,
    CompilerMissingError,
    KernelNotFoundError,
)
from jitattn.base.knobs import Knobs
from jitattn.jit import build, nvrtc, render, sources
from jitattn.jit.cache import KernelCache
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import KernelSpec

REPOSITORY = Path(__file__).parents[2]
ARCH = "sm_90a"


@dataclass(frozen=True)
class TinySpec:
    """Stands in for a kernel's spec: it renders to one line."""

    symbol: str = "tiny"
    body: str = "*x = one();"

    transform = None

    def context(self) -> dict[str, object]:
        return {"symbol": self.symbol}

    def config_text(self) -> str:
        return "head_dim=64,page_size=16"


class Compilations:
    """Counts calls of the compiler, and can make them fail."""

    def __init__(self) -> None:
        self.count = 0
        self.real = nvrtc.compile_cubin
        self.fails = False

    def __call__(self, source: str, **arguments: object) -> nvrtc.Compiled:
        self.count += 1
        if self.fails:
            raise AssertionError("compiled although forbidden")
        return self.real(source, **arguments)  # type: ignore[arg-type]


def tiny_render(spec: TinySpec, arch: str) -> str:
    signature = f'extern "C" __global__ void {spec.symbol}(float* x)'
    return f'#include "one.cuh"\n{signature} {{ {spec.body} }}\n'


def tiny_inputs(spec: TinySpec, arch: str) -> dict[str, bytes]:
    return {"source": tiny_render(spec, arch).encode()}


def tiny_headers() -> tuple[tuple[str, str], ...]:
    return (("one.cuh", "__device__ float one() { return 1.f; }\n"),)


@pytest.fixture(autouse=True)
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    counter = Compilations()
    monkeypatch.setattr(render, "render", tiny_render)
    monkeypatch.setattr(build, "headers", tiny_headers)
    monkeypatch.setattr(build, "inputs", tiny_inputs)
    monkeypatch.setattr(nvrtc, "compile_cubin", counter)
    build.forget()
    yield counter
    build.forget()


@pytest.fixture
def settings(tmp_path: Path) -> Knobs:
    return Knobs(cache_dir=tmp_path / "cache")


def get(settings: Knobs, spec: TinySpec | None = None, **arguments: str) -> build.Kernel:
    return build.build(spec or TinySpec(), ARCH, settings, **arguments)  # type: ignore[arg-type]


def fresh(settings: Knobs, spec: TinySpec | None = None) -> build.Kernel:
    """Build as a new process would."""
    build.forget()
    return get(settings, spec)


def off(settings: Knobs) -> Knobs:
    return replace(settings, jit=False)


# ---------------------------------------------------------------------------- names


def test_the_name_covers_source_headers_architecture_and_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name(arch: str = ARCH, lineinfo: bool = False, body: str = "*x = one();") -> str:
        return build.Target(TinySpec(body=body), arch, lineinfo).render()[0]  # type: ignore[arg-type]

    names = {name(), name("sm_80"), name(lineinfo=True), name(body="*x = 2.f;")}
    monkeypatch.setattr(build, "headers", lambda: (("one.cuh", "// changed"),))
    names.add(name())
    monkeypatch.setattr(build, "headers", lambda: (("two.cuh", "// changed"),))
    names.add(name())
    assert len(names) == 6


def test_the_name_covers_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Knobs
) -> None:
    entry = get(settings).entry
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "5.2;7.0;9.0+PTX")
    monkeypatch.setattr(nvrtc, "toolchain", lambda: "V1.0.0 CL-1")
    other = Knobs(cache_dir=tmp_path / "other", lock_timeout=1.0, check=True)
    assert fresh(other).entry == entry


# ---------------------------------------------------------------------------- origins


def test_compiled_then_memory_then_disk(settings: Knobs, compilations: Compilations) -> None:
    first = get(settings)
    assert first.origin == "compiled"
    assert first.cubin.startswith(b"\x7fELF")
    assert (first.symbol, first.arch) == ("tiny", ARCH)
    assert first.registers > 0
    assert first.compiler == nvrtc.toolchain()
    second, third = get(settings), fresh(settings)
    assert (second.origin, third.origin) == ("memory", "disk")
    assert compilations.count == 1
    same = {"origin": "", "seconds": 0.0}
    assert replace(first, **same) == replace(second, **same) == replace(third, **same)


def test_a_bundle_comes_before_the_cache(settings: Knobs, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    made = build.fill_bundle(TinySpec(), ARCH, bundle)  # type: ignore[arg-type]
    again = build.fill_bundle(TinySpec(), ARCH, bundle)  # type: ignore[arg-type]
    assert (made.origin, again.origin) == ("compiled", "precompiled")
    get(settings)
    found = fresh(replace(settings, precompiled=(tmp_path / "missing", bundle)))
    assert found.origin == "precompiled"
    assert found.cubin == made.cubin


def test_a_complete_bundle_asks_nothing_of_compiler_or_cache(
    settings: Knobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.fill_bundle(TinySpec(), ARCH, tmp_path / "bundle")  # type: ignore[arg-type]
    for name in ("toolchain", "compile_cubin", "search_digest", "_binding"):
        monkeypatch.setattr(nvrtc, name, None)
    found = fresh(replace(settings, precompiled=(tmp_path / "bundle",)))
    assert found.origin == "precompiled"
    assert not (tmp_path / "cache").exists()


def test_bundles_are_equal_byte_for_byte(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        build.fill_bundle(TinySpec(), ARCH, tmp_path / folder)  # type: ignore[arg-type]
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_cache_is_divided_by_compiler_and_bundles_are_not(
    settings: Knobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(settings)
    build.fill_bundle(TinySpec(), ARCH, tmp_path / "bundle")  # type: ignore[arg-type]
    monkeypatch.setattr(nvrtc, "search_digest", lambda: "another-environment")
    monkeypatch.setattr(nvrtc, "toolchain", lambda: "V99.0.1 CL-1")
    with_bundle = replace(settings, precompiled=(tmp_path / "bundle",))
    assert fresh(with_bundle).origin == "precompiled"
    assert fresh(settings).origin == "compiled"
    assert len(KernelCache(tmp_path / "cache").divisions()) == 2


def test_reading_asks_a_note_instead_of_the_compiler(
    settings: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(settings)
    compiler = nvrtc.toolchain()
    monkeypatch.setattr(nvrtc, "toolchain", None)
    assert fresh(settings).origin == "disk"
    # A note about a library that has changed since is no answer.
    monkeypatch.setattr(nvrtc, "still_there", lambda libraries: False)
    monkeypatch.setattr(nvrtc, "toolchain", lambda: compiler)
    assert fresh(settings).origin == "disk"


@pytest.mark.parametrize("note", ["", "\n", "V1.0 CL-1", "../../x\n/missing|1|1", "\n\n\n"])
def test_a_damaged_note_does_not_matter(settings: Knobs, note: str) -> None:
    get(settings)
    assert settings.cache_dir is not None
    paths = list((settings.cache_dir / "notes").iterdir())
    assert len(paths) == 2  # of the compiler and of the entry
    for path in paths:
        path.write_text(note)
    assert fresh(settings).origin == "disk"


def test_lineinfo_is_another_kernel(settings: Knobs) -> None:
    plain = get(settings)
    with_lines = get(replace(settings, lineinfo=True))
    assert with_lines.origin == "compiled"
    assert with_lines.entry != plain.entry


def test_a_damaged_entry_is_rebuilt(settings: Knobs) -> None:
    entry = get(settings).entry
    assert settings.cache_dir is not None
    (cubin,) = settings.cache_dir.rglob(f"{entry}/*.cubin")
    cubin.write_bytes(b"damaged")
    assert fresh(settings).origin == "compiled"
    assert fresh(settings).origin == "disk"


# ---------------------------------------------------------------------------- JIT off


def test_without_jit_the_users_cache_is_still_read(
    settings: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(settings)
    for name in ("toolchain", "compile_cubin", "search_digest", "_binding"):
        monkeypatch.setattr(nvrtc, name, None)
    assert fresh(off(settings)).origin == "disk"


def test_without_jit_a_missing_kernel_names_the_command(tmp_path: Path) -> None:
    bundle = tmp_path / "a bundle"
    bundle.mkdir()
    places = (bundle, tmp_path / "nowhere")
    settings = Knobs(cache_dir=tmp_path / "cache", precompiled=places, jit=False)
    with pytest.raises(KernelNotFoundError) as caught:
        get(settings, hint="head_dim=128,page_size=16")
    message = str(caught.value)
    command = f"jitattn precompile --arch sm_90a --config head_dim=128,page_size=16 -o '{bundle}'"
    assert command in message
    assert f"{tmp_path / 'nowhere'} (missing)" in message
    assert "JITATTN_JIT=0" in message
    assert not (tmp_path / "cache").exists()


def test_without_a_hint_the_command_comes_from_the_spec(tmp_path: Path) -> None:
    with pytest.raises(KernelNotFoundError, match="--config head_dim=64,page_size=16 -o DIR"):
        get(Knobs(cache_dir=None, jit=False))
    with pytest.raises(KernelNotFoundError, match="Searched: nowhere"):
        get(Knobs(cache_dir=None, jit=False))


def test_source_lines_are_in_no_bundle_so_none_is_suggested(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    build.fill_bundle(TinySpec(), ARCH, bundle)  # type: ignore[arg-type]
    settings = Knobs(cache_dir=None, precompiled=(bundle,), jit=False, lineinfo=True)
    with pytest.raises(KernelNotFoundError, match="unset JITATTN_LINEINFO, or") as caught:
        get(settings)
    assert "precompile -" not in str(caught.value)
    assert get(replace(settings, lineinfo=False)).origin == "precompiled"


def test_without_jit_nothing_is_compiled(settings: Knobs, compilations: Compilations) -> None:
    compilations.fails = True
    with pytest.raises(KernelNotFoundError):
        build.build_all(
            [TinySpec("a"), TinySpec("b")],  # type: ignore[list-item]
            ARCH,
            off(settings),
        )


# ---------------------------------------------------------------------------- no compiler


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> str:
        raise CompilerMissingError("pip install it")

    monkeypatch.setattr(nvrtc, "toolchain", missing)
    monkeypatch.setattr(nvrtc, "compile_cubin", missing)
    monkeypatch.setattr(nvrtc, "search_digest", lambda: "machine-without-a-compiler")


def test_without_a_compiler_any_cached_kernel_serves(
    settings: Knobs, request: pytest.FixtureRequest
) -> None:
    get(settings)
    request.getfixturevalue("no_compiler")
    assert fresh(settings).origin == "disk"
    with pytest.raises(CompilerMissingError, match="pip install"):
        get(settings, TinySpec("other"))


BLOCKED = """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
from jitattn.jit import build
from jitattn.base import knobs
from jitattn.kernels.common.spec import ScheduleSpec
kernel = build.build(ScheduleSpec(), "sm_90a", knobs.load())
print(kernel.origin, len(kernel.cubin), "torch" in sys.modules)
"""


@pytest.mark.parametrize("jit", ["0", "1"])
def test_a_bundle_works_where_nvrtc_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jit: str
) -> None:
    monkeypatch.undo()
    kernel = build.fill_bundle(ScheduleSpec(), ARCH, tmp_path / "bundle")
    (tmp_path / "bundle").rename(tmp_path / "moved")
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "JITATTN_JIT": jit,
        "JITATTN_PRECOMPILED": str(tmp_path / "moved"),
    }
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"precompiled {len(kernel.cubin)} False\n", done.stderr


# ---------------------------------------------------------------------------- drivers


def test_an_old_driver_is_told_what_to_install(
    settings: Knobs, monkeypatch: pytest.MonkeyPatch, compilations: Compilations
) -> None:
    get(settings)
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (12, 8))
    # What NVRTC 13 made is there, and of no use to this driver.
    for cache_dir in (settings.cache_dir, None):
        with pytest.raises(CompilerMissingError, match=r"CUDA up to 12\.8.*nvidia-cuda-nvrtc-cu12"):
            fresh(replace(settings, cache_dir=cache_dir))
    with pytest.raises(KernelNotFoundError):
        fresh(off(settings))
    assert compilations.count == 1
    monkeypatch.setattr(nvrtc, "toolchain", lambda: "V12.9.86 CL-1")
    monkeypatch.setattr(nvrtc, "search_digest", lambda: "with NVRTC 12")
    assert fresh(settings).origin == "compiled"
    assert fresh(off(settings)).compiler == "V12.9.86 CL-1"


def test_a_build_machine_may_have_an_old_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (12, 8))
    made = build.fill_bundle(TinySpec(), ARCH, tmp_path / "bundle")  # type: ignore[arg-type]
    assert made.origin == "compiled"


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "file", ["attention/schedule.cu.jinja", "attention/decode.cu.jinja", "include/jitattn/ptx.cuh"]
)
def test_errors_name_the_line_of_the_template(
    settings: Knobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    """Break one line of a copy of the templates: the message names that line of that file."""
    monkeypatch.undo()
    folder = tmp_path / "templates"
    shutil.copytree(sources.TEMPLATES, folder)
    at = break_a_line(folder / file)
    monkeypatch.setattr(sources, "TEMPLATES", folder)
    monkeypatch.setattr(render, "TEMPLATES", folder)
    forget_templates()
    spec = next(s for s in real_specs() if Path(file).name.startswith((s.kernel, "ptx")))
    try:
        with pytest.raises(CompileError) as caught:
            build.build(spec, ARCH, settings)
    finally:
        monkeypatch.undo()
        forget_templates()
    expected = f'{file.removeprefix("include/")}({at}): error: identifier "oops" is undefined'
    assert caught.value.first_error == expected
    assert str(caught.value).splitlines()[-1] == expected
    assert caught.value.source_path is not None


def break_a_line(path: Path) -> int:
    """Insert a line with an error in a function or a header; return its number."""
    lines = path.read_text().splitlines()
    in_header = path.suffix == ".cuh"
    wanted = "namespace jitattn {" if in_header else "using namespace jitattn;"
    at = 1 + next(number for number, line in enumerate(lines) if wanted in line)
    bad = "__device__ int broken() { return oops; }" if in_header else "  int32_t broken = oops;"
    path.write_text("\n".join([*lines[:at], bad, *lines[at:]]) + "\n")
    return at + 1


def forget_templates() -> None:
    for function in (sources.headers, sources._texts, render.environment):
        function.cache_clear()


def real_specs() -> tuple[KernelSpec, ...]:
    return specs_of(PlannerConfig.parse("head_dim=16,num_qo_heads=8,num_kv_heads=8"), ARCH)


def test_lineinfo_names_the_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    environment = {"JITATTN_CACHE_DIR": str(tmp_path / "cache")}
    kernels = [
        build.build(ScheduleSpec(), ARCH, knobs.load({**environment, "JITATTN_LINEINFO": value}))
        for value in ("0", "1")
    ]
    assert b"schedule.cu.jinja" not in kernels[0].cubin
    assert b"schedule.cu.jinja" in kernels[1].cubin
    assert b".debug_line" in kernels[1].cubin
    assert kernels[0].entry != kernels[1].entry
    assert kernels[0].registers == kernels[1].registers


def test_a_compile_error_has_log_and_source(settings: Knobs) -> None:
    with pytest.raises(CompileError, match=r'tiny\.cu does not compile.*"oops"') as caught:
        get(settings, TinySpec(body="*x = oops;"))
    assert caught.value.source_path is not None
    assert "oops" in caught.value.source_path.read_text()
    with pytest.raises(CompileError):
        get(settings, TinySpec(body="*x = oops;"))


def test_an_unsafe_cache_or_bundle_is_refused(settings: Knobs, tmp_path: Path) -> None:
    for folder in (tmp_path / "cache", tmp_path / "bundle"):
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(CacheError, match="cache is refused"):
        get(settings)
    with pytest.raises(CacheError, match="bundle is refused"):
        get(Knobs(cache_dir=None, precompiled=(tmp_path / "bundle",)))


# ---------------------------------------------------------------------------- bad cache folders


def test_an_unwritable_cache_warns_once_and_keeps_kernels_in_memory(
    compilations: Compilations,
) -> None:
    settings = Knobs(cache_dir=Path("/proc/jitattn"))
    with pytest.warns(RuntimeWarning, match="stay in memory.*JITATTN_CACHE_DIR") as caught:
        assert get(settings).origin == "compiled"
        assert get(settings).origin == "memory"
        assert get(settings, TinySpec("other")).origin == "compiled"
    assert len(caught) == 1
    assert compilations.count == 2


def test_without_a_home_kernels_stay_in_memory() -> None:
    settings = Knobs(cache_dir=None)
    with pytest.warns(RuntimeWarning, match="no home folder.*JITATTN_CACHE_DIR"):
        assert get(settings).origin == "compiled"
    assert get(settings).origin == "memory"


def test_a_read_only_cache_serves_hits_without_lock_or_write(
    settings: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(settings)

    def read_only(*args: object, **kwargs: object) -> str:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    monkeypatch.setattr(KernelCache, "locked", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fresh(settings).origin == "disk"
    monkeypatch.undo()


def test_a_full_disk_warns_and_serves(settings: Knobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="no space left"):
        assert get(settings).origin == "compiled"
    assert settings.cache_dir is not None
    assert not list(settings.cache_dir.rglob(".staging-*"))


def test_a_stuck_lock_delays_and_warns_only(settings: Knobs) -> None:
    assert settings.cache_dir is not None
    division = KernelCache(settings.cache_dir).division(nvrtc.toolchain())
    entry, _ = build.Target(TinySpec(), ARCH, False).render()  # type: ignore[arg-type]
    owner = f"pid {os.getpid()} on"
    with (
        division.locked(entry, 1.0),
        pytest.warns(RuntimeWarning, match=rf"locks/{entry}\.lock, held by {owner}"),
    ):
        assert get(replace(settings, lock_timeout=0.05)).origin == "compiled"
    assert fresh(settings).origin == "disk"


# ---------------------------------------------------------------------------- many at once


def test_build_all_keeps_the_order(settings: Knobs, compilations: Compilations) -> None:
    specs = [TinySpec(name) for name in ("a", "b", "c")]
    get(settings, specs[1])
    kernels = build.build_all(specs, ARCH, settings)  # type: ignore[arg-type]
    assert [kernel.symbol for kernel in kernels] == ["a", "b", "c"]
    assert [kernel.origin for kernel in kernels] == ["compiled", "memory", "compiled"]
    assert compilations.count == 3
    assert build.build_all([], ARCH, settings) == ()


def test_build_all_reports_a_failure(settings: Knobs) -> None:
    specs = [TinySpec("a"), TinySpec("b", body="oops")]
    with pytest.raises(CompileError, match=r"b\.cu does not compile"):
        build.build_all(specs, ARCH, settings)  # type: ignore[arg-type]


def test_threads_compile_a_kernel_once(settings: Knobs, compilations: Compilations) -> None:
    barrier = threading.Barrier(8)
    kernels: list[build.Kernel] = []

    def work() -> None:
        barrier.wait()
        kernels.append(get(settings))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compilations.count == 1
    assert len({kernel.cubin for kernel in kernels}) == 1
    assert sorted(kernel.origin for kernel in kernels)[0] == "compiled"


# ---------------------------------------------------------------------------- in the background


class Gates:
    """A compiler that begins each kernel and goes on when the test says so."""

    def __init__(self, real: Callable[..., nvrtc.Compiled]) -> None:
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._opened: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._real = real
        self._process = os.getpid()

    def open(self, symbol: str) -> None:
        self._opened[symbol].set()

    def __call__(self, source: str, *, name: str, **arguments: object) -> nvrtc.Compiled:
        if os.getpid() == self._process:  # a child has nobody to open them
            self.begun.put(name.removesuffix(".cu"))
            assert self._opened[name.removesuffix(".cu")].wait(60)
        return self._real(source, name=name, **arguments)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch, compilations: Compilations) -> Gates:
    made = Gates(compilations)
    monkeypatch.setattr(nvrtc, "compile_cubin", made)
    return made


def start(settings: Knobs, *specs: TinySpec) -> tuple[build.Pending, ...]:
    return build.start(specs, ARCH, settings)  # type: ignore[arg-type]


def test_the_first_ones_are_there_before_the_last_is_compiled(
    settings: Knobs, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    pending = start(settings, TinySpec("a"), TinySpec("b"), TinySpec("c"))
    assert {gates.begun.get(timeout=60), gates.begun.get(timeout=60)} == {"a", "b"}
    gates.open("b")
    assert gates.begun.get(timeout=60) == "c"
    gates.open("a")
    assert [p.result().symbol for p in pending[:2]] == ["a", "b"]
    gates.open("c")
    assert pending[2].result().origin == "compiled"
    assert not any(p.was_found for p in pending)


def test_what_exists_is_found_at_once(settings: Knobs, gates: Gates) -> None:
    gates.open("tiny")
    get(settings)
    build.forget()
    for origin in ("disk", "memory"):
        (pending,) = start(settings, TinySpec())
        assert pending.was_found
        assert pending.result().origin == origin


def test_without_jit_nothing_is_left_for_later(settings: Knobs, gates: Gates) -> None:
    with pytest.raises(KernelNotFoundError):
        start(off(settings), TinySpec())
    assert gates.begun.empty()


def test_a_failure_in_the_background_is_told_to_everybody_who_asks(settings: Knobs) -> None:
    good, bad = start(settings, TinySpec("good"), TinySpec("bad", body="oops"))
    assert good.result().origin == "compiled"
    for _ in range(3):
        with pytest.raises(CompileError, match=r"bad\.cu does not compile"):
            bad.result()


def test_asking_again_for_a_failure_keeps_no_frames(settings: Knobs) -> None:
    (pending,) = start(settings, TinySpec(body="no such thing"))
    lengths = []
    for _ in range(5):
        with pytest.raises(CompileError) as caught:
            pending.result()
        lengths.append(len(caught.traceback))
    assert len(set(lengths[1:])) == 1


def test_a_pool_that_takes_no_more_work_is_done_without(
    settings: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread has ended, other threads have not."""

    def refuse(*arguments: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(build.ThreadPoolExecutor, "submit", refuse)
    (pending,) = start(settings, TinySpec())
    assert pending.result().origin == "compiled"


def test_who_builds_what_is_being_compiled_waits_for_it(
    settings: Knobs, gates: Gates, compilations: Compilations
) -> None:
    (pending,) = start(settings, TinySpec())
    assert gates.begun.get(timeout=60) == "tiny"
    origins: list[str] = []
    other = threading.Thread(target=lambda: origins.append(get(settings).origin))
    other.start()
    gates.open("tiny")
    other.join()
    assert (pending.result().origin, origins) == ("compiled", ["memory"])
    assert compilations.count == 1


def _ask_in_child(pending: build.Pending, results: object) -> None:
    warnings.simplefilter("ignore")  # the parent holds the lock of the cache
    results.put(pending.result().origin)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_compiles_what_its_parent_had_begun(settings: Knobs, gates: Gates) -> None:
    (pending,) = start(replace(settings, lock_timeout=0.1), TinySpec())
    assert gates.begun.get(timeout=60) == "tiny"
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_ask_in_child, args=(pending, results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == "compiled"
    gates.open("tiny")
    assert pending.result().origin == "compiled"


LEAVER = textwrap.dedent("""
    from jitattn.jit import build
    from jitattn.base import knobs
    from jitattn.kernels.common.spec import ScheduleSpec

    (pending,) = build.start([ScheduleSpec()], "sm_90a", knobs.load())
    print(pending.was_found)
""")


def test_a_process_that_ends_completes_what_it_began(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment["JITATTN_CACHE_DIR"] = str(tmp_path / "cache")
    for was_found in ("False", "True"):
        done = subprocess.run(
            [sys.executable, "-c", LEAVER], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{was_found}\n", "")
    kernels = KernelCache(tmp_path / "cache")
    assert len(kernels.entries()) == 1
    assert not kernels.verify()


# ---------------------------------------------------------------------------- processes


RACER = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from jitattn.jit import build, nvrtc
    from jitattn.base import knobs
    from jitattn.kernels.common.spec import ScheduleSpec

    nvrtc.version()
    print("ready", flush=True)
    sys.stdin.readline()
    print(build.build(ScheduleSpec(), "sm_90a", knobs.load()).origin)
""")


def test_processes_compile_a_kernel_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment["JITATTN_CACHE_DIR"] = str(tmp_path / "cache")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    origins = [racer.communicate()[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 6
    assert sorted(origins) == ["compiled"] + ["disk"] * 5
    kernels = KernelCache(tmp_path / "cache")
    assert len(kernels.entries()) == 1
    assert not kernels.verify()
    assert not list((tmp_path / "cache").rglob(".staging-*"))


def _build_in_child(settings: Knobs, results: object) -> None:
    results.put(get(settings, TinySpec("child")).origin)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_lock_held_at_a_fork_is_free_in_the_child(settings: Knobs) -> None:
    key = (build.Target(TinySpec("child"), ARCH, False), settings)  # type: ignore[arg-type]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with build._memory.lock(key):
        child = context.Process(target=_build_in_child, args=(settings, results))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    assert results.get() == "compiled"


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    settings = knobs.load({"JITATTN_CACHE_DIR": str(tmp_path / "elsewhere")})
    get(settings)
    assert len(KernelCache(tmp_path / "elsewhere").entries()) == 1
