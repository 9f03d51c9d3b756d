"""Launch caches: a call like an earlier one passes no checks again, only its addresses are written.

A function around attention puts its arguments into a record, a ``NamedTuple``, and hands it to its
``LaunchCache``. Calls are alike where the types of their arguments are the same, those that are no
tensors are equal, and the tensors lie alike; so say layers of a model, and steps. An operator is a
record, a check, a definition, and a launcher, whose parameters take addresses from an
``AddressWriter``.
"""

from __future__ import annotations

import operator
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from jitattn.kernels.common import device_kernels
from jitattn.tensors.cache_views import recogniser

# Combinations of arguments that a thread keeps of a function, and layouts of tensors of each.
_MAX_FORMS = 64
_MAX_LAYOUTS = 64


class CheckedCall(Protocol):
    """A call that passed its checks."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""


Call = TypeVar("Call", bound=tuple[Any, ...])
Checked = TypeVar("Checked", bound=CheckedCall)
Result = TypeVar("Result")

Launcher = Callable[[Call, list[Tensor]], Result]
"""Launches for a call and its tensors, which lie like those it was made for."""


class LaunchCache(threading.local, Generic[Call, Checked, Result]):
    """The launchers of a function in this thread, since a launch is for one thread at a time."""

    def __init__(
        self,
        check: Callable[[Call], Checked],
        define: Callable[[Checked], Result],
        prepare: Callable[[Checked, CallTensors, int], Launcher[Call, Result]],
        *,
        unfixed: Collection[str] = (),
    ) -> None:
        """Remember nothing yet.

        Args:
            check: returns a call with its tensors in one form; raises where an argument doesn't
                fit.
            define: computes a call on the CPU.
            prepare: returns the launcher for a call, its tensors and the index of their device.
            unfixed: arguments that are read at every launch where they are no tensors.
        """
        self._check, self._define, self._prepare = check, define, prepare
        self._unfixed = unfixed
        self._forms: list[_Form] = []

    def run(self, call: Call) -> Result:
        """Launch, after the checks if no call before was like this one.

        Raises:
            TypeError, ValueError: as ``check``.
        """
        # In this order: what is of the same types can be compared.
        types = tuple(map(type, call))
        forms = self._forms
        for form in forms:
            if form.types == types and form.fixed_of(call) == form.fixed:
                if form is not forms[0]:
                    forms.remove(form)
                    forms.insert(0, form)
                break
        else:
            form = _Form(call, types, self._unfixed)
        tensors = form.tensors_of(call)
        launcher = form.find(tensors)
        if launcher is None:
            checked = self._check(call)
            card = device_kernels.card_of(checked.device)
            if card is None:
                return self._define(checked)
            launcher = self._prepare(checked, CallTensors(form.names_of(call), tensors), card)
            form.add(tensors, launcher)
            if form not in forms:
                forms.insert(0, form)
                del forms[_MAX_FORMS:]
        result: Result = launcher(call, tensors)
        return result

    def clear(self) -> None:
        """Forget this thread's launchers."""
        self._forms.clear()


class CallTensors:
    """The tensors of a call, by name: their argument's, with a number where that has several.

    Attributes:
        names: ``"seq_lens"``, ``"pages[0]"``, ``"pages[1]"``.
        tensors: in the same order.
    """

    __slots__ = ("names", "tensors")

    def __init__(self, names: list[str], tensors: list[Tensor]) -> None:
        """Hold both."""
        self.names, self.tensors = names, tensors

    def named(self) -> list[tuple[str, Tensor]]:
        """Return pairs of a name and a tensor."""
        return [*zip(self.names, self.tensors, strict=True)]

    def pointers(self) -> list[int]:
        """Return the tensors' addresses."""
        return [tensor.data_ptr() for tensor in self.tensors]


