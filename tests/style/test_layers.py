"""Imports point down, heavy packages have one door each, and importing has no effects."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import jitattn
from tests.style.figures import LIMITS, ROOT, Tree, components, floors, imports

PACKAGE = ROOT / "jitattn"
TREE = Tree(ROOT)

# Folders that may import a package; `cuda` are the bindings of the driver and of NVRTC.
DOORS = {
    "jinja2": ("jit/",),
    "cuda": ("jit/", "device/"),
    "filelock": ("jit/",),
    "platformdirs": ("base/",),
    "rich": ("tools/", "bundles/"),
    "vllm": ("integrations/vllm/",),
    "sglang": ("integrations/sglang/",),
    "transformers": ("integrations/transformers",),
}
# Folders on top of everything: only users, and the command line, import them.
TOP = ("kv", "compat", "integrations", "parallel", "tools")


# Read by the first test that asks: every process of a run imports this module.


@functools.cache
def figures() -> dict[str, int]:
    return TREE.figures()


@functools.cache
def imports_of_modules() -> dict[str, set[str]]:
    return {path.as_posix(): set(imports(tree)) for path, tree in TREE.modules.items()}


def imports_on_import() -> dict[str, set[str]]:
    return {
        path.as_posix(): {
            name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in imports(node)
        }
        for path, tree in TREE.modules.items()
    }


@pytest.mark.parametrize("name", LIMITS)
def test_the_tree_stays_within_its_limits(name: str) -> None:
    assert figures()[name] <= LIMITS[name], "python -m tests.style.figures --where"


def test_floors_and_cycles_are_counted() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": {"c"}, "e": set[str]()}
    assert floors(graph) == {"a": 3, "b": 2, "c": 1, "d": 1, "e": 1}
    assert sorted(map(sorted, components(graph))) == [["a"], ["b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize("folder", TOP)
def test_nothing_imports_what_is_on_top(folder: str) -> None:
    users = {
        module.partition("/")[0]
        for module, names in imports_of_modules().items()
        if any(f"{name}.".startswith(f"jitattn.{folder}.") for name in names)
    }
    assert users <= {folder, "tools", "__init__.py", "__main__.py"}


def users(package: str) -> set[str]:
    return {
        module
        for module, names in imports_of_modules().items()
        if package in {name.partition(".")[0] for name in names}
    }


@pytest.mark.parametrize("package", DOORS)
def test_heavy_packages_have_their_doors(package: str) -> None:
    assert [module for module in users(package) if not module.startswith(DOORS[package])] == []


def test_torch_is_imported_where_tensors_are_handled() -> None:
    """Compiling needs no torch: neither do specs, tiles and parameters of a family.

    A function that only callers with tensors reach may import it.
    """
    outside = ("base/", "spec/", "jit/", "bundles/", "tools/")
    compiled = ("/spec.py", "/tile.py", "/params.py")
    found = {
        module
        for module, names in imports_on_import().items()
        if any(name.partition(".")[0] == "torch" for name in names)
        if module.startswith(outside)
        or (module.startswith("kernels/") and module.endswith(compiled))
    }
    assert found <= {"tools/demo.py"}


def test_no_public_name_is_also_a_module() -> None:
    # Importing a submodule puts it on the package, over a function of the same name.
    modules = {module.partition("/")[0].removesuffix(".py") for module in imports_of_modules()}
    assert not modules & set(jitattn.__all__)


def test_new_tensors_say_where_they_lie() -> None:
    """Engines have other default devices while they make models, which are the caller's affair."""
    makers = {"arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn"}
    makers |= {"eye", "linspace", "randperm", "scalar_tensor", "tensor", "zeros"}
    found = [
        f"{path}:{node.lineno}"
        for path, tree in TREE.modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in makers
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []


def test_the_environment_is_read_in_knobs_alone() -> None:
    readers = {
        path.as_posix()
        for path, tree in TREE.modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"base/knobs.py"}


def test_import_has_no_effects(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys, threading
before = dict(os.environ)
import jitattn
assert not {"torch", "cuda", "jinja2", "rich", "filelock"} & set(sys.modules), sorted(sys.modules)
assert dict(os.environ) == before
assert threading.active_count() == 1
assert not list(pathlib.Path(sys.argv[1]).iterdir())
"""
    environ = {"HOME": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent), "JITATTN_JIT": "nonsense"}
    subprocess.run(
        [sys.executable, "-B", "-c", script, str(tmp_path)], env=environ, cwd=tmp_path, check=True
    )
