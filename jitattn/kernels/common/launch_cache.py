"""Launch caches: a call like an earlier one passes no checks again, only its addresses are written.

A function around attention puts its arguments into a record, a ``NamedTuple``, and hands it to its
``LaunchCache``. Calls are alike where the types of their arguments are the same, those that are no
tensors are equal, and the tensors lie alike; so say layers of a model, and steps. An operator is a
record, a check, a definition, and a launcher, whose ``CallParams`` take the addresses.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from jitattn.kernels.common import device_kernels
from jitattn.tensors.tensor_layouts import recogniser

if TYPE_CHECKING:
    from jitattn.device.driver import Launch

# Combinations of arguments that a thread keeps of a function, and layouts of tensors of each.
_MAX_FORMS = 64
_MAX_LAYOUTS = 64
# Addresses that are remembered of calls that are alike.
_MAX_IMAGES = 1024

address_of: Callable[[Tensor], int] = Tensor.data_ptr
"""Where a tensor begins: half the time of a method's call."""


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

new_call: Callable[[type[Call], tuple[Any, ...]], Call] = tuple.__new__
"""Makes a record of the values of all its fields: its own constructor takes four times as long."""


class LaunchCache(Generic[Call, Checked, Result]):
    """The launchers of a function, of each thread its own: a launch is for one at a time."""

    __slots__ = ("_check", "_define", "_memory", "_prepare", "_unfixed")

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
        self._memory = _Memory()

    def run(self, call: Call) -> Result:
        """Launch, after the checks if no call before was like this one.

        Raises:
            TypeError, ValueError: as ``check``.
        """
        # In this order: what is of the same types can be compared.
        types = tuple(map(type, call))
        forms = self._memory.forms
        for form in forms:
            if form.types == types and form.fixed_of(call) == form.fixed:
                if form is not forms[0]:
                    forms.remove(form)
                    forms.insert(0, form)
                break
        else:
            form = _Form(call, types, self._unfixed)
        tensors, launcher = form.find(call)
        if launcher is None:
            checked = self._check(call)
            card = device_kernels.card_of(checked.device)
            if card is None:
                with torch.no_grad():  # as on a card
                    return self._define(checked)
            launcher = self._prepare(checked, CallTensors(form.names_of(call), tensors), card)
            form.add(tensors, launcher)
            if form not in forms:
                forms.insert(0, form)
                del forms[_MAX_FORMS:]
        result: Result = launcher(call, tensors)
        return result

    def anew(self) -> LaunchCache[Call, Checked, Result]:
        """Return a cache of the same function that remembers nothing."""
        return LaunchCache(self._check, self._define, self._prepare, unfixed=self._unfixed)

    def clear(self) -> None:
        """Forget this thread's launchers."""
        self._memory.forms.clear()


