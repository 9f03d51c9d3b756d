"""Spoil valid calls of the public functions, and judge what becomes of each.

An input is a target and a number: ``Random`` of both decides all. It is right if the call refuses,
by a TypeError, ValueError or an error of the package, naming an argument that was spoiled, in few
words, with nothing written; or returns, with nothing written but the outputs, and with the values
of the valid call where the spoiled arguments mean the same.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from torch import Tensor

from jitattn import JitAttnError
from tests.fuzz import values
from tests.fuzz.targets import TARGETS, Arguments, Call, Target

MOST_LETTERS = 1_500
_REFUSALS = (TypeError, ValueError, JitAttnError)


@dataclass
class Tally:
    """What became of the inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    """What went wrong, by what an input was; one of each kind."""

    @property
    def tried(self) -> int:
        """How many inputs were judged."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        """Say how many, and what failed."""
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return "\n".join((f"{self.tried} inputs: {counts}", *self.failures.values()))


def fuzz(seed: int, count: int, targets: Iterable[str] = ()) -> Tally:
    """Judge ``count`` inputs, each target in turn."""
    tally = Tally()
    names = list(targets) or list(TARGETS)
    for number in range(count):
        target = TARGETS[names[number % len(names)]]
        verdict, kind = judge(target, f"{seed}:{number}:{target.name}")
        tally.counts[verdict.split(":")[0] if verdict.startswith("failed") else verdict] += 1
        if verdict.startswith("failed"):
            tally.failures.setdefault(f"{target.name} {kind}", f"{target.name}: {verdict}")
    return tally


def judge(target: Target, seed: str) -> tuple[str, str]:
    """Return what became of an input, "failed: .." with the reason, and what kind it was."""
    random = Random(seed)
    call = target.make()
    spoiled, is_same = _spoiled(call.arguments, target.parameters, random)
    what = ", ".join(f"{name}={_described(spoiled[name])}" for name in spoiled)
    names = {name for given in spoiled for name in (given, *target.synonyms.get(given, ()))}
    arguments = call.arguments | spoiled
    watched = _Watch(arguments, target.outputs)
    values.shown.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = call.function(**arguments)
    except BaseException as error:  # the judge of all of them
        wrong = _wrong_refusal(error, names) or watched.wrong_after_refusal()
        wrong = wrong or ("a valid input was refused: " + str(error)[:300]) * _means_it(
            is_same, spoiled, error
        )
        kind = type(error).__name__ + re.sub(r"\d+", "0", wrong)[:60]
        return _verdict("refused", wrong, seed, what), kind
    wrong = watched.wrong_after_call() or ("asked to show itself" if values.shown else "")
    if not wrong and is_same:
        wrong = _wrong_result(target, call, result, arguments)
    if not wrong:
        wrong = _wrong_beside_plain(target, spoiled, result)
    return _verdict("returned", wrong, seed, what), re.sub(r"\d+", "0", wrong)[:60]


def _verdict(found: str, wrong: str, seed: str, what: str) -> str:
    return f"failed: {wrong} (seed {seed!r}, {what})" if wrong else found


def _means_it(is_same: bool, spoiled: Arguments, error: BaseException) -> bool:
    """Whether tensors of the same values were refused without one of the known reasons."""
    del spoiled
    if not is_same:
        return False
    known = ("grad", "stride", "contiguous", "negative bit", "dtype", "share memory", "class")
    return not any(word in str(error) for word in known)


# --- inputs ---------------------------------------------------------------------------------------


def _spoiled(
    arguments: Arguments, parameters: tuple[str, ...], random: Random
) -> tuple[Arguments, bool]:
    """Return other values for one argument or two, and whether they mean the same."""
    count = 1 if random.random() < 0.75 else 2
    found: Arguments = {}
    is_same = True
    for name in random.sample(parameters, min(count, len(parameters))):
        given = arguments.get(name)
        if name in arguments and random.random() < 0.6 and _parts(given):
            found[name], same = _with_spoiled_part(given, random)
        else:
            found[name], same = values.any_value(random), False
        is_same &= same
    return found, is_same


def _parts(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        or (isinstance(value, (tuple, list)) and bool(value) and isinstance(value[0], Tensor))
        or (dataclasses.is_dataclass(value) and any(isinstance(v, Tensor) for v in _fields(value)))
    )


def _fields(value: object) -> list[object]:
    return [getattr(value, f.name) for f in dataclasses.fields(value)]  # type: ignore[arg-type]


def _with_spoiled_part(value: object, random: Random) -> tuple[object, bool]:
    if isinstance(value, Tensor):
        return values.spoiled(value, random)
    if isinstance(value, (tuple, list)):
        place = random.randrange(len(value))
        part, is_same = values.spoiled(value[place], random)
        parts = [*value[:place], part, *value[place + 1 :]]
        return type(value)(parts), is_same
    names = [f.name for f in dataclasses.fields(value)]  # type: ignore[arg-type]
    tensors = [name for name in names if isinstance(getattr(value, name), Tensor)]
    name = random.choice(tensors)
    part, is_same = values.spoiled(getattr(value, name), random)
    return dataclasses.replace(value, **{name: part}), is_same  # type: ignore[type-var]


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        marks = [
            *(["neg"] if value.layout is torch.strided and value.is_neg() else []),
            *(["grad"] if value.requires_grad else []),
        ]
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{type(value).__name__}{shape} {value.dtype} {value.device} {value.layout} {marks}"
    if isinstance(value, (tuple, list)) and len(value) < 9 and type(value) in (tuple, list):
        parts = ", ".join(_described(part) if part is not value else ".." for part in value)
        return f"{type(value).__name__}({parts})"
    if isinstance(value, values.HOSTILE):
        return type(value).__name__
    try:
        text = repr(value) if not dataclasses.is_dataclass(value) else type(value).__name__
    except Exception:  # such as of an integer of too many digits
        text = "unprintable"
    return f"{type(value).__name__}:{text[:60]}"


# --- what is wrong with a refusal ---------------------------------------------------------------


def _wrong_refusal(error: BaseException, names: set[str]) -> str:
    if not isinstance(error, _REFUSALS):
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = "hostile" if isinstance(error, values.HostileCallError) else str(error)[:300]
        return f"{type(error).__name__}: {text} at {where.filename}:{where.lineno}"
    if values.shown:
        return f"{values.shown[0]} was asked to show itself"
    text = str(error)
    if len(text) > MOST_LETTERS:
        return f"a message of {len(text)} letters: {text[:200]}"
    if not any(re.search(rf"(?<![a-z]){re.escape(name)}", text) for name in names):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"names no argument: {text[:300]} at {where.filename}:{where.lineno}"
    return ""


class _Watch:
    """Memory before a call."""

    def __init__(self, arguments: Mapping[str, object], outputs: frozenset[str]) -> None:
        self._outputs = [t for name in outputs for t in tensors_in(arguments.get(name))]
        seen: dict[int, torch.UntypedStorage] = {}
        for value in arguments.values():
            for tensor in tensors_in(value):
                if (storage := _storage_of(tensor)) is not None:
                    seen[storage.data_ptr()] = storage
        self._before = [(storage, storage.clone()) for storage in seen.values()]

    def wrong_after_refusal(self) -> str:
        for storage, before in self._before:
            if not torch.equal(_bytes(storage), _bytes(before)):
                return "memory was written before the refusal"
        return ""

    def wrong_after_call(self) -> str:
        """Say that something outside the outputs was written."""
        for storage, before in self._before:
            old = _bytes(before)
            new = _bytes(storage).clone()
            for tensor in self._outputs:
                if (own := _storage_of(tensor)) is None or own.data_ptr() != storage.data_ptr():
                    continue
                dtype = tensor.dtype
                if old.numel() % dtype.itemsize:
                    continue
                for memory in (old, new):
                    view = memory.view(torch.uint8).view(_BYTES[dtype.itemsize])
                    strided = view.as_strided(
                        tensor.shape, tensor.stride(), tensor.storage_offset()
                    )
                    strided.zero_()
            if not torch.equal(old, new):
                return "memory outside the outputs was written"
        return ""


_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None


def tensors_in(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors of a value."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 3:
        return
    elif isinstance(value, (tuple, list)):
        for part in list(value)[:50]:
            yield from tensors_in(part, depth + 1)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()), depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(_fields(value), depth + 1)
    elif hasattr(type(value), "tensors"):
        yield from tensors_in(value.tensors, depth + 1)  # type: ignore[attr-defined]


# --- what is wrong with a result ------------------------------------------------------------------


def _flat(target: Target, result: object, arguments: Mapping[str, object]) -> list[object]:
    """Return what a call gave and wrote, to be compared."""
    written = [t for name in sorted(target.outputs) for t in tensors_in(arguments.get(name))]
    found: list[object] = [*written, *tensors_in(result)]
    if isinstance(result, (int, float, str, bool, np.ndarray)):
        found.append(result)
    return found


def _wrong_result(
    target: Target, call: Call, result: object, arguments: Mapping[str, object]
) -> str:
    del call
    valid = target.make()
    wanted = valid.function(**valid.arguments)
    return _difference(_flat(target, result, arguments), _flat(target, wanted, valid.arguments))


def _wrong_beside_plain(target: Target, spoiled: Arguments, result: object) -> str:
    """Compare with what the values of plain types give."""
    simple = {name: values.plain(value) for name, value in spoiled.items()}
    if all(simple[name] is spoiled[name] for name in spoiled):
        return ""
    call = target.make()
    arguments = call.arguments | simple
    try:
        wanted = call.function(**arguments)
    except _REFUSALS as error:
        return f"accepted, and the value of the plain type is refused: {str(error)[:200]}"
    del wanted, result
    return ""


def _difference(found: list[object], wanted: list[object]) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} results instead of {len(wanted)}"
    for mine, other in zip(found, wanted, strict=True):
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            same = mine.shape == other.shape and torch.equal(
                mine.detach().double().nan_to_num(7), other.detach().double().nan_to_num(7)
            )
        else:
            same = bool(np.all(mine == other))  # type: ignore[comparison-overlap]
        if not same:
            return "a tensor of the same values gives another result"
    return ""
