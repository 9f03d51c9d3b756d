"""Whether tensors have bytes in common: what a kernel writes is to be nothing that it reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

# Where two tensors of different strides lie in each other, so many parts of them are looked at.
_MAX_STEPS = 4096
# Addresses that are remembered of tensors that lie alike.
_MAX_KNOWN = 1024


class _Bytes(NamedTuple):
    """Runs of bytes, one for each place in dimensions of (size, stride), the widest one first."""

    begin: int
    dims: tuple[tuple[int, int], ...]
    run: int

    @property
    def end(self) -> int:
        return self.begin + self.run + sum((size - 1) * stride for size, stride in self.dims)

    def part(self, index: int) -> _Bytes:
        """One step of the first dimension."""
        return _Bytes(self.begin + index * self.dims[0][1], self.dims[1:], self.run)


def _bytes_of(tensor: Tensor) -> _Bytes:
    run = item = tensor.element_size()
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if not dims and stride * item <= run:  # they follow each other, or lie on each other
            run += (size - 1) * stride * item
        else:
            dims.append((size, stride * item))
    return _Bytes(tensor.data_ptr(), tuple(reversed(dims)), run)


def span_of(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last; 0 of an empty one."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def share_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on one device have a byte in common.

    Exact where their strides agree, as those of views of one tensor do. False, too, where they
    don't and so much of both lies in each other that it would take long to say.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    return _meet(_bytes_of(a), _bytes_of(b), [_MAX_STEPS])


def _meet(a: _Bytes, b: _Bytes, steps: list[int]) -> bool:
    if a.begin >= b.end or b.begin >= a.end:
        return False
    if not a.dims and not b.dims:
        return True
    if a.dims and b.dims and a.dims[0][1] == b.dims[0][1]:
        pairs = _steps_of_both(a, b)
    else:
        if not a.dims or (b.dims and b.dims[0][1] > a.dims[0][1]):
            a, b = b, a
        pairs = ((a.part(i), b) for i in _steps_within(a, b))
    for first, second in pairs:
        steps[0] -= 1
        if steps[0] < 0:
            return False
        if _meet(first, second, steps):
            return True
    return False


def _steps_within(a: _Bytes, b: _Bytes) -> range:
    """The parts of ``a`` that reach into the range of ``b``."""
    size, stride = a.dims[0]
    inner = a.part(0).end - a.begin
    first = (b.begin - a.begin - inner) // stride + 1
    last = (b.end - 1 - a.begin) // stride
    return range(max(first, 0), min(last, size - 1) + 1)


def _steps_of_both(a: _Bytes, b: _Bytes) -> Iterable[tuple[_Bytes, _Bytes]]:
    """Yield the ways in which parts of both lie to each other, whose strides are the same."""
    stride = a.dims[0][1]
    first, second = a.part(0), b.part(0)
    ahead = b.begin - a.begin
    lowest = -((ahead + second.end - second.begin - 1) // stride)
    highest = (first.end - first.begin - 1 - ahead) // stride
    for step in range(max(lowest, 1 - a.dims[0][0]), min(highest, b.dims[0][0] - 1) + 1):
        yield first, b.part(0)._replace(begin=b.begin + step * stride)


def refuse_shared_bytes(
    written: Sequence[tuple[str, Tensor]], read: Sequence[tuple[str, Tensor]]
) -> None:
    """Raise ValueError where a tensor that is written has bytes of another one, written or read.

    Raises:
        ValueError: naming both.
    """
    for i, (name, tensor) in enumerate(written):
        for other_name, other in (*written[i + 1 :], *read):
            if share_bytes(tensor, other):
                raise ValueError(
                    f"{name} shares memory with {other_name}: it is written while that is in use; "
                    "give memory of its own"
                )


class Apart:
    """Which of the tensors that lie like some known ones are known to be apart.

    In three quick ways: at these addresses they were before; the spans of no two of them meet; or
    those that do lie to each other as they did before.
    """

    def __init__(self, tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Watch ``pairs``, numbers of ``tensors``; one of each pair is written."""
        spans = [span_of(tensor) for tensor in tensors]
        self._pairs = [(i, j, -spans[j], spans[i]) for i, j in pairs]
        watched = sorted({index for pair in pairs for index in pair})
        self._key: Callable[[Sequence[int]], object] = (
            operator.itemgetter(*watched) if watched else lambda pointers: None
        )
        self._known: set[object] = set()
        self._meetings: set[tuple[int, int, int]] = set()

    def holds(self, pointers: Sequence[int]) -> bool:
        """Whether all pairs are known to be apart at these addresses."""
        key = self._key(pointers)
        if key in self._known:
            return True
        if not self._meetings.issuperset(self._meetings_at(pointers)):
            return False
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(key)
        return True

    def learn(self, pointers: Sequence[int]) -> None:
        """Know that all pairs are apart at these addresses, and wherever they lie so."""
        if len(self._meetings) >= _MAX_KNOWN:
            self._meetings.clear()
        self._meetings.update(self._meetings_at(pointers))

    def _meetings_at(self, pointers: Sequence[int]) -> list[tuple[int, int, int]]:
        """The pairs whose spans meet, and how far apart they begin."""
        return [
            (i, j, pointers[j] - pointers[i])
            for i, j, low, high in self._pairs
            if low < pointers[j] - pointers[i] < high
        ]
