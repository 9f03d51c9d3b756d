"""Numbers that stand for plans, caches and rotary embeddings where a graph takes tensors only.

A handle is an int64 tensor [] on the CPU. A compiled graph takes it as an input like any other, so
that another plan is another value and no other graph; what runs then reads the value and finds the
object. Handles hold no object, and those of objects that are gone serve others.
"""

from __future__ import annotations

import sys
import threading
import weakref

import torch
from torch import Tensor

_OBJECTS: list[_Entry | None] = []
_FREE: list[tuple[Tensor, int]] = []
_GROWING = threading.Lock()
# References to the handle of an owner that is going, while it is looked at.
_UNSHARED = 4


class _Entry(weakref.ref[object]):
    """An object, and its handle, which goes back when the object goes."""

    __slots__ = ("handle", "number")

    handle: Tensor
    number: int


def new_handle(owner: object) -> Tensor:
    """Return an int64 tensor [] on the CPU that stands for ``owner`` as long as that lives."""
    try:
        handle, number = _FREE.pop()
    except IndexError:
        handle, number = _grow()
    entry = _Entry(owner, _give_back)
    entry.handle, entry.number = handle, number
    _OBJECTS[number] = entry
    return handle


def find(name: str, handle: Tensor, kind: str) -> object:
    """Return the object of a handle.

    Args:
        name: of the argument, for errors.
        handle: what ``new_handle`` returned, or another tensor of the same value.
        kind: the name of the class that the object is of, or one derived from it.

    Raises:
        ValueError: there is no such object now.
    """
    number = int(handle)
    entry = _OBJECTS[number] if 0 <= number < len(_OBJECTS) else None
    found = None if entry is None else entry()
    if kind not in [base.__name__ for base in type(found).__mro__]:
        what = "nothing that lives" if found is None else f"a {type(found).__name__}"
        raise ValueError(f"{name} is {number}, the handle of {what}: expected that of a {kind}")
    return found


def _grow() -> tuple[Tensor, int]:
    # In inference mode, or with another default device, it would be a tensor of another kind, and
    # a graph compiled again.
    with _GROWING, torch.inference_mode(False):
        number = len(_OBJECTS)
        handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        _OBJECTS.append(None)
        return handle, number


def _give_back(entry: weakref.ref[object]) -> None:
    assert isinstance(entry, _Entry)
    handle = entry.handle
    _OBJECTS[entry.number] = None
    # Who keeps a handle finds nothing rather than another object.
    if sys.getrefcount(handle) <= _UNSHARED:
        _FREE.append((handle, entry.number))
