"""The doctor reports what is there and what is missing, and never dies of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jitattn.base import knobs
from jitattn.base.errors import CompilerMissingError, DriverError
from jitattn.base.knobs import Knobs
from jitattn.device import driver
from jitattn.device.driver import DeviceFacts
from jitattn.jit import build, nvrtc
from jitattn.jit.cache import KernelCache
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.pages.spec import LayerTablesSpec
from jitattn.tools import cli, doctor
from jitattn.tools.doctor import Finding
from tests.support.model_configs import write_config


def examine(**settings: object) -> dict[str, Finding]:
    chosen = Knobs(**{"cache_dir": None, **settings})  # type: ignore[arg-type]
    return {finding.what: finding for finding in doctor.examine(chosen)}


def test_prints_a_report_and_is_content_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for what in ("python", "torch", "NVRTC", "driver", "cache", "JITATTN_JIT"):
        assert what in printed


def test_names_the_compiler() -> None:
    assert nvrtc.toolchain() in examine()["NVRTC"].found


def test_does_not_ask_a_compiler_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "toolchain", lambda: pytest.fail("asked"))
    assert examine(jit=False)["NVRTC"].ok is None


def test_a_missing_compiler_is_a_fault_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise CompilerMissingError("libnvrtc cannot be loaded: pip install it")

    monkeypatch.setattr(nvrtc, "toolchain", missing)
    assert examine()["NVRTC"].ok is False
    assert cli.main(["doctor"]) == 1
    assert "pip install it" in capsys.readouterr().out


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examine()
    assert found["jinja2"].ok is False
    assert found["torch"].ok is None
    assert found["torch"].advice.startswith("pip install torch, for")
    assert found["nvidia-cutlass"].ok is None
    assert found["nvidia-cutlass"].advice.startswith("pip install nvidia-cutlass, to compile")


@pytest.mark.parametrize("package", ["rich", "platformdirs"])
def test_a_package_that_the_command_line_needs_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delenv("JITATTN_CACHE_DIR")
    assert cli.main(["doctor"]) == 1
    assert f"{package}: pip install {package}" in capsys.readouterr().out
    assert cli.main(["cache", "list"]) == 1
    assert f"{package} is not installed" in capsys.readouterr().err


def test_who_may_not_compile_is_not_told_to_install_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert {"nvidia-cutlass", "nvidia-cuda-nvrtc"}.isdisjoint(examine(jit=False))


def test_every_dependency_is_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", text)[0] for text in project["dependencies"]}
    assert names - {"cuda-python"} <= set(doctor._PACKAGES)  # which brings cuda-bindings


def test_no_driver_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "driver_version", lambda: None)
    found = examine()
    assert found["driver"].ok is None
    assert "device 0" not in found


def facts(index: int) -> DeviceFacts:
    capabilities = [(9, 0), (7, 5)]
    if index >= len(capabilities):
        raise DriverError(f"no CUDA device {index}")
    return DeviceFacts(
        index=index,
        name=f"Card {index}",
        compute_capability=capabilities[index],
        num_sms=100,
        max_smem_bytes=1,
    )


def test_lists_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(driver, "device_facts", facts)
    found = examine()
    assert found["driver"].ok is True
    assert "runs sm_90a kernels" in found["device 0"].found
    assert found["device 1"].ok is None
    assert "no kernels" in found["device 1"].found


def test_an_old_driver_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (12, 8))
    monkeypatch.setattr(driver, "device_facts", facts)
    found = examine()
    assert found["driver"].found == "knows CUDA up to 12.8"
    assert found["NVRTC"].ok is False
    assert "pip install 'nvidia-cuda-nvrtc-cu12>=12.9,<13'" in found["NVRTC"].advice
    monkeypatch.setattr(nvrtc, "toolchain", lambda: "V12.9.86 CL-1")
    assert examine()["NVRTC"].ok is True


def test_a_driver_without_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(index: int) -> DeviceFacts:
        raise DriverError("no CUDA-capable device")

    monkeypatch.setattr(nvrtc, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(driver, "device_facts", none)
    assert "no CUDA-capable device" in examine()["device"].found


def test_looking_creates_no_cache(tmp_path: Path) -> None:
    found = examine(cache_dir=tmp_path / "a" / "b")
    assert "0 kernels" in found["cache"].found
    assert not list(tmp_path.iterdir())


def test_no_home_is_no_fault() -> None:
    assert examine()["cache"].ok is None


@pytest.mark.parametrize(
    ("flags", "free", "word"), [(os.ST_RDONLY, 9, "read-only"), (0, 0, "full"), (0, 9, "")]
)
def test_a_cache_on_a_bad_file_system_gets_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: int, free: int, word: str
) -> None:
    status = SimpleNamespace(f_flag=flags, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda folder: status)
    finding = examine(cache_dir=tmp_path)["cache"]
    assert word in finding.found
    assert ("JITATTN_CACHE_DIR" in finding.advice) == bool(word)


def test_missing_bindings_are_a_fault_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise CompilerMissingError(f"cuda.bindings.nvrtc is missing: {nvrtc._INSTALL}")

    monkeypatch.setattr(nvrtc, "toolchain", missing)
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (13, 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delitem(sys.modules, "jitattn.device.driver")
    monkeypatch.delattr("jitattn.device.driver")
    found = examine()
    assert (found["NVRTC"].ok, found["device"].ok) == (False, False)
    assert "pip install cuda-python" in found["NVRTC"].advice
    assert found["device"].advice == "pip install cuda-python"


def test_an_unsafe_cache_is_a_fault(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    finding = examine(cache_dir=tmp_path)["cache"]
    assert finding.ok is False
    assert "chmod" in finding.advice


def doctor_says(
    capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, dict[str, object]]]:
    """Return the exit status, and the findings by what they are about."""
    status = cli.main(["doctor", "--json", *options])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0)
    return status, {finding["what"]: finding for finding in report["findings"]}


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Path]:
    build.forget()
    build.fill_bundle(LayerTablesSpec(), "sm_90a", tmp_path / "bundle")
    yield tmp_path / "bundle"
    build.forget()


def test_a_deployment_with_a_bundle_may_do_without_a_compiler(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JITATTN_PRECOMPILED", str(bundle))
    monkeypatch.setenv("JITATTN_JIT", "0")
    status, found = doctor_says(capsys)
    assert status == 0
    assert found["kernels"]["found"] == "1 that need no compiler"


def spoil_nothing(bundle: Path) -> None: ...


def remove(bundle: Path) -> None:
    shutil.rmtree(bundle)


def damage(bundle: Path) -> None:
    (next(bundle.glob("sm_*")) / "kernel.cubin").unlink()


def rename(bundle: Path) -> None:
    (entry,) = bundle.glob("sm_*")
    stored = KernelCache(bundle).read(entry.name)
    shutil.rmtree(entry)
    other = f"{entry.name[:-32]}{'0' * 32}"
    KernelCache(bundle).put(other, stored.cubin, stored.source, stored.meta)


def made_from_other_templates(bundle: Path) -> None:
    (entry,) = bundle.glob("sm_*")
    stored = KernelCache(bundle).read(entry.name)
    shutil.rmtree(entry)
    meta = {**stored.meta, "templates": "0" * 64}
    KernelCache(bundle).put(entry.name, stored.cubin, stored.source, meta)


@pytest.mark.parametrize(
    ("spoil", "variables", "what", "words"),
    [
        (remove, {}, "bundle", "(missing)"),
        (remove, {"JITATTN_JIT": "0"}, "kernels", "0 that need no compiler"),
        (spoil_nothing, {"JITATTN_JIT": "0", "JITATTN_PRECOMPILED": ""}, "kernels", "0 that"),
        (damage, {}, "bundle", "1 damaged"),
        (rename, {}, "bundle", "1 of other sources"),
        (made_from_other_templates, {}, "bundle", "1 of other sources"),
        (spoil_nothing, {"JITATTN_JTI": "0"}, "JITATTN_JTI", "unknown"),
        (spoil_nothing, {"JITATTN_BUNDLE_SHA256": "0" * 64}, "pinned bundle", "refused"),
    ],
)
def test_what_cannot_serve_is_a_fault(
    bundle: Path,
    spoil: Callable[[Path], None],
    variables: dict[str, str],
    what: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(bundle)
    monkeypatch.setattr(knobs, "_named", set())
    monkeypatch.setattr(warnings, "warn", lambda *arguments, **options: None)
    for name, value in {"JITATTN_PRECOMPILED": str(bundle), **variables}.items():
        monkeypatch.setenv(name, value)
    status, found = doctor_says(capsys)
    assert status == 1
    assert found[what]["ok"] is False
    assert words in str(found[what]["found"])
    assert found[what]["advice"]


def test_all_kernels_of_a_model_are_looked_for(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    precompile = importlib.import_module("jitattn.bundles.precompile")
    specs = [LayerTablesSpec(), ScheduleSpec()]
    monkeypatch.setattr(precompile, "specs_of", lambda config, arch: tuple(specs))
    monkeypatch.setenv("JITATTN_PRECOMPILED", str(bundle))
    monkeypatch.setenv("JITATTN_JIT", "0")
    model = write_config(tmp_path, "qwen3-8b")
    status, found = doctor_says(capsys, "--model", str(model))  # for what the bundle is for
    assert status == 1
    told = "1 of its 2 kernels are there; missing: jitattn_schedule for sm_90a"
    assert found["model"]["found"] == told
    assert "jitattn precompile --arch sm_90a --model" in str(found["model"]["advice"])
    del specs[1]
    assert doctor_says(capsys, "--model", str(model))[0] == 0
    assert doctor_says(capsys, "--model", str(model), "--arch", "sm_80")[0] == 1
    assert cli.main(["doctor", "--arch", "sm_80", "--dtype", "float16"]) == 2


def test_a_bundle_without_kernels_is_worth_a_word(tmp_path: Path) -> None:
    assert "JITATTN_PRECOMPILED" in examine(precompiled=(tmp_path,))["bundle"].advice