class _Memory(threading.local):
    """What a thread remembers, the last form first."""

    def __init__(self) -> None:
        self.forms: list[_Form] = []


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

    __slots__ = ("_layouts", "_objects", "_sequences", "_single", "fixed", "fixed_of", "types")

    def __init__(self, call: Any, types: tuple[type, ...], unfixed: Collection[str]) -> None:
        self.types = types
        every = [*enumerate(types)]
        single = [i for i, kind in every if issubclass(kind, Tensor)]
        self._single = _getter(single)
        self._objects = [i for i, kind in every if hasattr(kind, "tensors")]
        self._sequences = [
            i for i, kind in every if issubclass(kind, (tuple, list)) and i not in self._objects
        ]
        others = {*single, *self._objects, *self._sequences}
        others |= {i for i, name in enumerate(type(call)._fields) if name in unfixed}
        self.fixed_of = _fixed_getter(
            [i for i, kind in every if i not in others and kind is not type(None)],
            [i for i in self._objects if hasattr(types[i], "facts")],
        )
        self.fixed = self.fixed_of(call)
        # By how many tensors there are, or by which of them are the same.
        self._layouts: dict[object, list[tuple[Callable[..., bool], Any]]] = {}

    def names_of(self, call: Any) -> list[str]:
        """Return a name for each tensor that ``find`` returns."""
        fields = call._fields
        names = [
            name for name, value in zip(fields, call, strict=True) if isinstance(value, Tensor)
        ]
        for i in self._objects:
            names += [f"{fields[i]}[{j}]" for j in range(len(call[i].tensors))]
        for i in self._sequences:
            names += [f"{fields[i]}[{j}]" for j in range(len(call[i]))]
        return names

    def find(self, call: Any) -> tuple[list[Any], Any]:
        """Return the tensors of a call, and the launcher of those that lie like them.

        First come tensors that are arguments themselves; without a launcher it is None.
        """
        tensors = [*self._single(call)]
        for i in self._objects:
            tensors += call[i].tensors
        for i in self._sequences:
            tensors += call[i]
        try:
            layouts = self._layouts.get(len(tensors), [])
            for known in layouts:
                if known[0](*tensors):
                    if known is not layouts[0]:
                        layouts.remove(known)
                        layouts.insert(0, known)
                    return tensors, known[1]
            return tensors, self._find_apart(tensors)
        except TypeError:  # some are no tensors: that is for the checks to say
            return tensors, None

    def _find_apart(self, tensors: list[Any]) -> Any:
        """Return the launcher of tensors of which some are the same."""
        if len(set(map(id, tensors))) < len(tensors):
            pattern, distinct = _distinct(tensors)
            for lie_alike, launcher in self._layouts.get(pattern, ()):
                if lie_alike(*distinct):
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


# --- parameters -----------------------------------------------------------------------------------

Source = tuple[str, int]
"""The name of a tensor, and how many bytes behind its beginning."""

Params = TypeVar("Params", bound=ctypes.Structure)


class CallParams(Generic[Params]):
    """Parameters of a kernel that take addresses from the tensors of each call.

    Attributes:
        struct: the parameters, zeros at first.
        image: their bytes.
        images: by addresses, and by whatever else differs, a launch and the bytes that go with it;
            as in the step before, addresses often come again.
    """

    __slots__ = ("_cells", "_words", "image", "images", "struct")

    def __init__(self, kind: type[Params]) -> None:
        """Make them."""
        self.image = bytearray(ctypes.sizeof(kind))
        self.struct = kind.from_buffer(self.image)
        self._words = memoryview(self.image).cast("Q")
        self._cells: list[tuple[int, int, int]] = []
        self.images: dict[tuple[Any, ...], tuple[Launch | None, bytes]] = {}

    def connect(self, sources: Mapping[str, str | Source | None], names: Sequence[str]) -> None:
        """Say where addresses come from.

        Args:
            sources: of fields, such as ``"pages.entries"``, the tensor; None leaves a null pointer.
            names: of the tensors whose addresses ``write`` gets.
        """
        for field, source in sources.items():
            if source is not None:
                name, offset = source if isinstance(source, tuple) else (source, 0)
                word = offset_of(type(self.struct), field) // 8
                self._cells.append((word, names.index(name), offset))

    def write(self, pointers: Sequence[int]) -> None:
        """Write addresses, in the order of the names."""
        words = self._words
        for word, index, offset in self._cells:
            words[word] = pointers[index] + offset

    def keep(self, key: tuple[Any, ...], launch: Launch | None) -> None:
        """Keep the image as it is, and the launch, which None is nothing to do."""
        if len(self.images) >= _MAX_IMAGES:
            self.images.clear()
        self.images[key] = launch, bytes(self.image)


def offset_of(kind: Any, field: str) -> int:
    """Return where a field of a structure lies, such as ``"seq_lens.values"``."""
    offset = 0
    for name in field.split("."):
        offset += getattr(kind, name).offset
        kind = dict(kind._fields_)[name]
    return offset
