"""Fill a bundle: compile the kernels of many configurations, without a GPU and without torch.

Each worker is a fresh Python process that reads jobs from a pipe. Forking would copy threads and
locks of the caller; multiprocessing's other ways run the caller's main module again, which a
script without a ``__main__`` guard does not survive.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from jitattn.base.errors import (
    CompileError,
    CompilerMissingError,
    ConfigError,
    JitAttnError,
    PrecompileError,
)
from jitattn.base.validate import check_count, check_flag
from jitattn.bundles.progress import Advance, show_progress
from jitattn.jit.cache import KernelCache
from jitattn.kernels.registry import AnyConfig, config_of, parse_config, specs_of
from jitattn.spec.family import KernelSpec

if TYPE_CHECKING:
    from jitattn.jit.build import Kernel

_PAGE_SIZES = (16, 32, 64)
_PAGE_TABLES = ("shared", "separate")

# The caller's search path travels along: it knows where it found this package and the compiler.
_WORKER = (
    "import sys; sys.path[:] = {path!r}; from jitattn.bundles.precompile import serve; serve()"
)


def _everyday(heads: str) -> tuple[str, ...]:
    return tuple(
        f"{heads},page_size={page_size},page_table={page_table}"
        for page_size in _PAGE_SIZES
        for page_table in _PAGE_TABLES
    )


PRESETS: Mapping[str, tuple[str, ...]] = {
    "llama-3.1-8b": _everyday("num_qo_heads=32,num_kv_heads=8,head_dim=128"),
    "llama-3.1-70b": _everyday("num_qo_heads=64,num_kv_heads=8,head_dim=128"),
    "mistral-7b": _everyday("num_qo_heads=32,num_kv_heads=8,head_dim=128"),
    "qwen2.5-7b": _everyday("num_qo_heads=28,num_kv_heads=4,head_dim=128"),
    "qwen3-30b-a3b": _everyday("num_qo_heads=32,num_kv_heads=4,head_dim=128"),
    "gemma-2-9b": _everyday("num_qo_heads=16,num_kv_heads=8,head_dim=256,logits_soft_cap=50.0"),
    "gpt-oss-20b": _everyday("num_qo_heads=64,num_kv_heads=8,head_dim=64,use_sinks=true"),
}
"""Planner arguments of well-known models, for the usual page sizes and both page tables."""


@dataclass(frozen=True, kw_only=True)
class Precompiled:
    """One kernel of a bundle."""

    entry: str
    symbol: str
    arch: str
    origin: str
    """``"compiled"`` now, or ``"precompiled"`` before."""
    seconds: float
    registers: int
    spill_bytes: int
    smem_bytes: int
    cubin_bytes: int
    stored_bytes: int = 0
    """Of its entry: the kernel, its source and what is known of it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A kernel that could not be put into the bundle."""

    symbol: str
    arch: str
    error: Exception

    def __str__(self) -> str:
        """Name the kernel and say what happened, in a line."""
        if type(self.error) is not CompileError:
            return f"{self.symbol} for {self.arch}: {self.error}"
        where = f" (rendered source: {path})" if (path := self.error.source_path) else ""
        return (
            f"{self.symbol} for {self.arch}: {self.error.name} does not compile: "
            f"{self.error.first_error}{where}"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """What ``precompile`` did."""

    entries: tuple[Precompiled, ...]
    """Every kernel asked for that the bundle now holds, in the order they were asked for."""
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def compiled(self) -> int:
        """How many entries were compiled now."""
        return sum(entry.origin == "compiled" for entry in self.entries)

    @property
    def reused(self) -> int:
        """How many entries the bundle held already."""
        return len(self.entries) - self.compiled

    def __repr__(self) -> str:
        """Count; entries and failures are many."""
        return (
            f"Report({self.compiled} kernels compiled, {self.reused} there before, "
            f"{len(self.failures)} failed, in {self.seconds:.1f} s)"
        )


@dataclass(frozen=True)
class _Job:
    spec: KernelSpec
    arch: str
    folder: Path


_Outcome = Precompiled | Failure
Config = AnyConfig | str | Mapping[str, object]


def precompile(
    configs: Config | Iterable[Config],
    arch: str | Sequence[str],
    out: str | os.PathLike[str],
    jobs: int | None = None,
    progress: bool = True,
    *,
    strict: bool = True,
) -> Report:
    """Put every kernel that planners of ``configs`` may need into the bundle ``out``.

    Args:
        configs: one or more sets of planner arguments: a mapping, a string as ``--config`` takes it
            (``"head_dim=128,page_size=16"``), or a PlannerConfig. A string that begins with
            ``kernel=preprocess`` selects kernels of ``preprocess_qkv`` and ``append_kv``, and
            ``kernel=gather,kv_dtype=..,out_dtype=..`` one of ``gather_kv``.
        arch: architectures, as a sequence or separated by commas: ``"sm_90a,sm_80"``.
        out: the folder; created, readable by everyone, if it does not exist. Kernels that it holds
            already are not compiled again.
        jobs: worker processes; None: one for each CPU this process may use.
        progress: show progress on stderr; without a terminal that is a line every few seconds.
        strict: raise when a kernel could not be made. One does not stop the others, either way.

    Returns:
        What is in the bundle now and, with ``strict=False``, what failed.

    Raises:
        PrecompileError: with ``strict``, some kernels could not be made; the others are there.
        ConfigError: some arguments have no kernel; nothing has been compiled then.
        CompilerMissingError: NVRTC, its binding or nvidia-cutlass is not installed.
        CacheError: ``out`` is owned by someone else, or others may write to it.
        OSError: ``out`` cannot be written.
    """
    started = time.perf_counter()
    jobs = len(os.sched_getaffinity(0)) if jobs is None else check_count("jobs", jobs)
    check_flag("progress", progress)
    check_flag("strict", strict)
    folder = Path(out).absolute()
    work = [_Job(spec, name, folder) for spec, name in kernels_of(configs, arch)]
    bundle = KernelCache(folder, mode=0o755)
    bundle.create()
    outcomes = _run(work, jobs, progress)
    for outcome in outcomes:
        if isinstance(outcome, Failure) and isinstance(outcome.error, CompilerMissingError):
            raise outcome.error
    bundle.write_manifest()
    report = Report(
        entries=tuple(outcome for outcome in outcomes if isinstance(outcome, Precompiled)),
        failures=tuple(outcome for outcome in outcomes if isinstance(outcome, Failure)),
        seconds=time.perf_counter() - started,
    )
    if strict:
        _refuse_failures(report)
    return report


def _refuse_failures(report: Report) -> None:
    if report.failures:
        first, count = report.failures[0], len(report.failures)
        total = count + len(report.entries)
        raise PrecompileError(
            f"{count} of {total} kernels could not be made; the first is {first}", report
        ) from first.error


def kernels_of(
    configs: Config | Iterable[Config], arch: str | Sequence[str]
) -> list[tuple[KernelSpec, str]]:
    """Return what ``precompile`` of these puts into a bundle, each with its architecture.

    Raises:
        ConfigError: some arguments have no kernel.
    """
    return list(_kernels(_configs(configs), _archs(arch)))


def serve() -> None:
    """Be a worker: read pickled jobs from stdin until it ends, answer each on stdout.

    It ends without a word when nobody reads its answers: then the one who asked has ended.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever else prints must not get between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(KeyboardInterrupt):
        while True:
            try:
                job = pickle.load(sys.stdin.buffer)
                answer = _fill(job)
            except (EOFError, pickle.UnpicklingError):
                return
            try:
                pickle.dump(answer, answers)
                answers.flush()
            except BrokenPipeError:
                # What is left in the buffer is written once more at the end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())
                return


