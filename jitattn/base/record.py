"""Frozen records whose classes are cheap to create.

``@dataclass`` compiles the methods of each class, a millisecond of every process that imports it;
a dozen of those classes were half of the import time of a process that reads kernels from disk.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value:
    """Base of frozen dataclasses with keyword arguments; subclasses share its methods."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)
        cls._defaults = {field.name: field.default for field in fields(cls)}

    def __init__(self, **values: Any) -> None:
        """Hold a value for each field.

        Raises:
            TypeError: a field without a default has no value, or a value has no field.
        """
        given = self._defaults | values
        if len(given) > len(self._defaults) or any(value is MISSING for value in given.values()):
            names = ", ".join(self._defaults)
            raise TypeError(f"{type(self).__name__} has {names}; given {', '.join(values)}")
        self.__dict__.update(given)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__qualname__}({values})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))
