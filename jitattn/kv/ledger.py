"""Lengths and page ids of all open sequences, a row each, so that many are read at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEVER = 2**62
_INT64_COLUMNS = ("committed", "history", "capacity", "num_blocks", "next_stale")
_BOOL_COLUMNS = ("is_active", "is_slow")


class Ledger:
    """A table whose rows are sequences.

    Attributes:
        committed: tokens that are final.
        history: tokens without a query in the next step.
        capacity: tokens that there are pages for.
        num_blocks: pages of a group that these tokens take, those it no longer has included.
        next_stale: the history at which a group loses its next page.
        is_active: whether its pages are on the device and stay there.
        is_slow: whether a step of it has to look at more than lengths.
        tail: the committed tokens of the last block that isn't full, [rows, page_size].
        ids: for each group int32 [rows, width], the slot of each block; -1 is none. Written by
            ``set_ids`` and ``clear_ids`` alone.
        num_writes: of each row's ids, [groups, rows].
    """

    committed: NDArray[np.int64]
    history: NDArray[np.int64]
    capacity: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    next_stale: NDArray[np.int64]
    is_active: NDArray[np.bool_]
    is_slow: NDArray[np.bool_]

    def __init__(self, num_groups: int, page_size: int) -> None:
        """Begin with no rows taken."""
        for name in _INT64_COLUMNS:
            setattr(self, name, np.zeros(0, np.int64))
        for name in _BOOL_COLUMNS:
            setattr(self, name, np.zeros(0, np.bool_))
        self.tail = np.zeros((0, page_size), np.int64)
        self.ids = [np.full((0, 16), -1, np.int32) for _ in range(num_groups)]
        self.num_writes = np.zeros((num_groups, 0), np.int64)
        self._free: list[int] = []

    def add(self) -> int:
        """Take a row, whose ids are -1."""
        if not self._free:
            self._grow_rows(max(16, 2 * len(self.committed)))
        return self._free.pop()

    def remove(self, row: int) -> None:
        """Give a row back."""
        self.is_active[row] = False
        self.clear_ids(row)
        self._free.append(row)

    def append(
        self,
        rows: NDArray[np.int64],
        flat: NDArray[np.int64],
        counts: NDArray[np.int64],
        chosen: NDArray[np.bool_],
        inputs: int,
    ) -> None:
        """Commit tokens to the chosen of some rows, whose blocks stay as they are.

        Args:
            rows: different ones.
            flat: the tokens of all rows, one row after the other.
            counts: how many each row has.
            chosen: which rows.
            inputs: tokens after the history that there is room for.
        """
        own = np.repeat(chosen, counts)
        rows_of, begins = np.repeat(rows, counts), np.repeat(np.cumsum(counts) - counts, counts)
        at = self.committed[rows_of] + np.arange(len(flat)) - begins
        self.tail[rows_of[own], at[own] % self.tail.shape[1]] = flat[own]
        rows, counts = rows[chosen], counts[chosen]
        committed = self.committed[rows] + counts
        history = np.maximum(self.history[rows], committed)
        self.committed[rows] = committed
        self.history[rows] = history
        self.capacity[rows] = np.maximum(self.capacity[rows], history + inputs)

    def set_ids(
        self, group: int, row: int, blocks: slice | list[int] | int, slots: list[int] | int
    ) -> None:
        """Write the slots of blocks."""
        self.ids[group][row, blocks] = slots
        self.num_writes[group, row] += 1

    def clear_ids(self, row: int) -> None:
        """Leave a row without slots."""
        for ids in self.ids:
            ids[row] = -1
        self.num_writes[:, row] += 1

    def widen(self, num_blocks: int) -> None:
        """Have room for the ids of so many blocks."""
        width = self.ids[0].shape[1]
        if num_blocks > width:
            width = max(num_blocks, width + width // 2)
            for group, ids in enumerate(self.ids):
                wider = np.full((len(ids), width), -1, np.int32)
                wider[:, : ids.shape[1]] = ids
                self.ids[group] = wider

    def _grow_rows(self, count: int) -> None:
        old = len(self.committed)
        more = count - old
        for name in (*_INT64_COLUMNS, *_BOOL_COLUMNS, "tail"):
            column = getattr(self, name)
            blank = np.zeros((more, *column.shape[1:]), column.dtype)
            setattr(self, name, np.concatenate([column, blank]))
        for group, ids in enumerate(self.ids):
            blank_ids = np.full((more, ids.shape[1]), -1, np.int32)
            self.ids[group] = np.concatenate([ids, blank_ids])
        no_writes = np.zeros((len(self.ids), more), np.int64)
        self.num_writes = np.concatenate([self.num_writes, no_writes], axis=1)
        self._free.extend(range(count - 1, old - 1, -1))
