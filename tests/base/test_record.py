"""Values are frozen dataclasses, whatever it costs to make them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest

from jitattn.base.record import Value


class Point(Value):
    """A place."""

    kind: ClassVar[str] = "point"

    x: int
    y: int | None = None


class Solid(Point):
    """A place in space."""

    z: int


class Other(Value):
    """Another thing with the fields of a place."""

    x: int
    y: int | None = None


def test_fields_are_keyword_arguments_with_defaults() -> None:
    point = Point(x=1)
    assert (point.x, point.y, point.kind) == (1, None, "point")
    assert [f.name for f in dataclasses.fields(Solid)] == ["x", "y", "z"]
    assert dataclasses.asdict(Solid(z=3, x=1)) == {"x": 1, "y": None, "z": 3}
    for arguments in ({}, {"y": 1}, {"x": 1, "w": 2}, {"x": 1, "kind": "a"}):
        with pytest.raises(TypeError, match="Point has x, y; given"):
            Point(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Point(1)  # type: ignore[misc]


def test_they_are_frozen() -> None:
    point = Point(x=1)
    for name in ("x", "y", "new"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(point, name, 2)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(point, name)
    assert dataclasses.replace(point, y=2) == Point(y=2, x=1)
    assert point == Point(x=1)


def test_equal_ones_hash_alike_and_other_classes_are_unequal() -> None:
    assert {Point(x=1, y=2), Point(y=2, x=1), Point(x=2, y=1)} == {Point(x=1, y=2), Point(x=2, y=1)}
    assert Point(x=1) != Other(x=1)
    assert Point(x=1) != (1, None)
    with pytest.raises(TypeError):
        hash(Point(x=[]))  # type: ignore[arg-type]


def test_they_print_and_travel() -> None:
    solid = Solid(x=1, y=2, z=3)
    assert repr(solid) == "Solid(x=1, y=2, z=3)"
    assert pickle.loads(pickle.dumps(solid)) == copy.deepcopy(solid) == copy.copy(solid) == solid
