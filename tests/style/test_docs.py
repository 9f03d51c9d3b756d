"""Examples run, generated documents are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import jitattn
from jitattn.base import knobs
from jitattn.tools import cli
from tests.support import pages_of_docs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# Of packages beside this one, and of another name on purpose.
NOT_FILES = {"cuda/bindings/__init__.py"}
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sparse_tokens", r"torch.Size\(\[2, 16, 512\]\) \[2048, 1500\]"),
        ("sparse_pages", r"torch.Size\(\[2, 32, 128\]\) \[32, 26\] 0\.[0-3]\d*"),
    ],
)
def test_examples_of_sparse_layers_run(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(ROOT / f"docs/examples/{name}.py"))
    assert re.fullmatch(said, capsys.readouterr().out.strip())


def test_the_picture_of_sparse_attention_is_current() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/pictures.py"))
    assert drawn["SPARSE"].read_text() == drawn["sparse_svg"](), "run: python docs/pictures.py"


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


def test_files_named_in_pages_and_sources_exist() -> None:
    """Whole paths and ends of paths alike."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git checkout")
    files = tracked.stdout.splitlines()
    ends = {
        "/".join(file.split("/")[start:]) for file in files for start in range(file.count("/") + 1)
    }
    missing = [
        f"{file}: {name}"
        for file in files
        if file.endswith(".md") or file.startswith(("jitattn/", "templates/"))
        for name in set(
            re.findall(
                r"(?<![\w./$<>-])(?:[\w-]+/)+[\w-]+\.(?:py|cuh|cu)(?:\.jinja)?\b",
                (ROOT / file).read_text(),
            )
        )
        if name not in ends | NOT_FILES
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_name_real_variables_and_errors(page: Path) -> None:
    text = page.read_text()
    known = set(re.findall(r"JITATTN_[A-Z_]+", inspect.getsource(knobs)))
    macros = {"JITATTN_KERNEL"}  # of templates, which declares a kernel's entry point
    assert set(re.findall(r"JITATTN_[A-Z_]+", text)) <= known | macros
    for error in set(re.findall(r"`(\w+Error)`", text)) - {"ValueError", "TypeError"}:
        assert hasattr(jitattn.errors, error), f"{page.name} names {error}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(re.findall(r"(?m)^ +- .*?(\S+\.md)$", navigation)) == sorted(pages)


def test_site_builds_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs pip install 'jitattn[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    # Its authors' notice about mkdocs' successor.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        asked = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.?https?:", page.read_text())
        assert asked == [], page.name


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the blocks of a page, of a language; continued lines of a shell are joined."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```", page.read_text())
    return [block.replace("\\\n", " ") for block in blocks] if language != "python" else blocks


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if page.parent.name == "docs" and blocks_of(page, language)]


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_examples_of_pages_run(page: Path) -> None:
    if reason := pages_of_docs.NOT_RUN.get(page.name):
        pytest.skip(reason)
    torch.manual_seed(0)
    names: dict[str, object] = {"torch": torch, "jitattn": jitattn, "device": "cpu"}
    names |= pages_of_docs.SETUPS.get(page.name, dict)()
    steps = []
    for block in blocks_of(page, "python"):
        for written, meant in pages_of_docs.RENAMED.get(page.name, {}).items():
            block = block.replace(written, meant)
        exec(compile(block, page.name, "exec"), names)
        steps.append(dict(names))
    if page.name in pages_of_docs.CHECKS:
        pages_of_docs.CHECKS[page.name](steps)


@pytest.mark.parametrize("page", pages_with("(?:bash|sh|dockerfile)"), ids=lambda page: page.name)
def test_commands_of_pages_are_understood(page: Path) -> None:
    """Every option and name is the command line's; nothing is run."""
    for block in blocks_of(page, "(?:bash|sh|dockerfile)"):
        for command in re.findall(r"(?m)(?:^|[ (])jitattn ([a-z][^)&#\n]*)", block):
            cli._parser().parse_args(shlex.split(command))


def test_every_public_name_has_a_docstring() -> None:
    for name in jitattn.__all__:
        value = getattr(jitattn, name)
        if callable(value):
            assert inspect.getdoc(value), name


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["bench"]]
    wanted += [*extras["docs"], *extras["dev"]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if line and not line.startswith("#")}
    assert {name_of(line) for line in wanted} <= pinned


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()
