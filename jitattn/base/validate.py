"""Checks of numbers and flags. Torch-free."""

from __future__ import annotations

import math
from numbers import Integral, Real

INT32_MAX = 2**31 - 1


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool.

    Raises:
        TypeError: it is not; ``"no"`` would be true.
    """
    if not isinstance(value, bool):
        kind = type(value)
        # NumPy's type has the same name.
        own = "numpy.bool" if kind.__name__ == "bool" else kind.__name__
        raise TypeError(f"{name} is a {own}: expected a bool")
    return value


def check_count(name: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return a count as an int.

    Raises:
        TypeError: the value is not an integer, or a bool.
        ValueError: the count is less than ``least`` or more than ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is a {type(value).__name__}: expected an int")
    count = int(value)
    if count < least or (most is not None and count > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {count}: expected {wanted}")
    return count


def check_number(name: str, value: object, *, least: float = -math.inf) -> float:
    """Return a finite number, at least ``least``, as a float.

    Raises:
        TypeError, ValueError: the value is not one.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a number")
    try:
        number = float(value)
    except OverflowError:  # integers and fractions are unbounded
        raise ValueError(f"{name} is beyond floats: expected a finite number") from None
    if not math.isfinite(number) or number < least:
        wanted = "a finite number" if least == -math.inf else f"a finite number from {least} on"
        raise ValueError(f"{name} is {number}: expected {wanted}")
    return number
