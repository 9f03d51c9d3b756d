"""Examples run, generated documents are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import re
import runpy
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import jitattn
from jitattn import knobs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs/examples/decode.py"))
    assert capsys.readouterr().out == "torch.Size([3, 32, 128]) torch.Size([3, 32])\n"


def test_readme_example_is_the_file_and_short() -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert example == (ROOT / "docs/examples/decode.py").read_text()
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_example_of_variants_runs_and_stands_in_its_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = ROOT / "docs/examples/variant.py"
    runpy.run_path(str(path))
    assert capsys.readouterr().out == "torch.Size([3, 32, 128])\n"
    page = (ROOT / "docs/variants.md").read_text()
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] == path.read_text()


def test_readme_has_two_commands_with_environments_of_their_own() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)
    assert len({command.split()[3] for command in commands}) == 2
    assert commands[0].endswith("jitattn demo")
    assert commands[1].endswith("pytest -n 2 --dist loadfile")


def test_generated_documents_are_current() -> None:
    stale = [
        str(path.relative_to(ROOT))
        for path, text in load_generator().generated().items()
        if not path.is_file() or path.read_text() != text
    ]
    assert stale == [], "run: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_name_real_variables_and_errors(page: Path) -> None:
    text = page.read_text()
    known = set(re.findall(r"JITATTN_[A-Z_]+", inspect.getsource(knobs)))
    assert set(re.findall(r"JITATTN_[A-Z_]+", text)) <= known
    for error in set(re.findall(r"`(\w+Error)`", text)) - {"ValueError", "TypeError"}:
        assert hasattr(jitattn, error), f"{page.name} names {error}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"- (\S+\.md)", navigation)) == pages


def test_every_public_name_has_a_docstring() -> None:
    for name in jitattn.__all__:
        value = getattr(jitattn, name)
        if callable(value):
            assert inspect.getdoc(value), name


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["bench"], *extras["docs"]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if line and not line.startswith("#")}
    assert {name_of(line) for line in wanted} <= pinned


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()
