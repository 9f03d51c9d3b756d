"""A layer's cache in continuous batching, as each version of transformers hands it on.

Up to 5.18, attention gets the cache and the indices of all groups of layers, and updates it. From
5.19 on, ``update`` also picks the layer's arguments of the batch; from 5.24 on, the model has
called it before attention, which gets K and V of all requests instead of the cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Update = Callable[[Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BlockPool:
    """K and V of a layer by slots, a token each, some of which follow each other in blocks.

    Attributes:
        k_slots, v_slots: [num_slots, num_kv_heads, head_dim], contiguous.
        block_size: slots of a block.
        block_stride: slots from a block's first one to the next one's. Between blocks lie those of
            other layers, and of V between those of K.
    """

    k_slots: Tensor
    v_slots: Tensor
    block_size: int
    block_stride: int

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """K and V, a row a slot."""
        return self.k_slots, self.v_slots

    @property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """K and V, views [num_blocks, block_size, num_kv_heads, head_dim]."""
        size, stride = self.block_size, self.block_stride
        k, v = (
            x.as_strided(
                (1 + (len(x) - size) // stride, size, *x.shape[1:]),
                (stride * x.stride(0), *x.stride()),
            )
            for x in self.slots
        )
        return k, v

    def blocks_of_slots(self, slots: Tensor) -> Tensor:
        """Return the blocks that slots are in, int32."""
        return (slots // self.block_stride).int()

    def blocks_of_table(self, block_table: Tensor) -> Tensor:
        """Return the blocks of transformers' tables, which count all layers' runs of slots."""
        return block_table // (self.block_stride // self.block_size)


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of a cache.

    Attributes:
        window: tokens that a query sees, its own included; None: all.
        group: which indices and tables of a batch are this layer's; None: of what is none by group.
        pool: where requests can be read in place; None: they can't.
        update: writes K and V [1, num_kv_heads, num_tokens, head_dim] of a batch's new tokens and
            returns those of all tokens [num_tokens, num_kv_heads, head_dim]; its third argument
            is what transformers said of the batch.
    """

    window: int | None
    group: int | None
    pool: BlockPool | None
    update: Update

    @property
    def kind(self) -> str:
        """How transformers names layers like this."""
        return "full_attention" if self.window is None else "sliding_attention"


def layer_cache(cache: Any, layer_idx: int, window: int | None) -> LayerCache:
    """Return the cache of a layer with a window, or None, as the model says.

    Raises:
        ValueError: no version of transformers that is known keeps caches so.
    """
    if cache is None:
        return LayerCache(window, None, None, lambda k, v, _: (_tokens(k), _tokens(v)))
    if hasattr(cache, "layer_to_allocator"):  # 5.18 and up
        allocator = cache.layer_to_allocator[layer_idx]
        window = getattr(allocator, "sliding_window", None)
        pool = None
        if window is None:
            k, v = (x.flatten(0, 1) for x in allocator.get_cache_for_block_table(layer_idx))
            pool = BlockPool(k, v, allocator.tokens_per_page, allocator.block_physical_stride)
        return LayerCache(window, allocator.index, pool, _update_of(cache, layer_idx))
    if hasattr(cache, "layer_index_to_group_indices"):
        group, index = cache.layer_index_to_group_indices[layer_idx]
        window, pool = cache.sliding_windows[layer_idx], None
        if window == 1:  # as the cache says that there is none
            k, v = cache.key_cache[index], cache.value_cache[index]
            window, pool = None, BlockPool(k, v, cache.block_size, cache.block_size)
        return LayerCache(window, group, pool, _update_of(cache, layer_idx))
    raise ValueError(f"cache is a {type(cache).__name__}: expected continuous batching's")


def _tokens(states: Tensor) -> Tensor:
    """View [1, heads, tokens, head_dim] as [tokens, heads, head_dim]."""
    return states.squeeze(0).transpose(0, 1)


def _update_of(cache: Any, layer_idx: int) -> Update:
    def update(key: Tensor, value: Tensor, of_batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if _picks_arguments(type(cache).update):
            k, v = cache.update(key, value, layer_idx, kwargs=dict(of_batch))
            return _tokens(k), _tokens(v)
        indices = {name: of_batch[name] for name in ("read_index", "write_index")}
        k, v = cache.update(key_states=key, value_states=value, layer_idx=layer_idx, **indices)
        return k, v

    return update


@functools.cache
def _picks_arguments(update: Callable[..., Any]) -> bool:
    """Whether ``update`` takes the arguments of a batch instead of its indices: from 5.19 on."""
    return "kwargs" in inspect.signature(update).parameters
