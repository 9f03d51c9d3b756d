"""Slots of a group's blocks on a device, and block tables made there: ``DeviceBlockTables``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jitattn.base.errors import KVCacheError
from jitattn.kernels.common.device_kernels import is_capturing
from jitattn.kernels.pages.layer_tables import write_layer_tables
from jitattn.kernels.pages.params import SlotChange, TableRequest
from jitattn.kv.ledger import Ledger
from jitattn.kv.page_ids import Ids
from jitattn.kv.state import Scratch

_REQUEST, _CHANGE = np.dtype(TableRequest), np.dtype(SlotChange)
_REQUEST_INTS, _CHANGE_INTS = _REQUEST.itemsize // 4, _CHANGE.itemsize // 4
_Requests = NDArray[np.void]


class DeviceBlockTables:
    """A group's part of the ledger on a device, as far as tables have asked for it.

    Each call brings what the rows it names have changed since they were last named, and one kernel
    takes that in and writes the tables.
    """

    def __init__(self, ledger: Ledger, group: int, device: torch.device) -> None:
        """Begin with nothing on the device."""
        self._ledger = ledger
        self._group = group
        self._device = device
        self._slots = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._layers: dict[tuple[tuple[int, int], ...], Tensor] = {}
        # What the device has, and how often its rows had been written then.
        self._known: Ids = np.empty((0, 0), np.int32)
        self._num_writes = np.empty(0, np.int64)

    def write(
        self,
        tables: Tensor,
        layers: tuple[tuple[int, int], ...],
        rows: Sequence[int],
        table_rows: Sequence[int],
        scratches: Sequence[tuple[int, Scratch]],
        first_block: int = 0,
    ) -> None:
        """Write the tables of layers.

        Args:
            tables: int32 [num_layers, num_table_rows, width], at least as wide as the sequences.
            layers: for each the pages of a slot, and which of them is its own.
            rows: of the sequences in the ledger.
            table_rows: theirs in the tables.
            scratches: the requests that have scratch, and it.
            first_block: the columns before it are -1.

        Raises:
            KVCacheError: in a capture, whose replays would write what there is now.
        """
        if is_capturing(self._device):
            raise KVCacheError(
                "tables are made of what the host knows now, which a captured graph would write "
                "again: make them before the replay, in the tensors that the graph reads (out)"
            )
        if not rows:
            return
        requests = np.zeros(len(rows), _REQUEST)
        requests["row"], requests["table_row"] = rows, table_rows
        scratch_slots = _add_scratch(requests, scratches)
        self._follow()
        changed = self._find_changed(requests["row"])
        changes = self._add_changes(requests, changed)
        parts = [requests.view(np.int32), changes.view(np.int32), scratch_slots]
        here = torch.split(_upload(parts, self._device), [part.size for part in parts])
        write_layer_tables(
            tables,
            self._slots,
            layers=self._on_device(layers),
            requests=here[0].view(-1, _REQUEST_INTS),
            changes=here[1].view(-1, _CHANGE_INTS),
            scratch_slots=here[2],
            first_block=first_block,
            num_changed_blocks=1 + int(changes["block"].max(initial=-1)),
        )
        # Not before the launch, without which the device knows nothing of it.
        changed_rows = requests["row"][changed]
        self._known[changed_rows] = self._ledger.ids[self._group][changed_rows]
        self._num_writes[changed_rows] = self._ledger.num_writes[self._group, changed_rows]

    def _on_device(self, layers: tuple[tuple[int, int], ...]) -> Tensor:
        if layers not in self._layers:
            here = _upload([np.array(layers, np.int32).reshape(-1)], self._device)
            self._layers[layers] = here.view(-1, 2)
        return self._layers[layers]

    def _follow(self) -> None:
        """Begin anew where the ledger has grown."""
        shape = self._ledger.ids[self._group].shape
        if self._known.shape != shape:
            self._slots = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            self._known = np.full(shape, -1, np.int32)
            self._num_writes = np.full(shape[0], -1, np.int64)

    def _find_changed(self, rows: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the requests whose rows have been written since."""
        return np.flatnonzero(self._ledger.num_writes[self._group, rows] != self._num_writes[rows])

    def _add_changes(self, requests: _Requests, changed: NDArray[np.intp]) -> _Requests:
        """Return what the device doesn't know of some requests, and note for each which it is."""
        rows = requests["row"][changed]
        ids = self._ledger.ids[self._group][rows]
        # Request by request, the blocks of each rising, as the kernel looks for them.
        which, blocks = np.nonzero(ids != self._known[rows])
        ends = np.cumsum(np.bincount(which, minlength=len(changed)))
        requests["change_end"][changed] = ends
        requests["change_begin"][changed[1:]] = ends[:-1]
        changes = np.empty(len(blocks), _CHANGE)
        changes["block"], changes["slot"] = blocks, ids[which, blocks]
        return changes


def _add_scratch(requests: _Requests, scratches: Sequence[tuple[int, Scratch]]) -> Ids:
    """Return the slots of all scratch, and note for each request which of them it has."""
    slots: list[int] = []
    for i, scratch in scratches:
        requests["scratch_start"][i], requests["scratch_stop"][i] = scratch.start, scratch.stop
        requests["scratch_begin"][i] = len(slots)
        slots += scratch.slot_ids
    return np.array(slots, np.int32)


def _upload(parts: Sequence[Ids], device: torch.device) -> Tensor:
    """Return arrays on a device, one after the other, without waiting."""
    # torch gives pinned memory to others only after the copies from it that it knows of.
    size = sum(part.size for part in parts)
    here = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
    np.concatenate(parts, out=here.numpy())
    return here.to(device, non_blocking=True)
