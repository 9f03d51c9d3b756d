"""A storage of the page manager whose copies fail where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from jitattn.kv import storage
from jitattn.kv.pool import Copies

WHERE = ("before", "partly", "between", "after")


class CopyError(RuntimeError):
    """The error of a copy."""


@contextmanager
def faulty(where: Callable[[], str]) -> Iterator[None]:
    """Let managers that are made meanwhile fail; ``where`` says how at each call, "" not at all."""

    class Faulty(storage.Storage):
        def copy(self, slots: int, copies: Copies) -> None:
            fault = where()
            if fault == "partly" and copies:  # half of the first kind, without a note of it
                kinds = ("offloads", "reloads", "duplicates")
                kind = next(kind for kind in kinds if getattr(copies, kind))
                pairs = list(getattr(copies, kind).items())
                super().copy(slots, Copies(**{kind: dict(pairs[: len(pairs) // 2])}))
            if fault == "between":
                super().copy(slots, Copies(copies.offloads))
            if fault in ("", "after"):
                super().copy(slots, copies)
            if fault:
                raise CopyError(fault)

    with patch.object(storage, "Storage", Faulty):
        yield
