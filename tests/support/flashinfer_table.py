"""Public names of FlashInfer and what their parameters are called, read from a release's sources.

``python -m tests.support.flashinfer_table [--root FOLDER]`` writes the table that tests compare our
doors with; with ``--check`` it fails where the two differ. The sources are read, not imported:
importing them wants CUDA libraries. A folder may be that of a wheel, unpacked.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

TABLE = Path(__file__).parents[1] / "compat" / "flashinfer_names.json"
PACKAGE = "flashinfer"
# The modules whose names users import, besides the package itself.
MODULES = (
    *("attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "rope"),
    *("sparse", "xqa"),
)
# What users import from modules that import it themselves.
_IMPORTED = re.compile(r"Wrapper$|Metadata$|_kv_cache(_mla)?$|^xqa(_mla)?$")
Node = ast.FunctionDef | ast.ClassDef
# Parameter names of a function; of a class those of each method; None: something else.
Entry = str | dict[str, str] | None


class Sources:
    """The modules of a package's folder, and where their names are defined."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def version(self) -> str:
        """The release, from the folder of its distribution beside it."""
        (found,) = self.root.parent.glob("flashinfer_python-*.dist-info")
        return found.name.removeprefix("flashinfer_python-").removesuffix(".dist-info")

    @functools.cache  # noqa: B019
    def tree(self, module: str) -> ast.Module:
        return ast.parse(self._file(module).read_text())

    def _file(self, module: str) -> Path:
        path = self.root.joinpath(*module.split(".")) if module else self.root
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def names(self, module: str) -> list[str]:
        """The public names that a module defines, and of a package those that it re-exports."""
        tree, found = self.tree(module), set[str]()
        is_package = self._file(module).name == "__init__.py"
        for node in _statements(tree):
            if isinstance(node, Node):
                found.add(node.name)
            elif isinstance(node, ast.Assign) and "LAZY_EXPORTS" in ast.unparse(node.targets[0]):
                texts = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
                found |= {text for text in texts if isinstance(text, str)}
            elif isinstance(node, ast.Assign) and "functools.partial" in ast.unparse(node.value):
                found.add(ast.unparse(node.targets[0]))
            elif isinstance(node, ast.ImportFrom) and node.level:
                names = [alias.asname or alias.name for alias in node.names]
                if names == ["*"]:
                    found |= set(self.names(self._home(module, node)))
                # Wrappers and functions of other modules are imported from this one, too.
                found |= {n for n in names if n != "*" and (is_package or _IMPORTED.search(n))}
        return sorted(name for name in found if not name.startswith("_"))

    def find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Node | None:
        """The definition of a name, followed through imports; the last of overloads."""
        tree = self.tree(module)
        own = [n for n in tree.body if isinstance(n, Node) and n.name == name]
        if own:
            return own[-1]
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            home = self._home(module, node)
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            if (
                f"{home}.{name}" not in seen
                and self._file(home).exists()
                and {name, "*"} & {*names}
            ):
                now = seen | {f"{home}.{name}"}
                if (found := self.find(home, names.get(name, name), now)) is not None:
                    return found
        return None

    def _home(self, module: str, node: ast.ImportFrom) -> str:
        folder = module.split(".") if module else []
        if self._file(module).name != "__init__.py":
            folder = folder[:-1]
        folder = folder[: len(folder) - node.level + 1]
        return ".".join([*folder, *(node.module or "").split(".")]).strip(".")

    def entry(self, module: str, name: str) -> Entry:
        """What the table says of a name."""
        node = self.find(module, name)
        if isinstance(node, ast.FunctionDef):
            return " ".join(parameters(node))
        return None if node is None else dict(_methods(node))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under ``try`` and ``with`` among them."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.Try | ast.With):
            yield from node.body


def _methods(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield public methods and the constructor, the last of overloads, with their parameters."""
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    aliases = [
        (child.targets[0].id, re.sub(r"functools\.partialmethod\((\w+).*", r"\1", value))
        for child in node.body
        if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name)
        if (value := ast.unparse(child.value))
    ]
    for name, home in (*zip(methods, methods, strict=True), *aliases):
        if home in methods and (name == "__init__" or not name.startswith("_")):
            method = methods[home]
            # A method that hands all it is given to another has the other's.
            shown = methods.get(f"_{home}_impl", method) if method.args.kwarg else method
            yield name, " ".join(parameters(shown))


def parameters(node: ast.FunctionDef) -> list[str]:
    """Parameter names but ``self``; ``*args`` and ``**kwargs`` with their stars."""
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [a.arg for a in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def of_function(function: object) -> list[str]:
    """The same of a function of ours."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters  # type: ignore[arg-type]
    return [
        f"{stars.get(p.kind, '')}{name}"
        for name, p in found.items()
        if name not in ("self", "cls", "_self")
    ]


def table_of(root: Path) -> dict[str, object]:
    """Return the table of a release."""
    sources = Sources(root)
    modules: dict[str, Mapping[str, Entry]] = {}
    for module in MODULES:
        modules[f"{PACKAGE}.{module}"] = {
            n: sources.entry(module, n) for n in sources.names(module)
        }
    # What the package re-exports of these modules is described there.
    modules[PACKAGE] = dict.fromkeys(sources.names(""))
    return {"version": sources.version(), "modules": dict(sorted(modules.items()))}


def installed() -> Path | None:
    """The folder of the installed package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, help="the package's folder; default: the installed")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    root = arguments.root or installed()
    if root is None:
        parser.error("flashinfer-python is not installed: give its folder with --root")
    text = json.dumps(table_of(root), indent=1, sort_keys=False) + "\n"
    if not arguments.check:
        TABLE.write_text(text)
    elif text != TABLE.read_text():
        raise SystemExit(f"{TABLE.name} differs from {root}: run this without --check, and adapt")


if __name__ == "__main__":
    main()
