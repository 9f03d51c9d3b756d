"""Imports point down, heavy packages have one door each, and importing has no effects."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jitattn

PACKAGE = Path(__file__).parents[2] / "jitattn"

# From a kernel to a call of it, in this order.
CALLS = (
    "build",
    "handles",
    "pages",
    "position_bias",
    "workspace",
    "overlap",
    "variant_values",
    "binding",
    "quantization",
    "block_caches",
    "rotary",
    "preprocess_cache",
    "preprocess_call",
    "preprocess_reference",
    "preprocess_values",
    "preprocess_params",
    "checks",
    "reference",
    "mla_cache",
    "mla_reference",
    "reference_backend",
    "tensor_maps",
    "attention_kernels",
    "recipes",
    "cuda_plan",
    "cuda_backend",
    "mla_backend",
    "merge_dispatch",
    "prepared",
    "preprocess_cuda",
    "preprocess_dispatch",
    "ops",
    "traced",
    "merge",
    "preprocess",
    "tables",
    "batches",
    "gather_call",
    "gather",
    "page_copies",
    "layer_tables",
)
LAYERS = (
    {"errors", "scalars", "values", "version"},
    {"knobs"},
    {
        *("variant", "spec", "config", "params", "locks", "cache", "installed", "cubin"),
        *("nvrtc", "driver"),
    },
    {
        *("rules", "support", "tiling", "mla_config", "preprocess_config", "transfer_config"),
        *("models", "serving"),
    },
    {"render", "sources", "wrappers"},
    {*CALLS},
    {
        *("planning", "planner", "mla_planner", "cascade", "functional"),
        *("bundles", "bundle_wheel", "explain"),
    },
    {"__init__", "__main__", "cli", "doctor", "demo"},
)
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}
# Modules of one layer that may import each other, downwards in this order.
SAME_LAYER = (
    ("variant", "spec", "config", "params"),
    ("locks", "cache", "installed"),
    (
        *("rules", "tiling", "mla_config", "preprocess_config", "transfer_config", "support"),
        *("models", "serving"),
    ),
    ("sources", "render"),
    CALLS,
    ("planning", "planner", "mla_planner", "cascade", "functional"),
    ("version", "demo", "doctor", "__init__", "cli", "__main__"),
)
DOORS = {
    "jinja2": {"render"},
    "cuda": {"nvrtc", "driver"},
    "torch": {
        "handles",
        "pages",
        "position_bias",
        "workspace",
        "overlap",
        "variant_values",
        "binding",
        "quantization",
        "block_caches",
        "rotary",
        "preprocess_cache",
        "preprocess_call",
        "preprocess_reference",
        "preprocess_values",
        "preprocess_params",
        "preprocess_cuda",
        "preprocess_dispatch",
        "preprocess",
        "ops",
        "traced",
        "reference",
        "mla_cache",
        "mla_reference",
        "mla_planner",
        "reference_backend",
        "planning",
        "cuda_plan",
        "cuda_backend",
        "checks",
        "merge_dispatch",
        "merge",
        "prepared",
        "tables",
        "batches",
        "gather_call",
        "gather",
        "page_copies",
        "layer_tables",
        "planner",
        "cascade",
        "functional",
        "demo",
    },
    "filelock": {"locks"},
    "platformdirs": {"knobs"},
    "rich": {"cli", "demo", "bundles"},
}

# The page manager, downwards; it may import these of the package, and nothing there imports it.
KV_ORDER = (
    "config", "mode", "layout", "slots", "pool", "tree", "state", "ledger", "tables", "engine",
    "storage", "sequence", "device_tables", "views", "manager", "__init__",
)  # fmt: skip
KV_BELOW = {
    "errors", "config", "params", "pages", "binding", "quantization", "prepared", "page_copies",
    "layer_tables", "scalars",
}  # fmt: skip
KV_TORCH = {"storage", "device_tables", "views", "manager"}  # the last where a manager has storage
KV_MODULES = {path.stem: ast.parse(path.read_text()) for path in (PACKAGE / "kv").glob("*.py")}

# What speaks for other packages may import these of this one, and nothing imports it. Of the other
# packages it imports what it is called after: in functions, but for backends, which those packages
# import by name.
OUTSIDE = {
    "compat/__init__": set(),
    "compat/flash_attn": {"compat", "functional", "pages", "planner", "preprocess", "scalars"},
    "compat/gradients": set(),
    "compat/trtllm": {"config", "pages", "quantization", "scalars"},
    "integrations/__init__": set(),
    "integrations/steps": {"binding", "functional", "mla_planner", "pages", "planner"},
    "integrations/transformers": {"functional", "pages", "planner", "preprocess", "scalars"},
    "integrations/sglang/__init__": {"integrations"},
    "integrations/sglang/batches": {"integrations", "pages", "tables"},
    "integrations/sglang/latents": {"integrations", "mla_cache", "mla_planner", "preprocess"},
    "integrations/sglang/layers": {"integrations", "pages", "planner", "preprocess"},
    "integrations/sglang/backend": {"integrations"},
    "integrations/vllm/__init__": set(),
    "integrations/vllm/layers": {
        *("config", "integrations", "merge", "pages", "planner", "preprocess", "workspace"),
    },
    "integrations/vllm/backend": {"config", "integrations", "support"},
}
# FlashInfer's stand-in is a package, whose modules import each other downwards in this order.
FLASHINFER = (
    *("arguments", "batch", "masks", "wrapper", "decode", "queries", "prefill", "ragged"),
    *("latents", "metadata", "mla", "trtllm", "trtllm_mla", "page", "cascade", "__init__"),
)
FLASHINFER_IMPORTS = {
    *("compat", "config", "functional", "merge", "mla_config", "mla_planner", "pages", "planner"),
    *("preprocess", "quantization", "scalars"),
}
OUTSIDE_MODULES = {
    str(path.relative_to(PACKAGE).with_suffix("")): ast.parse(path.read_text())
    for folder in ("compat", "integrations")
    for path in sorted((PACKAGE / folder).rglob("*.py"))
    if path.parent.name != "flashinfer"
}

MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that ``tree`` imports when it runs, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def own_imports(module: str) -> set[str]:
    names = {name.split(".")[1] for name in imports(MODULES[module]) if name.startswith("jitattn.")}
    return names & set(LAYER_OF)


def test_every_module_has_a_layer() -> None:
    assert set(MODULES) == set(LAYER_OF)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    for imported in own_imports(module):
        if LAYER_OF[imported] == LAYER_OF[module]:
            chain = next(c for c in SAME_LAYER if module in c)
            assert chain.index(imported) < chain.index(module), f"{module} imports {imported}"
        else:
            assert LAYER_OF[imported] < LAYER_OF[module], f"{module} imports {imported}"


def test_the_page_manager_has_its_order() -> None:
    assert set(KV_MODULES) == set(KV_ORDER)
    for module, tree in KV_MODULES.items():
        names = set(imports(tree))
        assert ("torch" in names) <= (module in KV_TORCH), module
        for name in names:
            parts = name.split(".")
            if parts[:2] == ["jitattn", "kv"] and len(parts) == 3:
                assert KV_ORDER.index(parts[2]) < KV_ORDER.index(module), f"{module} imports {name}"
            elif parts[0] == "jitattn" and len(parts) == 2 and parts[1] != "kv":
                assert parts[1] in KV_BELOW, f"{module} imports {name}"


def test_nothing_imports_the_page_manager() -> None:
    users = {
        m for m, tree in MODULES.items() if any(n.startswith("jitattn.kv") for n in imports(tree))
    }
    assert users == set()


@pytest.mark.parametrize("module", OUTSIDE_MODULES)
def test_what_speaks_for_others_imports_the_package(module: str) -> None:
    names = {n.split(".")[1] for n in imports(OUTSIDE_MODULES[module]) if n.startswith("jitattn.")}
    assert names == OUTSIDE[module]


def test_what_speaks_for_flashinfer_imports_downwards() -> None:
    folder = PACKAGE / "compat/flashinfer"
    modules = {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}
    assert set(modules) == set(FLASHINFER)
    prefix = "jitattn.compat.flashinfer."
    names = {n for tree in modules.values() for n in imports(tree) if n.startswith("jitattn.")}
    assert {n.split(".")[1] for n in names} == FLASHINFER_IMPORTS
    others = {n.split(".")[2] for n in names if n.startswith("jitattn.compat.")}
    assert others == {"flashinfer", "gradients"}
    upwards = [
        f"{module} imports {name}"
        for module, tree in modules.items()
        for name in imports(tree)
        if name.startswith(prefix)
        and FLASHINFER.index(name.split(".")[3]) >= FLASHINFER.index(module)
    ]
    assert upwards == []


def test_nothing_imports_what_speaks_for_others() -> None:
    inside = {**MODULES, **{f"kv/{m}": tree for m, tree in KV_MODULES.items()}}
    outside = ("jitattn.compat", "jitattn.integrations")
    users = {m for m, tree in inside.items() if any(n.startswith(outside) for n in imports(tree))}
    assert users == set()


def test_no_public_name_is_also_a_module() -> None:
    # Importing a submodule puts it on the package, over a function of the same name.
    assert not set(MODULES) & set(jitattn.__all__)


def test_new_tensors_say_where_they_lie() -> None:
    """Engines have other default devices while they make models, which are the caller's affair."""
    makers = {"arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn"}
    makers |= {"eye", "linspace", "randperm", "scalar_tensor", "tensor", "zeros"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in makers
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []


@pytest.mark.parametrize("package", DOORS)
def test_heavy_packages_have_their_doors(package: str) -> None:
    users = {
        m for m, tree in MODULES.items() if package in {n.split(".")[0] for n in imports(tree)}
    }
    assert users <= DOORS[package]


def test_the_environment_is_read_in_knobs_alone() -> None:
    readers = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"knobs"}


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
