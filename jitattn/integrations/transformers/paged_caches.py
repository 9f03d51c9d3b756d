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

Update = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of a cache.

    Attributes:
        window: tokens that a query sees, its own included; None: all.
        group: which indices and tables of a batch are this layer's; None: they are given alone.
        blocks: K and V [num_blocks, block_size, num_kv_heads, head_dim], where requests can be read
            in place; None: they can't.
        update: writes K and V [1, num_kv_heads, num_tokens, head_dim] of a batch's new tokens and
            returns those of all tokens [num_tokens, num_kv_heads, head_dim]; its third argument
            is what transformers said of the batch.
    """

    window: int | None
    group: int | None
    blocks: tuple[Tensor, Tensor] | None
    update: Update

    @property
    def kind(self) -> str:
        """How transformers names layers like this."""
        return "full_attention" if self.window is None else "sliding_attention"

    def own(self, of_batch: Any) -> Any:
        """Return this layer's of what a batch has for each kind or group of layers."""
        if isinstance(of_batch, dict):
            return of_batch[self.kind]
        return of_batch if self.group is None else of_batch[self.group]


def layer_cache(
    cache: Any, layer_idx: int, window: int | None, of_batch: dict[str, Any]
) -> LayerCache:
    """Return the cache of a layer with a window, or None, as the model says.

    Raises:
        ValueError: no version of transformers that is known keeps caches so.
    """
    if cache is None:
        blocks = of_batch.pop("k_cache", None), of_batch.pop("v_cache", None)
        in_place = None if blocks[0] is None else blocks
        return LayerCache(window, None, in_place, lambda key, value, _: (_tokens(key), _tokens(value)))
    if hasattr(cache, "layer_to_allocator"):  # 5.18 and up
        allocator = cache.layer_to_allocator[layer_idx]
        window = getattr(allocator, "sliding_window", None)
        in_place = None if window else allocator.get_cache_for_block_table(layer_idx)
        return LayerCache(window, allocator.index, in_place, _update_of(cache, layer_idx))
    if hasattr(cache, "layer_index_to_group_indices"):
        group, index = cache.layer_index_to_group_indices[layer_idx]
        window = cache.sliding_windows[layer_idx]
        window = None if window == 1 else window  # as the cache says that there is none
        k, v = (
            tensors[index].unflatten(0, (-1, cache.block_size))
            for tensors in (cache.key_cache, cache.value_cache)
        )
        return LayerCache(window, group, None if window else (k, v), _update_of(cache, layer_idx))
    raise ValueError(f"cache is a {type(cache).__name__}: expected continuous batching's")


def _tokens(states: Tensor) -> Tensor:
    """View [1, heads, tokens, head_dim] as [tokens, heads, head_dim]."""
    return states.squeeze(0).transpose(0, 1)


def _update_of(cache: Any, layer_idx: int) -> Update:
    def update(key: Tensor, value: Tensor, of_batch: Any) -> tuple[Tensor, Tensor]:
        if _picks_arguments(type(cache)):
            k, v = cache.update(key, value, layer_idx, kwargs=dict(of_batch))
            return _tokens(k), _tokens(v)
        indices = {name: of_batch[name] for name in ("read_index", "write_index")}
        k, v = cache.update(key_states=key, value_states=value, layer_idx=layer_idx, **indices)
        return k, v

    return update


@functools.cache
def _picks_arguments(cache_class: Any) -> bool:
    """Whether ``update`` takes the arguments of a batch instead of its indices: from 5.19 on."""
    return "kwargs" in inspect.signature(cache_class.update).parameters
