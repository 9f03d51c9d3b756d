"""Structure figures of one or more trees: ``python -m tests.style.figures [--root DIR ...]``.

Everything is read from the folders with ``ast``, so that any commit's tree can be measured; nothing
is imported from it. ``LIMITS`` are what ``test_figures.py`` holds this tree to.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES_OF_A_FUNCTION = 60
Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, in spite of their names

# The most of each figure.
LIMITS = {
    "modules side by side": 16,
    "folder import floors": 8,
    "folders in import cycles": 0,
    "imports between kernel families": 0,
    f"functions over {LINES_OF_A_FUNCTION} lines": 0,
    "isinstance on page tables outside tensors/": 0,
    "files naming csr": 6,
    "files naming int8": 6,
    "reads of another object's _x": 0,
}


class Tree:
    """One checkout: the package's parsed modules and the lines of everything."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "jitattn"

    @functools.cached_property
    def modules(self) -> dict[Path, ast.Module]:
        """Parsed modules by path, relative to the package."""
        return {
            path.relative_to(self.package): ast.parse(path.read_text())
            for path in sorted(self.package.rglob("*.py"))
        }

    def inside(self) -> dict[Path, ast.Module]:
        """Modules but those that speak for other packages."""
        others = ("compat", "integrations")
        return {path: tree for path, tree in self.modules.items() if path.parts[0] not in others}

    def figures(self) -> dict[str, int]:
        """Every figure by name; those with a limit first."""
        graph = self.folder_graph()
        return {
            "modules side by side": max(self.modules_of_folders().values()),
            "folder import floors": max(floors(graph).values()),
            "folders in import cycles": sum(len(c) for c in components(graph) if len(c) > 1),
            "imports between kernel families": len(self.family_imports()),
            f"functions over {LINES_OF_A_FUNCTION} lines": len(self.long_functions()),
            "isinstance on page tables outside tensors/": len(self.table_checks()),
            "files naming csr": len(self.naming("csr")),
            "files naming int8": len(self.naming("int8")),
            "reads of another object's _x": len(self.private_reads()),
            "names in __all__": self.public_names(),
            **{f"lines of {name}": lines for name, lines in self.lines().items()},
        }

    def modules_of_folders(self) -> Counter[str]:
        """Modules of each folder, ``__init__`` and ``__main__`` aside."""
        return Counter(str(path.parent) for path in self.modules if not path.stem.startswith("__"))

    def folder_graph(self) -> Graph:
        """What each folder imports; a module at the top of the package is a folder of its own.

        The package's ``__init__`` and ``__main__``, which import on behalf of users, are left out.
        """
        boxes = {_dotted(path): _box(path) for path in self.modules}
        graph: Graph = {box: set() for box in boxes.values() if box}
        for path, tree in self.modules.items():
            if box := _box(path):
                for name in imports(tree):
                    module = name if name in boxes else name.rpartition(".")[0]
                    graph[box] |= {boxes.get(module, "")} - {box, ""}
        return graph

    def family_imports(self) -> list[str]:
        """Imports of one kernel family by another; ``common`` is below them all."""
        graph = self.folder_graph()
        families = {box for box in graph if box.startswith("kernels/")} - {"kernels/common"}
        return [
            f"{box} imports {other}"
            for box in sorted(families)
            for other in sorted(graph[box] & families)
        ]

    def long_functions(self) -> list[str]:
        return [
            f"{name} ({lines})"
            for name, node in self.functions()
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > LINES_OF_A_FUNCTION
        ]

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function with its file, classes and enclosing functions as name."""
        for path, tree in self.modules.items():
            yield from _functions(tree, f"{path}::")

    def table_checks(self) -> list[str]:
        """Where a page table's class is asked for, outside the folder that defines the classes."""
        tables = self.table_classes()
        return [
            f"{path}:{node.lineno}"
            for path, tree in self.modules.items()
            if path.parts[0] != "tensors"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("isinstance", "issubclass")
            and tables & set(re.findall(r"\w+", ast.unparse(node.args[1])))
        ]

    def table_classes(self) -> set[str]:
        """Names of the classes of page tables: ``BlockTable`` and what shares its base or union."""
        names = {"BlockTable", "CsrPages", "TokenTable", "RaggedKV", "PageTable"}
        for tree in self.modules.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and any(
                    ast.unparse(base) == "PageTable" for base in node.bases
                ):
                    names.add(node.name)
        return names

    def naming(self, word: str) -> list[str]:
        """Files inside that have ``word`` in code, a docstring or a comment, in any case."""
        pattern = re.compile(rf"(?<![a-z]){word}(?!\d)", re.IGNORECASE)
        return [str(p) for p in self.inside() if pattern.search((self.package / p).read_text())]

    def private_reads(self) -> list[str]:
        """Return reads of ``x._name`` where ``x`` is not ``self``, nor the ``other`` of ``==``."""
        own = self.private_names()
        return [
            f"{path}:{node.lineno} {ast.unparse(node)}"
            for path, tree in self.modules.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in own
            and ast.unparse(node.value) not in ("self", "cls", "super()", "other")
        ]

    def private_names(self) -> set[str]:
        """Private attributes and methods that classes here define; other packages' are theirs."""
        names: set[str] = set()
        for tree in self.modules.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    names |= _members(node)
        return {name for name in names if re.match(r"_(?!_).*[^_]$", name)} - NAMED_TUPLE

    def public_names(self) -> int:
        door = self.modules[Path("__init__.py")]
        (names,) = (
            node.value
            for node in door.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        return len(ast.literal_eval(names))

    def lines(self) -> dict[str, int]:
        """Lines of code by part; the benches' tests count as tests."""
        bench = _lines(self.root / "bench", "*.py")
        bench_tests = _lines(self.root / "bench/tests", "*.py")
        return {
            "package": _lines(self.package, "*.py"),
            "bench": bench - bench_tests,
            "tests": _lines(self.root / "tests", "*.py") + bench_tests,
            "templates": _lines(self.root / "templates", "*.jinja", "*.cuh"),
        }


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield what ``tree`` imports, in functions and for types, too: modules and names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floors(graph: Graph) -> dict[str, int]:
    """Return each folder's floor: the folders of its longest chain; a cycle counts as one."""
    groups = components(graph)
    of = {box: number for number, group in enumerate(groups) for box in group}
    below = defaultdict(set)
    for box, imported in graph.items():
        below[of[box]] |= {of[other] for other in imported} - {of[box]}

    @functools.cache
    def height(group: int) -> int:
        return 1 + max((height(other) for other in below[group]), default=0)

    return {box: height(of[box]) for box in graph}


def components(graph: Graph) -> list[set[str]]:
    """Return the strongly connected components: folders that reach each other."""
    reach = {box: _reached(graph, box) for box in graph}
    found: list[set[str]] = []
    for box in graph:
        if not any(box in group for group in found):
            found.append({box} | {other for other in reach[box] if box in reach[other]})
    return found


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("jitattn", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _box(path: Path) -> str:
    """Return the folder of a module; empty for the package's doors."""
    if path.parent != Path():
        return path.parent.as_posix()
    return "" if path.stem.startswith("__") else path.stem


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, Function):
                yield name, child
            name += "."
        yield from _functions(child, name)


def _members(node: ast.ClassDef) -> set[str]:
    fields = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    methods = {child.name for child in node.body if isinstance(child, Function)}
    written = {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and ast.unparse(child.value) == "self"
    }
    return fields | methods | written


def _lines(folder: Path, *patterns: str) -> int:
    paths = [path for pattern in patterns for path in folder.rglob(pattern)]
    return sum(len(path.read_text().splitlines()) for path in paths)


def table(roots: list[Path]) -> str:
    """Return a Markdown table with a column a tree."""
    columns = [Tree(root).figures() for root in roots]
    heads = [root.resolve().name for root in roots]
    rows = [
        f"| {' | '.join(['figure', *heads, 'limit'])} |",
        f"| {' | '.join(['--'] * (len(roots) + 2))} |",
    ]
    for name in columns[-1]:
        values = [f"{column[name]:,}" for column in columns]
        rows.append(f"| {' | '.join([name, *values, str(LIMITS.get(name, ''))])} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, action="append", help="a tree; several are compared")
    parser.add_argument("--where", action="store_true", help="print the places behind the figures")
    arguments = parser.parse_args()
    roots = arguments.root or [ROOT]
    print(table(roots))  # noqa: T201
    if arguments.where:
        print("\n".join(places(Tree(roots[-1]))))  # noqa: T201


def places(tree: Tree) -> Iterator[str]:
    """Yield what a figure counts, a line each."""
    graph = tree.folder_graph()
    floor = floors(graph)
    for box in sorted(graph, key=lambda box: (floor[box], box)):
        yield f"floor {floor[box]}: {box} imports {', '.join(sorted(graph[box]))}"
    for name, found in (
        ("cycle", [", ".join(sorted(c)) for c in components(graph) if len(c) > 1]),
        ("family", tree.family_imports()),
        ("long", tree.long_functions()),
        ("isinstance", tree.table_checks()),
        ("csr", tree.naming("csr")),
        ("int8", tree.naming("int8")),
        ("private", tree.private_reads()),
    ):
        yield from (f"{name}: {place}" for place in found)


if __name__ == "__main__":
    main()
