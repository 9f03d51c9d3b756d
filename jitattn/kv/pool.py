"""Pages in slots of two tiers, with eviction by priority and age: ``Page``, ``PagePool``.

A page is locked while a running sequence or a pin has it: it is on the device and stays where it
is. Held by suspended sequences alone, it may go to the host, and is not lost. With neither it is
kept only for sequences to come, and dropped when the room is needed. Those of lower priority go
first, and among them what was used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from jitattn.base.errors import KVCacheError
from jitattn.kv.slot_allocator import SlotAllocator


class Page:
    """The pages of all layers of a group for one block, in one slot.

    Attributes:
        pool: whose slot it has.
        group: index of the group.
        slot: in the tier it is in; -1 once it is gone.
        is_on_host: which tier.
        locks: running sequences and pins that have it.
        holds: suspended sequences that have it.
        node: where the prefix tree has it, or None.
        priority: the highest of the sequences that had it.
        writer: id of the one sequence that may write to it though others have it, or -1.
        queue: what it waits in to be evicted, or None.
        stamp: when it came there.
    """

    __slots__ = (
        "group", "holds", "is_on_host", "locks", "node", "pool", "priority", "queue", "slot",
        "stamp", "writer",
    )  # fmt: skip

    def __init__(self, pool: PagePool, group: int, slot: int, priority: int, writer: int) -> None:
        """Begin on the device, locked once, by its writer."""
        self.pool = pool
        self.group = group
        self.slot = slot
        self.is_on_host = False
        self.locks = 1
        self.holds = 0
        self.node: object | None = None
        self.priority = priority
        self.writer = writer
        self.queue: EvictionQueue | None = None
        self.stamp = 0

    @property
    def num_users(self) -> int:
        """Sequences and pins that have it."""
        return self.locks + self.holds


class EvictionQueue:
    """Pages that may go, by priority, then by how long they wait."""

    __slots__ = ("_buckets", "size")

    def __init__(self) -> None:
        """Begin empty."""
        self._buckets: dict[int, OrderedDict[Page, None]] = {}
        self.size = 0

    def add(self, page: Page) -> None:
        """Let ``page`` wait, behind the others of its priority."""
        self._buckets.setdefault(page.priority, OrderedDict())[page] = None
        page.queue = self
        self.size += 1

    def remove(self, page: Page) -> None:
        """Take ``page`` out."""
        bucket = self._buckets[page.priority]
        del bucket[page]
        if not bucket:
            del self._buckets[page.priority]
        page.queue = None
        self.size -= 1

    def first(self) -> Page | None:
        """Return the page to go next."""
        if not self._buckets:
            return None
        return next(iter(self._buckets[min(self._buckets)]))


@dataclass(slots=True)
class Copies:
    """Copies of one set of slots; nothing that one of them reads is written by a later kind.

    Attributes:
        offloads: by slot of the host: slot of the device.
        reloads: by slot of the device: slot of the host.
        duplicates: by slot of the device: slot of the device.
    """

    offloads: dict[int, int] = field(default_factory=dict)
    reloads: dict[int, int] = field(default_factory=dict)
    duplicates: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is a copy."""
        return bool(self.offloads or self.reloads or self.duplicates)


