"""Caches of layers and block tables of sequences for kernels: ``LayerView``.

On the CPU tables are made of the ledger; on a card by a kernel, of slots that are there already and
what has changed of them. A capture has none of it: fill ``out`` before a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jitattn.base.errors import KVCacheError
from jitattn.base.validate import check_count, type_name
from jitattn.kernels.pages.layer_tables import has_kernel
from jitattn.kv.block_manager import BlockManager
from jitattn.kv.device_block_tables import DeviceBlockTables
from jitattn.kv.layout import Layout, Place, stale_end
from jitattn.kv.ledger import NEVER
from jitattn.kv.mode import PageIndexMode
from jitattn.kv.page_ids import Ids, make_entries, spread_entries
from jitattn.kv.sequence import KVSequence, active_states
from jitattn.kv.state import Scratch, State
from jitattn.kv.storage import KVCache
from jitattn.tensors.cache_views import mark_view
from jitattn.tensors.page_tables import BlockTable, ViewTable
from jitattn.tensors.quantization import QuantizedKV
from jitattn.tensors.tensor_checks import check_tensor, check_writable

_INTEGERS = (torch.int32, torch.int64)
_LAST_ROW = 2**31 - 1


@dataclass(frozen=True)
class ViewKey:
    """Caches and tables with equal keys are for each other.

    Attributes:
        maker: what makes the tables, one for each manager.
        mode: how ids count.
        index: the layer, or in SHARED mode the group.
        has_scratch: whether tables may list scratch.
    """

    maker: object
    mode: PageIndexMode
    index: int
    has_scratch: bool

    def __str__(self) -> str:
        """Name the mode and the layer or group."""
        what = "layer" if self.mode is PageIndexMode.PER_LAYER else "the layers of group"
        return f"the {self.mode.name} view of {what} {self.index} of a page manager"


class BlockTableMaker:
    """Writes page ids of sequences into tensors."""

    def __init__(self, blocks: BlockManager, device: torch.device) -> None:
        """Made by a manager."""
        self._blocks = blocks
        self._layout: Layout = blocks.layout
        self._device = device
        # For each group; empty on the CPU.
        self._device_tables = [
            DeviceBlockTables(blocks.ledger, group.index, device)
            for group in self._layout.groups
            if has_kernel(device)
        ]
        # For each group, for each pool: pages of a slot, and each layer's place in group and slot.
        self._pools: list[list[tuple[int, list[int], list[int]]]] = [
            [self._layers_of(group.layer_ids, pool) for pool in range(len(counts))]
            for group, counts in zip(self._layout.groups, self._layout.pool_layers, strict=True)
        ]

    def _layers_of(self, layer_ids: Sequence[int], pool: int) -> tuple[int, list[int], list[int]]:
        places = [self._layout.places[layer_id] for layer_id in layer_ids]
        indexes = [i for i, place in enumerate(places) if place.pool == pool]
        return places[indexes[0]].num_layers, indexes, [places[i].offset for i in indexes]

    def all_layers(self, seqs: Sequence[KVSequence], group: int, out: Tensor | None) -> Tensor:
        """Return PER_LAYER ids of all layers, int32 [layers, batch_size, width]."""
        states = active_states(seqs, self._blocks)
        num_layers = len(self._layout.groups[group].layer_ids)
        shape = (num_layers, len(states), self._width(states))
        if out is None:
            out = torch.empty(shape, dtype=torch.int32, device=self._device)
        else:
            self._check_out(out, shape)
        scratches = self._scratches(states, group)
        # No one has pages before this block.
        first = self._first_block(states, group)
        if self._device_tables:
            places = [self._layout.places[i] for i in self._layout.groups[group].layer_ids]
            layers = tuple((place.num_layers, place.offset) for place in places)
            rows = [state.row for state in states]
            self._device_tables[group].write(out, layers, rows, range(len(rows)), scratches, first)
            return out
        slots = self._slots(states, group, out.shape[-1])
        tables = out[:, : len(states)].numpy()  # torch would wake threads for so little
        tables[..., :first] = -1
        for size, indexes, offsets in self._pools[group]:
            entries = make_entries(slots, size, scratches)[:, first:]
            into = [tables[i, :, first:] for i in indexes]
            spread_entries(entries, size, offsets, into, has_scratch=bool(scratches))
        return out

    def _first_block(self, states: Sequence[State], group: int) -> int:
        history = self._blocks.ledger.history[[state.row for state in states]]
        window = self._layout.groups[group].window_left
        return stale_end(int(history.min(initial=NEVER)), window, self._layout.page_size)

    def one_layer(
        self, seqs: Sequence[KVSequence], place: Place, rows: object, out: Tensor | None, *,
        view: ViewKey,
    ) -> BlockTable:  # fmt: skip
        """Return the table of a layer, or of all layers of its group in SHARED mode."""
        is_per_layer = view.mode is PageIndexMode.PER_LAYER
        states = active_states(seqs, self._blocks)
        scratches = self._scratches(states, place.group)
        if scratches and not is_per_layer:
            state = states[scratches[0][0]]
            raise KVCacheError(
                f"sequence {state.id} has scratch blocks in group {place.group}, which SHARED "
                "tables can't list: take PER_LAYER, or declare its history first"
            )
        where = None if rows is None else self._rows(rows, len(states))
        num_rows = len(states) if where is None else 1 + max(where.tolist(), default=-1)
        shape = (num_rows, self._width(states))
        if out is None:
            out = torch.empty(shape, dtype=torch.int32, device=self._device)
            if where is not None:
                out.fill_(-1)
        else:
            self._check_out(out, shape)
        layer = (place.num_layers, place.offset) if is_per_layer else (1, 0)
        self._write_layer(out, layer, states, place.group, where, scratches)
        rows_there = None if where is None else where.to(self._device)
        return ViewTable(out, rows=rows_there, view=view)

    def _write_layer(
        self,
        out: Tensor,
        layer: tuple[int, int],
        states: Sequence[State],
        group: int,
        where: Tensor | None,
        scratches: Sequence[tuple[int, Scratch]],
    ) -> None:
        """Write the table of a layer, given as pages of a slot and which of them is its own."""
        table_rows = list(range(len(states))) if where is None else where.tolist()
        if self._device_tables:
            rows = [state.row for state in states]
            self._device_tables[group].write(out[None], (layer,), rows, table_rows, scratches)
            return
        size, offset = layer
        entries = make_entries(self._slots(states, group, out.shape[-1]), size, scratches)
        ids = np.empty_like(entries)
        spread_entries(entries, size, [offset], [ids], has_scratch=bool(scratches))
        out.numpy()[table_rows] = ids

    def _width(self, states: Sequence[State]) -> int:
        """Return the blocks of the longest; a table has at least one."""
        counts = self._blocks.ledger.num_blocks[[state.row for state in states]]
        return max(1, int(counts.max(initial=0)))

    def _slots(self, states: Sequence[State], group: int, width: int) -> Ids:
        ids = self._blocks.ledger.ids[group]
        rows = [state.row for state in states]
        if width <= ids.shape[1]:
            return ids[rows, :width]
        slots = np.full((len(rows), width), -1, np.int32)
        slots[:, : ids.shape[1]] = ids[rows]
        return slots

    def _scratches(self, states: Sequence[State], group: int) -> list[tuple[int, Scratch]]:
        found = []
        for i, state in enumerate(states):
            scratch = state.scratch[group]
            if scratch is not None:
                found.append((i, scratch))
        return found

    def _check_out(self, out: Tensor, shape: Sequence[int]) -> None:
        check_tensor("out", out, (torch.int32,))
        least = list(shape)
        fits = out.dim() == len(least) and all(
            has >= needs for has, needs in zip(out.shape, least, strict=True)
        )
        if not fits or (len(least) == 3 and out.shape[0] != least[0]):
            raise ValueError(f"out has shape {list(out.shape)}: expected at least {least}")
        if out.device != self._device:
            raise ValueError(f"out is on {out.device}: expected {self._device}")
        check_writable("out", out)

    def _rows(self, rows: object, count: int) -> Tensor:
        given = rows if isinstance(rows, Tensor) else _listed_rows(rows)
        check_tensor("rows", given, _INTEGERS)
        if given.shape != (count,):
            raise ValueError(f"rows has shape {list(given.shape)}: expected [{count}]")
        listed = given.tolist()
        least, most = min(listed, default=0), max(listed, default=0)
        if len(set(listed)) < count or least < 0 or most > _LAST_ROW:
            raise ValueError(
                f"rows is {listed[:8]}: expected different rows, from 0 to {_LAST_ROW}"
            )
        return given


def _listed_rows(rows: object) -> Tensor:
    is_listed = isinstance(rows, Sequence) and not isinstance(rows, str)
    if not is_listed and not (isinstance(rows, np.ndarray) and rows.ndim):
        raise TypeError(f"rows is a {type_name(rows)}: expected integers, or a tensor")
    assert isinstance(rows, Sequence | np.ndarray)
    counts = [check_count("rows", row, least=0, most=_LAST_ROW) for row in rows]
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


class LayerView:
    """The cache of a layer, and tables for it. They are for each other alone.

    Attributes:
        layer_id: the layer.
        mode: how ids count.
    """

    __slots__ = ("_cache", "_key", "_maker", "_place", "layer_id", "mode")

    def __init__(
        self,
        place: Place,
        mode: PageIndexMode,
        maker: BlockTableMaker,
        cache: KVCache | None,
        *,
        has_scratch: bool,
    ) -> None:
        """Made by a manager."""
        is_per_layer = mode is PageIndexMode.PER_LAYER
        index = place.layer.layer_id if is_per_layer else place.group
        self._key = ViewKey(maker, mode, index, has_scratch and is_per_layer)
        if cache is not None:
            first = cache[0] if isinstance(cache, tuple) else cache
            mark_view(first.k if isinstance(first, QuantizedKV) else first, self._key)
        self.layer_id = place.layer.layer_id
        self.mode = mode
        self._place = place
        self._maker = maker
        self._cache = cache

    def __repr__(self) -> str:
        """Show the layer and the mode."""
        return f"LayerView({self.layer_id}, {self.mode.value})"

    @property
    def kv_cache(self) -> KVCache:
        """What ``AttentionPlanner.bind`` takes: views of the pool, nothing is copied.

        [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before tokens), a pair of
        such tensors without the second dimension where K and V differ, or a ``QuantizedKV``.

        Raises:
            KVCacheError: the manager has no storage.
        """
        if self._cache is None:
            raise KVCacheError("the manager has no storage: it was made with device=None")
        return self._cache

    def block_table(
        self,
        seqs: Sequence[KVSequence],
        *,
        rows: object = None,
        out: Tensor | None = None,
    ) -> BlockTable:
        """Return the pages of sequences, those of scratch included.

        Args:
            seqs: active sequences of the manager.
            rows: the row of each in the table, integers [batch_size], all different; None is 0, 1,
                and so on. Other rows stay as they are, and are -1 in a new table.
            out: int32 [at least as many rows, at least as wide], written in place, so that a
                captured kernel reads it again. None is a new one.

        Raises:
            KVCacheError: a closed, suspended or foreign sequence; in SHARED mode, one with scratch;
                on a card, a capture.
            TypeError, ValueError: ``rows`` or ``out`` doesn't fit.
        """
        return self._maker.one_layer(seqs, self._place, rows, out, view=self._key)
