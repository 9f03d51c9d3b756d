"""Layout of layers in groups, slots and pools, and retention of blocks: integers alone.

A *block* is a span of ``page_size`` tokens of one sequence; where several ranks share it, of so
many for each rank. A layer's *page* is its K and V of one block on this device, contiguous. Layers
with one retention rule are a *group*: their pages of one block lie in one *slot*, in *pools* by
their bytes: a pool has the pages of all layers of the group that are equally large, one after the
other. Groups whose pools have equally large slots take them from one set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitattn.kv.config import KVCacheConfig, LayerConfig

_MAX_SLOTS = 2**25
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same tokens.

    Attributes:
        index: its place in ``KVCacheManager.layer_groups``.
        layer_ids: in the order of the configuration.
        window_left: theirs; -1 is all.
    """

    index: int
    layer_ids: tuple[int, ...]
    window_left: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where the pages of a layer lie.

    Attributes:
        layer: the layer.
        group: index of its group.
        slots: index of the set of slots that the group takes.
        pool: index of the pool in that set.
        offset: its place in a slot of the pool, in pages.
        num_layers: pages of a slot of the pool.
        page_bytes: bytes of a page.
    """

    layer: LayerConfig
    group: int
    slots: int
    pool: int
    offset: int
    num_layers: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups, pools and places of a configuration.

    Attributes:
        page_size: tokens of a block.
        groups: by index.
        places: by layer id.
        slot_bytes: for each set of slots, the bytes of a slot in each of its pools, falling.
        slots_of: for each group, its set.
        pool_layers: for each group, how many of its layers each pool has.
    """

    page_size: int
    groups: tuple[LayerGroup, ...]
    places: dict[int, Place]
    slot_bytes: tuple[tuple[int, ...], ...]
    slots_of: tuple[int, ...]
    pool_layers: tuple[tuple[int, ...], ...]

    def num_scratch_slots(self, group: int, num_blocks: int) -> int:
        """Return how many slots hold ``num_blocks`` pages of each layer of a group in turn."""
        return -(-num_blocks // min(self.pool_layers[group]))


def make_layout(config: KVCacheConfig) -> Layout:
    """Sort the layers of ``config`` into groups, and their pages into pools."""
    by_window: dict[int, list[LayerConfig]] = {}
    for layer in config.layers:
        by_window.setdefault(layer.window_left, []).append(layer)
    groups = tuple(
        LayerGroup(i, tuple(layer.layer_id for layer in layers), window)
        for i, (window, layers) in enumerate(by_window.items())
    )
    pools_of = [_pools_of(config, layers) for layers in by_window.values()]
    sizes = [tuple(size * len(layers) for size, layers in pools) for pools in pools_of]
    slot_bytes = tuple(dict.fromkeys(sizes))
    slots_of = tuple(slot_bytes.index(size) for size in sizes)
    places = {
        layer.layer_id: Place(layer, g, slots_of[g], p, offset, len(layers), size)
        for g, pools in enumerate(pools_of)
        for p, (size, layers) in enumerate(pools)
        for offset, layer in enumerate(layers)
    }
    pool_layers = tuple(tuple(len(layers) for _, layers in pools) for pools in pools_of)
    return Layout(config.block_len, groups, places, slot_bytes, slots_of, pool_layers)


def _pools_of(
    config: KVCacheConfig, layers: Sequence[LayerConfig]
) -> list[tuple[int, list[LayerConfig]]]:
    """Return bytes of a page and layers of each pool of a group, the largest slots first."""
    by_size: dict[int, list[LayerConfig]] = {}
    for layer in layers:
        by_size.setdefault(sum(layer.part_bytes(config.page_size)), []).append(layer)
    return sorted(by_size.items(), key=lambda pool: -pool[0] * len(pool[1]))


def split_bytes(layout: Layout, num_bytes: int, typical_len: int, *, least: int) -> list[int]:
    """Return how many slots of each set ``num_bytes`` hold.

    Each set has ``least`` slots for each group that takes from it, or none at all where these don't
    fit; what is left is split by what a sequence takes that has ``typical_len`` tokens of history
    and one more.
    """
    weights = [0] * len(layout.slot_bytes)
    counts = [0] * len(layout.slot_bytes)
    for group, slots in zip(layout.groups, layout.slots_of, strict=True):
        first = stale_end(typical_len, group.window_left, layout.page_size)
        blocks = typical_len // layout.page_size + 1 - first
        weights[slots] += blocks * sum(layout.slot_bytes[slots])
        counts[slots] += least
    sizes = [sum(each) for each in layout.slot_bytes]
    left = num_bytes - sum(count * size for count, size in zip(counts, sizes, strict=True))
    if left < 0:
        return [0] * len(sizes)
    return [
        count + left * weight // sum(weights) // size
        for count, weight, size in zip(counts, weights, sizes, strict=True)
    ]


def check_slots(
    layout: Layout, counts: Sequence[int], host_counts: Sequence[int], gpu_bytes: int
) -> None:
    """Raise ValueError unless every set has a slot, not too many, and page ids fit 32 bits."""
    for name, numbers in (("gpu_bytes", counts), ("host_bytes", host_counts)):
        for count in numbers:
            if count > _MAX_SLOTS:
                raise ValueError(f"{name} has room for {count} slots: at most {_MAX_SLOTS}")
    for count in counts:
        if count < 1:
            raise ValueError(
                f"gpu_bytes is {gpu_bytes}: too little for one slot of each group of layers, which "
                f"have {' and '.join(str(sum(each)) for each in layout.slot_bytes)} bytes"
            )
    for place in layout.places.values():
        if counts[place.slots] * place.num_layers > _INT32_MAX:
            raise ValueError(f"gpu_bytes is {gpu_bytes}: more than {_INT32_MAX} pages of a pool")


def stale_end(history_len: int, window_left: int, page_size: int) -> int:
    """Return the first block that a query at position ``history_len`` or later can see."""
    if window_left < 0:
        return 0
    return max(0, (history_len - window_left) // page_size)


def scratch_range(
    history_len: int, capacity: int, window_left: int, page_size: int, max_rewind_len: int
) -> tuple[int, int]:
    """Return the blocks [start, stop) that a step writes and no query after it can see.

    The step has the tokens [history_len, capacity); up to ``max_rewind_len`` of the last of them
    may be taken back. The block that history ends in is kept, unless history fills it.
    """
    start = -(-history_len // page_size)
    stop = stale_end(max(0, capacity - max_rewind_len), window_left, page_size)
    return start, max(start, stop)
