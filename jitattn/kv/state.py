"""Bookkeeping of a sequence besides its row of the ledger: ``State``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from jitattn.kv.pool import Page
from jitattn.kv.prefix_cache import Node


class Status(StrEnum):
    """What a sequence may do."""

    SUSPENDED = "suspended"
    ACTIVE = "active"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Blocks of a step whose pages lie, for one layer after the other, in the same slots.

    The layers of a group take turns: of block start + j, layer l of the L that a slot holds has
    page (j % L + l) % L of slot ``slot_ids[j // L]``.

    Attributes:
        start: the first such block.
        stop: the block after the last.
        slot_ids: their slots.
    """

    start: int
    stop: int
    slot_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class State:
    """A sequence.

    Attributes:
        id: for messages, and for pages that it may write; no other has it, ever.
        row: in the ledger.
        priority: of its pages.
        reuse_scratch: whether its steps have scratch.
        tip: its last committed full block in the prefix tree.
        pages: for each group a page or None for each block.
        first_blocks: for each group the first block that is needed.
        scratch: for each group; while suspended without slots.
        pins: the pages that were pinned, by group.
        status: what it may do.
        is_stopped: whether the caller has stopped committing.
        is_cut: whether what it commits can no longer be found by others.
    """

    id: int
    row: int
    priority: int
    reuse_scratch: bool
    tip: Node
    pages: list[list[Page | None]]
    first_blocks: list[int]
    scratch: list[Scratch | None]
    pins: dict[int, list[Page]] = field(default_factory=dict)
    status: Status = Status.SUSPENDED
    is_stopped: bool = False
    is_cut: bool = False

    @property
    def has_scratch(self) -> bool:
        """Whether a group has scratch blocks, with or without slots."""
        return self.scratch.count(None) < len(self.scratch)


@dataclass(slots=True)
class Change:
    """What new lengths mean for the pages of one group.

    Attributes:
        releases: blocks whose pages go, rising.
        new: blocks that get pages.
        copies: blocks whose pages others have, too, and that are about to be written.
        scratch: (start, stop) of the scratch blocks; the same twice is none.
        first_block: the first block that is needed.
    """

    releases: list[int]
    new: list[int]
    copies: list[int]
    scratch: tuple[int, int]
    first_block: int
