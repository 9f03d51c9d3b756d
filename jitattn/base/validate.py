"""Checks of numbers, flags and names, and values as errors show them. Torch-free.

Nothing here calls ``__repr__``, ``__str__`` or ``__index__`` of a caller's class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MAX_DIM = 2**20
"""The most elements of a head, heads, pages of a row and the like: none is near it."""

_MOST_SHOWN = 80
_PLAIN = bool | float | complex | None | Decimal | Fraction
_OWN = ("builtins", "decimal", "fractions")
_TOLD = ("dtype", "device", "layout", "bool", "bool_")


def shown(value: object) -> str:
    """Return ``value`` for an error: in few letters, and without calling a class of the caller's.

    Containers and other objects are their type's name.
    """
    kind = type(value)
    if isinstance(value, int) and kind is not bool:
        plain = int.__index__(value)
        text = str(plain) if plain.bit_length() < 256 else f"of {plain.bit_length()} bits"
    elif isinstance(value, str):
        plain_text = str.__str__(value)
        cut = plain_text[:_MOST_SHOWN]
        text = repr(cut) + ".." * (len(plain_text) > len(cut))
    elif (isinstance(value, _PLAIN) and kind.__module__ in _OWN) or kind.__module__ in (
        "torch",
        "numpy",
    ):
        text = _short_repr(value)
    else:
        text = f"a {type_name(value)}"
    return text


def _short_repr(value: object) -> str:
    if type(value).__name__ not in _TOLD and not isinstance(value, _PLAIN | Real):
        return f"a {type_name(value)}"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + ".."


def type_name(value: object) -> str:
    """Return the name of the type of ``value``."""
    name = type(value).__name__
    # NumPy's type has the same name.
    return "numpy.bool" if name == "bool" and not isinstance(value, bool) else name[:_MOST_SHOWN]


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool.

    Raises:
        TypeError: it is not; ``"no"`` would be true.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a {type_name(value)}: expected a bool")
    return value


def as_int(value: object) -> int | None:
    """Return the integer that ``value`` is; None where it is none, or a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    if isinstance(value, int):
        return int.__index__(value)
    try:
        return int(value)
    except Exception:  # a class of the caller's
        return None


def as_float(value: object) -> float | None:
    """Return the number that ``value`` is, or what is infinite; None where it is none, or a bool.

    NaN and, beyond floats, infinity are for the caller to refuse.
    """
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = int.__index__(value)
    elif isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # integers and fractions are unbounded
        return math.inf
    except Exception:  # a class of the caller's, or a signalling NaN
        return math.nan


def check_count(name: str, value: object, *, least: int = 1, most: int = INT64_MAX) -> int:
    """Return a count as an int.

    Raises:
        TypeError: the value is not an integer, or a bool.
        ValueError: the count is less than ``least`` or more than ``most``.
    """
    count = as_int(value)
    if count is None:
        raise TypeError(f"{name} is a {type_name(value)}: expected an int")
    if count < least or count > most:
        wanted = (
            f"at least {least}" if count < least and most == INT64_MAX else f"{least} to {most}"
        )
        raise ValueError(f"{name} is {shown(count)}: expected {wanted}")
    return count


def check_number(
    name: str, value: object, *, least: float = -math.inf, most: float = FLOAT32_MAX
) -> float:
    """Return a finite number, from ``least`` to ``most``, as a float.

    Raises:
        TypeError: the value is no number, or a bool.
        ValueError: it is not finite, or outside; by default, outside float32.
    """
    number = as_float(value)
    if number is None:
        raise TypeError(f"{name} is a {type_name(value)}: expected a number")
    if math.isinf(number) and not isinstance(value, float):
        raise ValueError(f"{name} is beyond floats: expected a finite number")
    if not math.isfinite(number) or number < least:
        wanted = "a finite number" if least == -math.inf else f"a finite number from {least} on"
        raise ValueError(f"{name} is {number}: expected {wanted}")
    if abs(number) > most:
        what = "a finite float32" if most == FLOAT32_MAX else f"at most {most:g}"
        raise ValueError(f"{name} is {number}: expected {what}")
    return number


def check_positive(name: str, value: object, *, most: float = FLOAT32_MAX) -> float:
    """Return a finite number above 0 as a float.

    Raises:
        TypeError, ValueError: it is none.
    """
    number = check_number(name, value, most=most)
    if number <= 0:
        raise ValueError(f"{name} is {number}: expected a positive number")
    return number


def check_name(name: str, value: object, choices: Sequence[str]) -> str:
    """Return one of ``choices``, as a plain string.

    Raises:
        ValueError: it is none of them.
    """
    plain = str.__str__(value) if isinstance(value, str) else None
    if plain is None or plain not in choices:
        *most, last = (repr(str(choice)) for choice in choices)
        wanted = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{name} is {shown(value)}: expected {wanted}")
    return plain