class _Worker:
    """A process that compiles one kernel after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _WORKER.format(path=sys.path)]
        # In a group of its own a terminal's Ctrl-C does not reach it, even while it starts.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )

    def run(self, job: _Job) -> _Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            answer: _Outcome = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            error = JitAttnError(f"the worker process ended with status {self._process.wait()}")
            return Failure(symbol=job.spec.symbol, arch=job.arch, error=error)
        return answer

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the worker at once, which leaves no half of an entry."""
        self._process.kill()

    def close(self) -> None:
        """Let the worker finish what it does, and end."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process.wait()


def _run(work: Sequence[_Job], jobs: int, progress: bool) -> list[_Outcome]:
    """Return the outcome of each job, in their order; only what is missing takes long."""
    outcomes = {job: outcome for job in work if (outcome := _look_up(job)) is not None}
    missing = [job for job in work if job not in outcomes]
    if missing:
        with show_progress(len(missing), progress) as advance:
            made = _make(missing, jobs, advance)
        outcomes |= zip(missing, made, strict=True)
    return [outcomes[job] for job in work]


def _make(work: Sequence[_Job], jobs: int, advance: Advance) -> list[_Outcome]:
    count = min(jobs, len(work))
    if count < 2:
        return [_counted(_fill(job), advance) for job in work]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    everyone: list[_Worker] = []
    is_ending = threading.Event()

    def add_worker() -> None:
        everyone.append(_Worker())
        idle.put(everyone[-1])

    def run(job: _Job) -> _Outcome:
        worker = idle.get()
        outcome = worker.run(job)
        if worker.alive or is_ending.is_set():
            idle.put(worker)
        else:
            add_worker()
        return _counted(outcome, advance)

    # One thread waits for each process.
    pool = ThreadPoolExecutor(count, thread_name_prefix="jitattn-precompile")
    try:
        for _ in range(count):
            add_worker()
        return list(pool.map(run, work))
    finally:
        is_ending.set()
        try:
            pool.shutdown(cancel_futures=True)
        except KeyboardInterrupt:  # once more: they need not finish what they do
            for worker in everyone:
                worker.kill()
            raise
        finally:
            for worker in everyone:
                worker.close()


def _counted(outcome: _Outcome, advance: Advance) -> _Outcome:
    advance(f"{outcome.arch} {outcome.symbol}", isinstance(outcome, Failure))
    return outcome


def _look_up(job: _Job) -> _Outcome | None:
    from jitattn.jit.build import read_bundle

    try:
        kernel = read_bundle(job.spec, job.arch, job.folder)
    except (JitAttnError, OSError, ValueError) as error:
        return Failure(symbol=job.spec.symbol, arch=job.arch, error=error)
    return None if kernel is None else _precompiled(kernel, job.folder)


def _fill(job: _Job) -> _Outcome:
    from jitattn.jit.build import (
        fill_bundle,  # imports Jinja, which --help and the like can do without
    )

    try:
        kernel = fill_bundle(job.spec, job.arch, job.folder)
    except (JitAttnError, OSError, ValueError) as error:
        return Failure(symbol=job.spec.symbol, arch=job.arch, error=error)
    return _precompiled(kernel, job.folder)


def _precompiled(kernel: Kernel, folder: Path) -> Precompiled:
    return Precompiled(
        entry=kernel.entry, symbol=kernel.symbol, arch=kernel.arch, origin=kernel.origin,
        seconds=kernel.seconds, registers=kernel.registers, spill_bytes=kernel.spill_bytes,
        smem_bytes=kernel.smem_bytes, cubin_bytes=len(kernel.cubin),
        stored_bytes=sum(file.stat().st_size for file in (folder / kernel.entry).iterdir()),
    )  # fmt: skip


def _configs(configs: Config | Iterable[Config]) -> list[AnyConfig]:
    one = isinstance(configs, (AnyConfig, str, Mapping))
    given: list[Config] = [configs] if one else list(configs)  # type: ignore[list-item, arg-type]
    if not given:
        raise ConfigError(["no configuration is given"])
    return [_config(config) for config in given]


def _config(config: Config) -> AnyConfig:
    if isinstance(config, AnyConfig):
        return config
    if isinstance(config, str):
        return parse_config(config)
    return config_of(config)


def _archs(arch: str | Sequence[str]) -> list[str]:
    names = arch.split(",") if isinstance(arch, str) else arch
    if not names:
        raise ConfigError(["no arch is given"])
    return list(dict.fromkeys(name.strip() for name in names))


def _kernels(
    configs: Sequence[AnyConfig], archs: Sequence[str]
) -> dict[tuple[KernelSpec, str], None]:
    """Return each kernel once, in the order of first need, as the keys of a dict."""
    kernels: dict[tuple[KernelSpec, str], None] = {}
    reasons: dict[str, None] = {}
    for arch in archs:
        for config in configs:
            try:
                specs = specs_of(config, arch)
                kernels |= {(spec, arch): None for spec in specs}
            except ConfigError as error:
                reasons |= dict.fromkeys(error.reasons)
    if reasons:
        raise ConfigError(list(reasons))
    return kernels
