"""Page ids of the layers of a group, from the slots of its blocks: numpy alone.

An *entry* is the page of a pool that the pool's first layer has for a block. Layer l of the L whose
pages a slot holds has, of entry e, page e - e % L + (e % L + l) % L: in a slot of its own block
e % L is 0; in scratch the layers take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from jitattn.kv.state import Scratch

Ids = NDArray[np.int32]


def make_entries(slots: Ids, num_layers: int, scratches: Iterable[tuple[int, Scratch]]) -> Ids:
    """Return the entries of a pool.

    Args:
        slots: [batch_size, width], negative where there is none.
        num_layers: pages of a slot of the pool.
        scratches: the requests that have scratch, and it.
    """
    entries = slots * np.int32(num_layers)
    for request, scratch in scratches:
        turns = np.arange(scratch.stop - scratch.start, dtype=np.int32)
        ids = np.asarray(scratch.slot_ids, np.int32)[turns // num_layers]
        entries[request, scratch.start : scratch.stop] = ids * num_layers + turns % num_layers
    return entries


def spread_entries(
    entries: Ids, num_layers: int, offsets: Sequence[int], out: Iterable[Ids], *, has_scratch: bool
) -> None:
    """Write the page ids of layers, at ``offsets`` in a slot, into one array of ``out`` each."""
    none = entries >> 31  # all bits where there is no page: or'ed with any id, -1
    if not has_scratch:
        for offset, table in zip(offsets, out, strict=True):
            np.add(entries, np.int32(offset), out=table)
            np.bitwise_or(table, none, out=table)
        return
    turns = entries % np.int32(num_layers)
    begins = entries - turns
    for offset, table in zip(offsets, out, strict=True):
        np.add(begins, (turns + np.int32(offset)) % np.int32(num_layers), out=table)
        np.bitwise_or(table, none, out=table)
