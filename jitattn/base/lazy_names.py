"""Lazy public names, imported from their home module at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    module: str, homes: Mapping[str, str], submodules: Sequence[str] = ()
) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module with lazy names, and have its ``dir()`` list them.

    Args:
        module: the module's name; imported names become its attributes.
        homes: the home module of each name.
        submodules: modules of a package, imported in the same way.
    """

    def resolve(name: str) -> object:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    listed = sorted((*homes, *submodules))
    vars(sys.modules[module])["__dir__"] = lambda: listed
    return resolve