class _Form:
    """Calls whose arguments have the same types, and are equal where they are no tensors.

    Attributes:
        types: of all arguments.
        fixed_of: reads those that are no tensors.
        fixed: what it reads of these calls.
    """

    __slots__ = ("_layouts", "_several", "_single", "fixed", "fixed_of", "types")

    def __init__(self, call: Any, types: tuple[type, ...], unfixed: Collection[str]) -> None:
        self.types = types
        fields = type(call)._fields
        parts = [None if issubclass(kind, Tensor) else _parts_of(kind) for kind in types]
        self._single = _getter([i for i, kind in enumerate(types) if issubclass(kind, Tensor)])
        self._several = [(i, part) for i, part in enumerate(parts) if part is not None]
        self.fixed_of = _fixed_getter(
            [
                i
                for i, kind in enumerate(types)
                if not (issubclass(kind, Tensor) or parts[i] or fields[i] in unfixed)
                and kind is not type(None)
            ],
            [i for i, kind in enumerate(types) if hasattr(kind, "facts")],
        )
        self.fixed = self.fixed_of(call)
        # By how many tensors there are, or by which of them are the same.
        self._layouts: dict[object, list[tuple[Callable[..., bool], Any]]] = {}

    def tensors_of(self, call: Any) -> list[Any]:
        """Return the tensors of a call: first those that are arguments themselves."""
        tensors = [*self._single(call)]
        for i, parts in self._several:
            tensors += parts(call[i])
        return tensors

    def names_of(self, call: Any) -> list[str]:
        """Return a name for each of ``tensors_of``."""
        names = [
            name
            for name, value in zip(call._fields, call, strict=True)
            if isinstance(value, Tensor)
        ]
        for i, parts in self._several:
            names += [f"{call._fields[i]}[{j}]" for j in range(len(parts(call[i])))]
        return names

    def find(self, tensors: list[Any]) -> Any:
        """Return the launcher for tensors that lie like these; None without one."""
        found = self._find_in(len(tensors), tensors)
        if found is None and len(set(map(id, tensors))) < len(tensors):
            return self._find_in(*_distinct(tensors))
        return found

    def _find_in(self, key: object, tensors: list[Any]) -> Any:
        layouts = self._layouts.get(key, ())
        for i, (lie_alike, launcher) in enumerate(layouts):
            try:
                is_found = lie_alike(*tensors)
            except TypeError:  # some are no tensors: that is for the checks to say
                return None
            if is_found:
                if i > 0:
                    layouts.insert(0, layouts.pop(i))  # type: ignore[union-attr]
                return launcher
        return None

    def add(self, tensors: list[Tensor], launcher: object) -> None:
        """Keep a launcher, and forget those that were not used for long."""
        key: object = len(tensors)
        if len(set(map(id, tensors))) < len(tensors):
            key, tensors = _distinct(tensors)
        layouts = self._layouts.setdefault(key, [])
        layouts.insert(0, (recogniser(tensors), launcher))
        del layouts[_MAX_LAYOUTS:]


def _parts_of(kind: type) -> Callable[[Any], Sequence[Any]] | None:
    """Return what finds the tensors in an argument of a type; None where it has none."""
    if hasattr(kind, "tensors"):
        return operator.attrgetter("tensors")
    return tuple if issubclass(kind, (tuple, list)) else None


def _fixed_getter(plain: list[int], with_facts: list[int]) -> Callable[[Any], object]:
    """Return what reads the arguments ``plain``, and of others, beside their tensors, facts."""
    if not with_facts:
        return operator.itemgetter(*plain) if plain else _nothing
    read = _getter(plain)
    return lambda call: (*read(call), *(call[i].facts for i in with_facts))


def _nothing(call: object) -> None:
    return None


def _getter(indices: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


def _distinct(tensors: list[Any]) -> tuple[object, list[Any]]:
    """Return which tensors are the same, and each of them once, as a recogniser takes them."""
    order = {id(tensor): i for i, tensor in enumerate(tensors)}
    pattern = tuple(order[id(tensor)] for tensor in tensors)
    return pattern, [tensors[i] for i in sorted(order.values())]


# --- addresses ------------------------------------------------------------------------------------

Source = tuple[str, int]
"""The name of a tensor, and how many bytes behind its beginning."""


class AddressWriter:
    """Writes the addresses of a call's tensors into the parameters of its kernel."""

    __slots__ = ("_behind", "_runs")

    def __init__(
        self, params: Any, sources: Mapping[str, str | Source | None], names: Sequence[str]
    ) -> None:
        """Find the fields.

        Args:
            params: the parameters' structure.
            sources: of fields, such as ``"pages.entries"``, the tensor; None is a null pointer.
            names: of the tensors whose addresses ``write`` gets.
        """
        self._behind: list[tuple[int, int]] = []
        places: list[tuple[int, int | None]] = []
        for field, source in sources.items():
            name, offset = (source, 0) if not isinstance(source, tuple) else source
            index = None if name is None else names.index(name)
            if index is not None and offset:
                self._behind.append((index, offset))
                index = len(names) + len(self._behind) - 1
            places.append((offset_of(type(params), field), index))
        places.sort(key=lambda place: place[0])
        # Fields one after the other are written at once.
        runs: list[list[tuple[int, int | None]]] = []
        for place in places:
            if runs and runs[-1][-1][0] + 8 == place[0]:
                runs[-1].append(place)
            else:
                runs.append([place])
        self._runs = [(_packer(run), run[0][0], _indices(run)) for run in runs]

    def write(self, params: Any, pointers: Sequence[int]) -> None:
        """Write addresses, as many as ``names``, in their order."""
        if self._behind:
            pointers = [*pointers, *(pointers[i] + offset for i, offset in self._behind)]
        for pack_into, at, read in self._runs:
            pack_into(params, at, *read(pointers))


def _packer(run: Sequence[tuple[int, int | None]]) -> Callable[..., None]:
    return struct.Struct("".join("8x" if i is None else "P" for _, i in run)).pack_into


def _indices(run: Sequence[tuple[int, int | None]]) -> Callable[[Any], Sequence[Any]]:
    return _getter([i for _, i in run if i is not None])


def offset_of(kind: Any, field: str) -> int:
    """Return where a field of a structure lies, such as ``"seq_lens.values"``."""
    offset = 0
    for name in field.split("."):
        offset += getattr(kind, name).offset
        kind = dict(kind._fields_)[name]
    return offset
