"""Filling a bundle: configurations in, entries out; worker processes; presets.

Most tests let every configuration need the schedule kernel only: it compiles quickly.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jitattn.base.errors import (
    CacheError,
    CompileError,
    CompilerMissingError,
    ConfigError,
    JitAttnError,
    PrecompileError,
)
from jitattn.base.knobs import Knobs
from jitattn.bundles import progress
from jitattn.bundles.precompile import PRESETS, Failure, Precompiled, Report
from jitattn.jit import build
from jitattn.jit.cache import KernelCache
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import KernelSpec

# The module, for what it keeps to itself.
precompile = importlib.import_module("jitattn.bundles.precompile")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_schedule(config: PlannerConfig, arch: str) -> tuple[KernelSpec, ...]:
        specs_of(config, arch)
        return (ScheduleSpec(),)

    monkeypatch.setattr(precompile, "specs_of", only_schedule)


def run(out: Path, arch: str = "sm_90a", jobs: int | None = 1, config: str = "") -> Report:
    return precompile.precompile(
        config, arch=arch, out=out, jobs=jobs, progress=False, strict=False
    )


# ---------------------------------------------------------------------------- bundles


@pytest.mark.usefixtures("quick")
def test_workers_fill_a_bundle_that_others_can_use(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        report = run(tmp_path / "bundle", arch=",".join(ARCHITECTURES), jobs=2)
    finally:
        os.umask(before)
    assert not report.failures
    assert (report.compiled, report.reused) == (len(ARCHITECTURES), 0)
    assert tuple(entry.arch for entry in report.entries) == ARCHITECTURES
    bundle = KernelCache(tmp_path / "bundle")
    assert {e.name for e in bundle.entries()} == {e.entry for e in report.entries}
    assert not bundle.verify()
    assert not list(bundle.root.glob(".staging-*"))
    for path in (bundle.root, *bundle.root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)
    manifest = json.loads((bundle.root / "bundle.json").read_text())
    assert manifest["architectures"] == sorted(ARCHITECTURES)
    build.forget()
    settings = Knobs(cache_dir=None, precompiled=(bundle.root,), jit=False)
    assert build.build(ScheduleSpec(), "sm_80", settings).origin == "precompiled"


@pytest.mark.usefixtures("quick")
def test_what_is_there_is_reused(tmp_path: Path) -> None:
    first = run(tmp_path)
    second = run(tmp_path, arch="sm_90a,sm_80")
    assert (first.compiled, first.reused) == (1, 0)
    assert (second.compiled, second.reused) == (1, 1)
    assert [entry.origin for entry in second.entries] == ["precompiled", "compiled"]
    reused = second.entries[0]
    assert (reused.entry, reused.registers) == (first.entries[0].entry, first.entries[0].registers)
    assert reused.cubin_bytes > 0


@pytest.mark.usefixtures("quick")
def test_progress_is_shown_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    precompile.precompile("", arch="sm_90a", out=tmp_path, jobs=1, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("jitattn: 1/1 kernels, ")
    assert err.count("\n") == 1
    run(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_a_line_comes_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    with progress.show_progress(3, show=True) as advance:
        advance("sm_80 one", False)
        advance("sm_80 two", True)
        while "2/3" not in (told := capsys.readouterr().err):
            time.sleep(0.01)
    assert "jitattn: 2/3 kernels, 0 s, 1 failed, sm_80 two\n" in told


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("ending", ["closes", "ends"])
def test_a_worker_that_nobody_listens_to_ends_quietly(tmp_path: Path, ending: str) -> None:
    """As after the SIGTERM, or the second Ctrl-C, that ended who asked."""
    job = pickle.dumps(precompile._Job(ScheduleSpec(), "sm_80", tmp_path / "bundle"))
    with subprocess.Popen(
        [sys.executable, "-c", precompile._WORKER.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(job if ending == "closes" else job[:20])
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_real_planner_finds_all_its_kernels(tmp_path: Path) -> None:
    config = PlannerConfig.parse("head_dim=64,page_size=3,page_table=separate")
    report = precompile.precompile(config, arch=["sm_90a"], out=tmp_path, progress=False)
    assert not report.failures
    build.forget()
    settings = Knobs(cache_dir=None, precompiled=(tmp_path,), jit=False)
    kernels = build.build_all(specs_of(config, "sm_90a"), "sm_90a", settings)
    assert {kernel.origin for kernel in kernels} == {"precompiled"}
    assert [kernel.entry for kernel in kernels] == [entry.entry for entry in report.entries]


# A script without a __main__ guard, in a process where torch cannot be imported.
SCRIPT = """
import sys
sys.modules["torch"] = None
import importlib
from jitattn.kernels.common.spec import ScheduleSpec
module = importlib.import_module("jitattn.bundles.precompile")
module.specs_of = lambda config, arch: (ScheduleSpec(),)
report = module.precompile("", arch="sm_80,sm_90a", out=sys.argv[1], jobs=2, progress=False)
print(report.compiled, [str(failure) for failure in report.failures])
"""


def test_a_script_needs_neither_guard_nor_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "bundle"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2 []\n", done.stderr


# ---------------------------------------------------------------------------- configurations


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "configs",
    [
        "head_dim=64",
        PlannerConfig.parse("head_dim=64"),
        {"head_dim": 64},
        ["head_dim=64", {"head_dim": 128}, PlannerConfig.parse("head_dim=256")],
        (config for config in ["head_dim=64"]),
    ],
    ids=["text", "config", "mapping", "list", "generator"],
)
def test_configs_have_many_forms(tmp_path: Path, configs: object) -> None:
    report = precompile.precompile(
        configs,  # type: ignore[arg-type]
        arch="sm_90a",
        out=tmp_path,
        jobs=1,
        progress=False,
    )
    assert len(report.entries) == 1


def test_every_reason_is_told_before_anything_is_made(tmp_path: Path) -> None:
    configs = ["head_dim=100", "page_size=0,head_dim=100"]
    with pytest.raises(ConfigError) as caught:
        precompile.precompile(configs, arch="sm_90a,sm_80", out=tmp_path / "bundle")
    assert len(caught.value.reasons) == 2
    assert "head_dim=100" in str(caught.value)
    assert "page_size=0" in str(caught.value)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("arch", ["sm_999", "", "sm_90a,", []])
def test_an_unknown_architecture_is_refused(tmp_path: Path, arch: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="arch"):
        precompile.precompile("", arch=arch, out=tmp_path)


def test_no_configuration_and_no_job_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration is given"):
        precompile.precompile([], arch="sm_90a", out=tmp_path)
    with pytest.raises(ValueError, match="jobs is 0: expected at least 1"):
        run(tmp_path, jobs=0)


# ---------------------------------------------------------------------------- failures


def test_an_unsafe_or_impossible_folder_is_an_error(tmp_path: Path) -> None:
    unsafe = tmp_path / "unsafe"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    with pytest.raises(CacheError, match="writable by group or others"):
        run(unsafe)
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="not a folder"):
        run(tmp_path / "file")
    with pytest.raises(OSError, match="jitattn"):
        run(Path("/proc/jitattn"))


@pytest.mark.usefixtures("quick")
def test_one_failure_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build.fill_bundle

    def fill(spec: KernelSpec, arch: str, folder: Path) -> build.Kernel:
        if arch == "sm_80":
            raise CompileError("k.cu", "k.cu(1): error: bad", "source")
        return real(spec, arch, folder)

    monkeypatch.setattr(build, "fill_bundle", fill)
    report = run(tmp_path, arch="sm_80,sm_90a")
    assert [entry.arch for entry in report.entries] == ["sm_90a"]
    (failure,) = report.failures
    assert (failure.symbol, failure.arch) == ("jitattn_schedule", "sm_80")
    told = "jitattn_schedule for sm_80: k.cu does not compile: k.cu(1): error: bad"
    assert str(failure) == told
    assert repr(report).startswith("Report(1 kernels compiled, 0 there before, 1 failed, in ")
    assert len(repr(failure)) < 200
    with pytest.raises(
        PrecompileError, match="1 of 2 kernels could not be made; the first is jit"
    ) as caught:
        precompile.precompile("", arch="sm_80,sm_90a", out=tmp_path, jobs=1, progress=False)
    assert caught.value.report.failures[0].error is caught.value.__cause__
    assert told in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_a_missing_compiler_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(spec: KernelSpec, arch: str, folder: Path) -> build.Kernel:
        raise CompilerMissingError("pip install it")

    monkeypatch.setattr(build, "fill_bundle", fill)
    with pytest.raises(CompilerMissingError, match="pip install it"):
        run(tmp_path)


@pytest.mark.usefixtures("quick")
def test_a_worker_that_dies_is_a_failure_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies_on_sm_80 = (
        "import os, sys; sys.path[:] = {path!r}; from jitattn.jit import build\n"
        "from jitattn.bundles.precompile import serve\n"
        "real = build.fill_bundle\n"
        "fails = lambda s, arch, f: os._exit(9) if arch == 'sm_80' else real(s, arch, f)\n"
        "build.fill_bundle = fails\n"
        "serve()"
    )
    monkeypatch.setattr(precompile, "_WORKER", dies_on_sm_80)
    report = run(tmp_path, arch="sm_80,sm_90a,sm_100f,sm_120f", jobs=2)
    assert [entry.arch for entry in report.entries] == ["sm_90a", "sm_100f", "sm_120f"]
    assert [failure.arch for failure in report.failures] == ["sm_80"]
    assert "the worker process ended with status 9" in str(report.failures[0])


def test_outcomes_survive_pickling() -> None:
    error = CompileError("k.cu", "k.cu(1): error: bad", "source")
    failure = pickle.loads(pickle.dumps(Failure(symbol="k", arch="sm_80", error=error)))
    assert isinstance(failure.error, JitAttnError)
    assert "error: bad" in str(failure)


def test_a_report_counts() -> None:
    def entry(origin: str) -> Precompiled:
        numbers = dict.fromkeys(("registers", "spill_bytes", "smem_bytes", "cubin_bytes"), 1)
        return Precompiled(
            entry="e", symbol="k", arch="sm_80", origin=origin, seconds=0.1, **numbers
        )

    entries = (entry("compiled"), entry("precompiled"), entry("precompiled"))
    report = Report(entries=entries, failures=(), seconds=1.0)
    assert (report.compiled, report.reused) == (1, 2)


# ---------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_supported_everywhere(name: str) -> None:
    assert PRESETS[name]
    for config in PRESETS[name]:
        for arch in ARCHITECTURES:
            assert specs_of(PlannerConfig.parse(config), arch)
