"""Lazy public names: a module imports a name from its home when it is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    module: str, homes: Mapping[str, str], submodules: Sequence[str] = ()
) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module whose names live elsewhere.

    Args:
        module: its name; what is imported stays on it.
        homes: the module of each name.
        submodules: modules of a package, which are imported likewise.
    """

    def resolve(name: str) -> object:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return resolve