class PagePool:
    """One set of slots on the device, and one on the host.

    Attributes:
        device: slots there.
        host: slots there; maybe none.
        droppable: pages on the device that nobody has but the prefix tree.
        held: pages on the device that suspended sequences have.
        on_host: pages on the host that nobody has but the prefix tree.
        copies: what the change that is being made asks for.
        num_dropped: pages that were lost to the prefix tree for want of room.
    """

    def __init__(self, num_slots: int, num_host_slots: int, drop: Callable[[Page], None]) -> None:
        """Begin empty; ``drop`` takes a page, which may go, out of the prefix tree."""
        self.device = SlotAllocator(num_slots)
        self.host = SlotAllocator(num_host_slots)
        self.droppable = EvictionQueue()
        self.held = EvictionQueue()
        self.on_host = EvictionQueue()
        self.copies = Copies()
        self.num_dropped = 0
        self._drop = drop
        self._clock = 0

    # --- counting

    @property
    def num_takeable(self) -> int:
        """Slots of the device that can be had, by evicting what may go."""
        return self.takeable_with(0, 0, 0)

    def takeable_with(self, freed: int, dropped: int, held: int, reloaded: int = 0) -> int:
        """Return ``num_takeable`` once so many more were free, droppable, held and reloaded."""
        room = self.host.num_free + self.on_host.size + reloaded
        held = min(self.held.size + held, room)
        return self.device.num_free + freed + self.droppable.size + dropped + held

    @property
    def num_locked(self) -> int:
        """Slots of the device that can't be had."""
        return self.device.total - self.device.num_free - self.droppable.size - self.held.size

    # --- slots

    def take_copies(self) -> Copies:
        """Return the copies of a change, and begin the next."""
        copies, self.copies = self.copies, Copies()
        return copies

    def take(self, count: int) -> list[int]:
        """Take slots of the device, evicting as many pages as it needs.

        Raises:
            KVCacheError: fewer can be had, which callers make sure of.
        """
        while self.device.num_free < count:
            self._evict()
        return [self.device.take() for _ in range(count)]

    def reload(self, page: Page, slot: int) -> None:
        """Move a page from the host to a slot of the device, which was taken for it."""
        self.copies.reloads[slot] = page.slot
        self.host.free((page.slot,))
        page.slot, page.is_on_host = slot, False

    def settle(self, page: Page) -> None:
        """Put a page in the queue where its users let it be, or free its slot without any."""
        queue = None
        if page.locks == 0:
            if page.holds > 0:
                queue = None if page.is_on_host else self.held
            elif page.node is not None:
                queue = self.on_host if page.is_on_host else self.droppable
            else:
                self._free(page)
                return
        if page.queue is not queue:
            if page.queue is not None:
                page.queue.remove(page)
            if queue is not None:
                self._clock += 1
                page.stamp = self._clock
                queue.add(page)

    def raise_priority(self, page: Page, priority: int) -> None:
        """Let a page be worth what a sequence that has it is worth."""
        if priority > page.priority:
            queue = page.queue
            if queue is not None:
                queue.remove(page)
            page.priority = priority
            if queue is not None:
                queue.add(page)

    def _free(self, page: Page) -> None:
        if page.queue is not None:
            page.queue.remove(page)
        (self.host if page.is_on_host else self.device).free((page.slot,))
        page.slot = -1

    # --- eviction

    def _evict(self) -> None:
        """Free a slot of the device: the page to go first goes to the host, or is dropped."""
        page = self._victim()
        room = self._host_room(page)
        if page.slot < 0 or page.is_on_host:
            return  # it went with the page that made room
        if not room:
            self._lose(page)
            return
        slot = self.host.take()
        self.copies.offloads[slot] = page.slot
        self.device.free((page.slot,))
        page.slot, page.is_on_host = slot, True
        self.settle(page)

    def _victim(self) -> Page:
        held = self.held.first() if self.host.num_free + self.on_host.size else None
        dropped = self.droppable.first()
        if held is None or dropped is None:
            page = dropped if held is None else held
            if page is None:
                raise KVCacheError(f"no page of {self.device.total} can go")
            return page
        return min(held, dropped, key=lambda page: (page.priority, page.stamp))

    def _host_room(self, page: Page) -> bool:
        """Make room on the host, where that costs nothing of more worth."""
        if self.host.num_free:
            return True
        last = self.on_host.first()
        if last is None or (page.holds == 0 and last.priority > page.priority):
            return False
        self._lose(last)
        return True

    def _lose(self, page: Page) -> None:
        self.num_dropped += 1
        self._drop(page)
