"""Free and taken slots of one tier: ``SlotAllocator``."""

from __future__ import annotations

from collections.abc import Iterable

from jitattn.base.errors import KVCacheError


class SlotAllocator:
    """Slots 0 to ``total`` - 1, each free or taken.

    Attributes:
        total: how many there are.
        peak: the most that were taken at a time.
    """

    __slots__ = ("_free", "_is_taken", "peak", "total")

    def __init__(self, total: int) -> None:
        """Begin with all of them free."""
        self.total = total
        self.peak = 0
        self._free = list(range(total - 1, -1, -1))
        self._is_taken = bytearray(total)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """Take a free slot, the one that was freed last.

        Raises:
            KVCacheError: there is none.
        """
        if not self._free:
            raise KVCacheError(f"all {self.total} slots are taken")
        slot = self._free.pop()
        self._is_taken[slot] = 1
        self.peak = max(self.peak, self.total - len(self._free))
        return slot

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back, all or, if one of them was not taken, none.

        Raises:
            KVCacheError: a slot that is not taken, or twice in ``slots``.
        """
        listed = list(slots)
        if len(set(listed)) < len(listed):
            raise KVCacheError(f"slots {listed} has a slot twice")
        for slot in listed:
            if not 0 <= slot < self.total or not self._is_taken[slot]:
                raise KVCacheError(f"slot {slot} of {self.total} is not taken")
        for slot in listed:
            self._is_taken[slot] = 0
        self._free.extend(listed)
