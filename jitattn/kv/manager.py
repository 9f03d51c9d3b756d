"""Pages of all layers for all requests: ``KVCacheManager``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jitattn.base.errors import KVCacheError
from jitattn.base.validate import check_count, shown, type_name
from jitattn.kv.block_manager import BlockManager, as_int64, with_plain_memory
from jitattn.kv.config import DEFAULT_PRIORITY, MAX_PRIORITY, KVCacheConfig
from jitattn.kv.layout import LayerGroup, check_slots, make_layout, split_bytes
from jitattn.kv.mode import PageIndexMode, mode_of
from jitattn.kv.sequence import KVSequence, active_states
from jitattn.kv.state import State
from jitattn.spec.config import MAX_KV_LEN

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jitattn.kv.layer_view import BlockTableMaker, LayerView
    from jitattn.kv.storage import Storage

_NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One set of slots.

    Attributes:
        slot_bytes: bytes of a slot, all pools together.
        total: slots on the device.
        used: of them, those of active sequences, scratch and pins.
        held: those of suspended sequences alone.
        reusable: those that only later sequences may want.
        free: the others.
        peak: the most that were not free at a time.
        host_total: slots on the host.
        host_held: of them, those of suspended sequences.
        host_reusable: those that only later sequences may want.
    """

    slot_bytes: int
    total: int
    used: int
    held: int
    reusable: int
    free: int
    peak: int
    host_total: int
    host_held: int
    host_reusable: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What a manager has, and has done.

    Attributes:
        pools: each set of slots.
        num_sequences: open ones.
        prompt_tokens: of the prompts that sequences were made with.
        reused_tokens: those of them that were there already.
        copied_pages: copies before a write, and so on: blocks of a group.
        offloaded_pages: blocks that went to the host.
        reloaded_pages: blocks that came back.
        dropped_pages: blocks that no one had and that were lost for want of room.
    """

    pools: tuple[PoolStats, ...]
    num_sequences: int
    prompt_tokens: int
    reused_tokens: int
    copied_pages: int
    offloaded_pages: int
    reloaded_pages: int
    dropped_pages: int


@dataclass(frozen=True, slots=True)
class Region:
    """Where the slots of a group lie in one pool.

    Layer ``layer_ids[i]`` has the bytes from ``begins[i]`` on of each slot, ``page_bytes`` of them:
    K, V and, of four bits, their block scales, one after the other.

    Attributes:
        memory: uint8 [num_slots, slot_bytes], contiguous.
        slot_bytes: from a slot to the next.
        layer_ids: the layers that the pool has pages of.
        begins: where in a slot each begins.
        page_bytes: bytes of each.
        part_bytes: of each, the bytes of its parts.
    """

    memory: Tensor
    slot_bytes: int
    layer_ids: tuple[int, ...]
    begins: tuple[int, ...]
    page_bytes: int
    part_bytes: tuple[tuple[int, ...], ...]


class KVCacheManager:
    """The pages of a model's layers, given to requests and taken back.

    For one thread at a time. On a CUDA device all copies are ordered on the stream that is current
    when a method is called; give it the stream that runs the model.

    Attributes:
        config: what it was made of.
        layer_groups: layers that share pages' comings and goings.
    """

    def __init__(
        self, config: KVCacheConfig, *, device: torch.device | str | int | None = None
    ) -> None:
        """Allocate all memory.

        Args:
            config: layers and sizes.
            device: "cpu", a CUDA device, or None: no storage, for planning.

        Raises:
            TypeError, ValueError: ``config`` is something else, or ``gpu_bytes`` is too little.
        """
        if not isinstance(config, KVCacheConfig):
            raise TypeError(f"config is a {type_name(config)}: expected a KVCacheConfig")
        layout = make_layout(config)
        counts = split_bytes(layout, config.gpu_bytes, config.typical_len, least=1)
        host_counts = split_bytes(layout, config.host_bytes, config.typical_len, least=0)
        check_slots(layout, counts, host_counts, config.gpu_bytes)
        self.config = config
        self.layer_groups = layout.groups
        self._layout = layout
        self._storage: Storage | None = None
        if device is not None:
            from jitattn.kv.storage import Storage
            from jitattn.tensors.tensor_checks import as_device

            where = _with_index(as_device("device", device))
            self._storage = Storage(layout, counts, host_counts, where)
        self._blocks = BlockManager(config, layout, counts, host_counts, self._storage)
        self._views: dict[tuple[int, PageIndexMode], LayerView] = {}
        self._table_maker: BlockTableMaker | None = None

    # --- sequences

    def create_sequence(
        self,
        prompt: object = None,
        *,
        priority: int = DEFAULT_PRIORITY,
        reuse_scratch: bool | None = None,
        reuse_scope: str = "",
    ) -> KVSequence:
        """Begin a suspended sequence, with the longest prefix of its prompt that there is.

        Its three lengths are the tokens of that prefix. Leave out the prompt's last token where
        its logits are wanted: what is found is not computed again.

        Args:
            prompt: integers, [n], in any container; None is no prompt.
            priority: 0 to 100, of its pages: those of lower ones are evicted first.
            reuse_scratch: whether its steps have scratch; None is the configuration's.
            reuse_scope: only sequences of one scope share pages; for adapters and tenants.

        Raises:
            KVCacheError: the manager is closed.
            TypeError, ValueError: an argument that doesn't fit, or ``reuse_scratch=True`` where
                the configuration has none.
        """
        self._blocks.check_open()
        tokens = _NO_TOKENS if prompt is None else as_int64("prompt", prompt)
        priority = check_count("priority", priority, least=0, most=MAX_PRIORITY)
        if reuse_scratch is not None and not isinstance(reuse_scratch, bool):
            raise TypeError(
                f"reuse_scratch is {shown(reuse_scratch)}: expected True, False or None"
            )
        if reuse_scratch and not self.config.reuse_scratch:
            raise ValueError("reuse_scratch=True: the manager was made with reuse_scratch=False")
        if not isinstance(reuse_scope, str):
            raise TypeError(f"reuse_scope is {shown(reuse_scope)}: expected a string")
        reuse_scope = str.__str__(reuse_scope)
        if any("\ud800" <= letter <= "\udfff" for letter in reuse_scope):
            raise ValueError("reuse_scope holds half of a surrogate pair")
        has_scratch = self.config.reuse_scratch if reuse_scratch is None else reuse_scratch
        state = self._blocks.create(tokens, priority, has_scratch, reuse_scope)
        return KVSequence(self._blocks, state)

    def advance(
        self, seqs: Sequence[KVSequence], new_tokens: object, *, num_inputs: int = 1
    ) -> list[bool]:
        """Commit what a step has computed and make room for the next one, for many sequences.

        Of each sequence, in order: its new tokens are committed (of one that has stopped
        committing, history grows by as many), pages leave the window, and the capacity grows to
        ``num_inputs`` tokens after the history, if it isn't there yet.

        Args:
            seqs: active sequences, each once.
            new_tokens: for each its tokens: integers [batch_size] or [batch_size, n], or a list of
                lists.
            num_inputs: tokens of each sequence in the next step.

        Returns:
            For each whether there was room. Of one without, nothing has changed.

        Raises:
            KVCacheError: a closed, suspended or foreign sequence, one that is there twice, or more
                tokens than its capacity has; nothing has changed then.
            TypeError, ValueError: the other arguments don't fit.
            Exception: what a copy of pages raised. Nothing has changed, or, where the exception
                has a note, all sequences that had room and that it names: the next call makes the
                copies first.
        """
        states = active_states(seqs, self._blocks)
        flat, counts = _as_lists(new_tokens, len(states))
        num_inputs = check_count("num_inputs", num_inputs, most=MAX_KV_LEN)
        rows = np.fromiter((state.row for state in states), np.int64, len(states))
        if len(np.unique(rows)) < len(rows):
            raise KVCacheError("seqs has a sequence twice")
        is_slow = self._look(states, rows, counts, num_inputs)
        return self._blocks.advance(states, rows, flat, counts, is_slow, num_inputs)

    def _look(
        self, states: list[State], rows: NDArray[np.int64], counts: NDArray[np.int64], inputs: int
    ) -> NDArray[np.bool_]:
        """Check what all are to do, and return which of them have to look at their pages."""
        ledger, size = self._blocks.ledger, self._layout.page_size
        committed, history = ledger.committed[rows], ledger.history[rows]
        capacity = ledger.capacity[rows]
        after = committed + counts
        reach = np.maximum(history, after)
        capacity_after = np.maximum(capacity, reach + inputs)
        is_slow: NDArray[np.bool_] = (
            ledger.is_slow[rows]
            | (capacity == history)  # its last page may be another's, too
            | (capacity_after > ledger.num_blocks[rows] * size)
            | (after // size > committed // size)
            | (reach >= ledger.next_stale[rows])
        )
        for i in np.flatnonzero((after > capacity) | ledger.is_slow[rows]).tolist():
            state, count = states[i], int(counts[i])
            begin = int(history[i] if state.is_stopped else committed[i])
            if begin + count > int(capacity[i]):
                raise KVCacheError(
                    f"sequence {state.id} can't advance by {count} tokens after {begin}: its "
                    f"capacity is {int(capacity[i])} (an advance by none makes room)"
                )
            new = max(begin + count, int(history[i]))
            self._blocks.check_lengths(state, max(int(capacity[i]), new + inputs), new)
        return is_slow

    # --- what kernels take

    def layer_view(self, layer_id: int, mode: PageIndexMode) -> LayerView:
        """Return the cache of a layer and the maker of its tables, which are for each other.

        Args:
            layer_id: the layer.
            mode: SHARED: ids are slots, and the cache begins at the layer's own page. PER_LAYER:
                ids count the pages of all layers, and tables can list scratch.

        Raises:
            KVCacheError: the manager is closed.
            TypeError: layer_id is no integer.
            ValueError: no such layer, or no mode.
        """
        self._blocks.check_open()
        layer_id = check_count("layer_id", layer_id, least=0)
        if layer_id not in self._layout.places:
            raise ValueError(f"layer_id is {shown(layer_id)}: the manager has no such layer")
        mode = mode_of(mode)
        key = layer_id, mode
        if key not in self._views:
            self._views[key] = self._make_view(layer_id, mode)
        return self._views[key]

    def _make_view(self, layer_id: int, mode: PageIndexMode) -> LayerView:
        from jitattn.kv.layer_view import LayerView

        place = self._layout.places[layer_id]
        cache = None
        if self._storage is not None:
            cache = self._storage.view(
                place,
                page_size=self.config.page_size,
                kv_layout=self.config.kv_layout,
                is_per_layer=mode is PageIndexMode.PER_LAYER,
            )
        has_scratch = self.config.reuse_scratch and place.layer.window_left >= 0
        return LayerView(place, mode, self._tables(), cache, has_scratch=has_scratch)

    def block_tables(
        self, seqs: Sequence[KVSequence], group: LayerGroup | int, *, out: Tensor | None = None
    ) -> Tensor:
        """Return PER_LAYER tables of all layers of a group, in the order of ``layer_ids``.

        Args:
            seqs: active sequences.
            group: of ``layer_groups``, or its index.
            out: int32 [layers, at least batch_size, at least as wide], written in place.

        Returns:
            int32 [layers, batch_size, width], each a table for ``BlockTable``; -1 is no page. On
            the device of the manager; on the CPU without storage.

        Raises:
            KVCacheError: a closed, suspended or foreign sequence; on a card, a capture.
            TypeError, ValueError: ``out`` or ``group`` doesn't fit.
        """
        return self._tables().all_layers(seqs, self._blocks.group_index(group), out)

    def _tables(self) -> BlockTableMaker:
        if self._table_maker is None:
            import torch

            from jitattn.kv.layer_view import BlockTableMaker

            device = torch.device("cpu") if self._storage is None else self._storage.device
            self._table_maker = BlockTableMaker(self._blocks, device)
        return self._table_maker

    def supports_index_mode(self, mode: PageIndexMode) -> bool | None:
        """Say whether tables of ``mode`` can list all sequences; None: each has to be asked."""
        self._blocks.check_open()
        if mode_of(mode) is PageIndexMode.SHARED and self.config.reuse_scratch:
            return None
        return True

    def regions(self, group: LayerGroup | int) -> tuple[Region, ...]:
        """Return where the slots of a group lie, for transfers: a region for each pool.

        Raises:
            KVCacheError: the manager is closed or has no storage.
            ValueError: no such group.
        """
        self._blocks.check_open()
        index = self._blocks.group_index(group)
        if self._storage is None:
            raise KVCacheError("the manager has no storage: it was made with device=None")
        pools = self._storage.pools[self._layout.slots_of[index]]
        return tuple(self._region(index, number, pool) for number, pool in enumerate(pools))

    def _region(self, group: int, number: int, memory: Tensor) -> Region:
        places = [
            place
            for place in self._layout.places.values()
            if place.group == group and place.pool == number
        ]
        return Region(
            memory=memory,
            slot_bytes=memory.shape[1],
            layer_ids=tuple(place.layer.layer_id for place in places),
            begins=tuple(place.offset * place.page_bytes for place in places),
            page_bytes=places[0].page_bytes,
            part_bytes=tuple(p.layer.part_bytes(self.config.page_size) for p in places),
        )

    # --- the whole

    def stats(self) -> Stats:
        """Return what there is and what has been done."""
        self._blocks.check_open()
        blocks = self._blocks
        pools = []
        for sizes, pool in zip(self._layout.slot_bytes, blocks.pools, strict=True):
            device, host = pool.device, pool.host
            held, reusable, free = pool.held.size, pool.droppable.size, device.num_free
            on_host = host.total - host.num_free - pool.on_host.size
            pools.append(
                PoolStats(
                    slot_bytes=sum(sizes), total=device.total, held=held, reusable=reusable,
                    used=device.total - free - held - reusable, free=free, peak=device.peak,
                    host_total=host.total, host_held=on_host, host_reusable=pool.on_host.size,
                )
            )  # fmt: skip
        return Stats(
            pools=tuple(pools),
            num_sequences=len(blocks.states),
            dropped_pages=sum(pool.num_dropped for pool in blocks.pools),
            **blocks.counts,
        )

    def clear_reusable(self) -> None:
        """Let nothing that was computed so far be found again, such as after new weights.

        Open sequences keep their pages; what they commit from now on isn't found either.
        """
        self._blocks.check_open()
        self._blocks.clear()

    def close(self) -> None:
        """Give all memory back, when views of layers and their caches are gone, too.

        Raises:
            KVCacheError: a sequence is open or has pinned pages, or it is closed already. After a
                change that an error has ended halfway, sequences may be open.
        """
        if not self._blocks.is_broken:
            self._blocks.check_open()
            if self._blocks.states:
                ids = sorted(self._blocks.states)
                raise KVCacheError(f"sequences {ids} are open: close them first")
            if any(pool.num_locked for pool in self._blocks.pools):
                raise KVCacheError("pages of a closed sequence are pinned: unpin them first")
        self._blocks.is_closed = True
        self._storage = None
        self._views.clear()
        self._table_maker = None


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        import torch

        return torch.device("cuda", torch.cuda.current_device())
    return device


def _as_lists(new_tokens: object, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all tokens, one sequence after the other, and how many each has."""
    array: NDArray[Any] | None
    try:
        if isinstance(new_tokens, str):
            raise TypeError(f"new_tokens is a {type_name(new_tokens)}: expected lists")
        array = np.asarray(with_plain_memory(new_tokens))
    except Exception:  # rows of different lengths, or a tensor without numbers
        array = None
    if array is None or array.dtype == object:
        if not isinstance(new_tokens, (list, tuple)):
            raise TypeError(f"new_tokens is a {type_name(new_tokens)}: expected lists")
        lists = [as_int64("new_tokens", tokens, least_dims=0) for tokens in new_tokens]
        counts = np.array([len(tokens) for tokens in lists], np.int64)
        flat = np.concatenate([*lists, _NO_TOKENS])
    elif array.ndim in (1, 2):
        counts = np.full(len(array), 1 if array.ndim == 1 else array.shape[1], np.int64)
        flat = as_int64("new_tokens", array.reshape(-1))
    else:
        raise ValueError(f"new_tokens has shape {list(array.shape)}: expected a row a sequence")
    if len(counts) != count:
        raise ValueError(f"new_tokens has {len(counts)} rows: seqs has {count}")
    return flat, counts
