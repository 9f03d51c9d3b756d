"""A wheel and an editable install both carry the templates and find them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from jitattn.version import __version__

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from jitattn.jit.render import TEMPLATES, headers, render
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig

print(TEMPLATES)
sys.stdout.write("".join(render(s, "sm_90a") for s in specs_of(PlannerConfig(), "sm_90a")))
sys.stdout.write("".join(name + text for name, text in headers()))
"""


def build(version: str, folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, the build backend, is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", version, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def render_with(folder: Path, cwd: Path) -> tuple[Path, str]:
    """Return where the package in ``folder`` has its templates, and what it renders."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", SCRIPT],
        cwd=cwd, env=environ, check=True, capture_output=True, text=True,
    )  # fmt: skip
    templates, _, text = done.stdout.partition("\n")
    return Path(templates), text


def test_wheel_holds_what_it_should(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {
        f"jitattn/templates/{path.relative_to(ROOT / 'templates').as_posix()}"
        for path in (ROOT / "templates").rglob("*")
        if path.is_file()
    }
    assert templates
    assert templates <= names
    info = f"jitattn-{__version__}.dist-info"
    assert {"jitattn/py.typed", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names
    assert not {name.split("/")[0] for name in names} - {"jitattn", info}


def test_wheel_renders_the_same_bytes_as_the_checkout(wheel: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    templates, text = render_with(unpacked, tmp_path)
    assert templates == unpacked / "jitattn" / "templates"
    checkout, expected = render_with(ROOT, tmp_path)
    assert checkout == ROOT / "templates"
    assert text == expected
    assert "extern" in text


def test_engines_find_their_plugins() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group, plugins in groups.items():
        point = importlib.metadata.EntryPoint("jitattn", plugins["jitattn"], group)
        assert callable(point.load())


def test_editable_install_copies_nothing(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build("wheel:editable", tmp_path)).namelist()
    assert not [name for name in names if name.startswith("jitattn/")]
    assert [name for name in names if name.endswith(".pth")]


def test_installed_metadata_matches() -> None:
    try:
        metadata = importlib.metadata.metadata("jitattn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jitattn is not installed here, only on the path")
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
