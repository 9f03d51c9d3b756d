"""The house rules that a tool can check."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jitattn
from tests.style.figures import ROOT, Tree

TREE = Tree(ROOT)

# docs/glossary.md gives the word to use instead.
SYNONYMS = {
    "b", "bs", "block_size", "cache_seqlens", "context_lens", "cu_seqlens_q", "data_type",
    "gqa_ratio", "head_size", "headdim", "is_causal", "kv_data_type", "nheads", "num_heads",
    "num_seqs", "page_block_size", "paged_kv_cache", "q_data_type", "sliding_window", "softcap",
    "softmax_lse", "softmax_scale",
}  # fmt: skip


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_check() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".")


def test_ruff_format() -> None:
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


def test_mypy_strict() -> None:
    run(sys.executable, "-m", "mypy", "--cache-dir", os.devnull)


def test_clang_format() -> None:
    # The wheel puts its program beside the interpreter, which need not be on PATH.
    program = shutil.which("clang-format", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("clang-format is not installed in this environment")
    folders = (ROOT / "templates", ROOT / "tests/emulator")
    kinds = (".cuh", ".jinja", ".cpp", ".hpp")
    paths = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in kinds)
    run(program, "--dry-run", "--Werror", *map(str, paths))


def test_signatures_are_annotated() -> None:
    bare = [
        name
        for name, node in TREE.functions()
        if node.returns is None
        or any(
            a.annotation is None
            for a in (*node.args.args, *node.args.kwonlyargs)
            if a.arg not in ("self", "cls")
        )
    ]
    assert bare == []


def test_no_print_and_no_catch_all_names() -> None:
    assert [path for path in TREE.modules if path.stem in ("utils", "helpers", "misc")] == []
    prints = [
        path.as_posix()
        for path, tree in TREE.modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert prints == []


def test_public_functions_take_no_catch_alls() -> None:
    loose = [
        name
        for name in jitattn.__all__
        if inspect.isfunction(function := getattr(jitattn, name))
        if any(
            p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in inspect.signature(function).parameters.values()
        )
    ]
    assert loose == ["check_config"]


def test_parameters_use_the_words_of_the_glossary() -> None:
    named = {
        f"{name}({parameter})"
        for name in jitattn.__all__
        for parameter in parameters(getattr(jitattn, name))
        if parameter in SYNONYMS
    }
    assert named == {"MLAPlanner(num_heads)"}  # whose K and V have no heads


def parameters(value: object) -> Iterator[str]:
    if inspect.isclass(value):
        if issubclass(value, Exception):
            return
        yield from inspect.signature(value).parameters
        for member in vars(value).values():
            if inspect.isfunction(member):
                yield from inspect.signature(member).parameters
    elif callable(value):
        yield from inspect.signature(value).parameters


def test_todos_name_an_issue() -> None:
    folders = (ROOT / "jitattn", ROOT / "templates")
    files = [p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".cuh", ".jinja")]
    loose = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", line)
    ]
    assert loose == []


def test_text_files_end_with_one_newline() -> None:
    files = [
        path
        for pattern in (
            "*.md",
            "*.toml",
            "*.txt",
            "jitattn/**/*.py",
            "templates/**/*",
            "tests/**/*.py",
        )
        for path in ROOT.glob(pattern)
        if path.is_file() and path.stat().st_size
    ]
    bad = [str(p) for p in files if not re.search(r"[^\n]\n\Z", p.read_text())]
    assert bad == []


def test_captured_functions_assign_no_numbers_to_elements() -> None:
    """``tensor[i] = 1`` copies a tensor of the CPU, which a capture refuses; ``fill_`` does not.

    Definitions, which run on the CPU, may.
    """
    found = [
        f"{path}:{node.lineno}"
        for path, tree in TREE.modules.items()
        if path.parts[0] == "kernels" and not path.stem.startswith("reference")
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        if isinstance(node.value, ast.UnaryOp)
        or (isinstance(node.value, ast.Constant) and not isinstance(node.value.value, str))
    ]
    assert found == []
