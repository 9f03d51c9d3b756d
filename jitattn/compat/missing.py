"""Names of another package that jitattn doesn't have: errors that say what to use instead."""

from __future__ import annotations

import difflib
import dis
import re
import sys
from collections.abc import Callable, Collection, Sequence
from types import FrameType


class MissingNameError(AttributeError):
    """A name that another package has and jitattn has not; the message says what to use."""


def refusals(
    module: str, has: Collection[str], instead: Sequence[tuple[str, str]], otherwise: str
) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module that stands for one of another package.

    Args:
        module: the module's name.
        has: the names that it has.
        instead: what names look like, and what to use instead; the first that fits counts.
        otherwise: what to do about any other.
    """

    def refuse(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = (text for pattern, text in instead if re.search(pattern, name))
        close = difflib.get_close_matches(name, has, n=1, cutoff=0.85)
        guess = f"is {close[0]} meant?" if close else otherwise
        message = f"{module} has no {name}: {next(found, guess)}"
        if _is_import(sys._getframe(1), name):
            # Python would replace an AttributeError by an ImportError without the message.
            raise ImportError(message, name=module)
        raise MissingNameError(message, name=name)

    return refuse


def _is_import(frame: FrameType, name: str) -> bool:
    """Whether a frame is at ``from module import name``, which asks a module as ``.name`` does."""
    code = frame.f_code
    return dis.opname[code.co_code[frame.f_lasti]] == "IMPORT_FROM" and name in code.co_names
