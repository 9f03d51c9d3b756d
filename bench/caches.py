"""The cache of a batch in the memory layouts that engines have: same values, other strides."""

from __future__ import annotations

from torch import Tensor

from bench.workloads import Batch
from jitattn import QuantizedKV

_NUM_LAYERS = 4  # of a pool across layers; every layer but one lies idle
_LAYER = 1

Cache = Tensor | tuple[Tensor, Tensor] | QuantizedKV


def whole(batch: Batch, copy: int) -> Cache:
    """Return the pool as the batch has it."""
    if batch.block_scales is None:
        return batch.kv[copy]
    (k, v), (k_scales, v_scales) = batch.kv[copy].unbind(1), batch.block_scales[copy].unbind(1)
    return QuantizedKV(k, v, k_scales, v_scales)


def separate(batch: Batch, copy: int) -> Cache:
    """Return the same memory as pages of K and pages of V, for `Batch.separate_table`."""
    pool = batch.separate_pool(copy)
    return pool, pool


def cross_layer(batch: Batch, copy: int) -> Cache:
    """Return one layer of a pool whose pages hold every layer, so that page strides are large."""
    kv = batch.kv[copy]
    pool = kv.new_empty(kv.shape[0], _NUM_LAYERS, *kv.shape[1:])
    layer = pool[:, _LAYER]
    layer.copy_(kv)
    return layer


def packed(batch: Batch, copy: int) -> Cache:
    """Return K and V as the two halves of rows that are twice as long."""
    kv = batch.kv[copy]
    head_dim = kv.shape[-1]
    rows = kv.new_empty(kv.shape[0], *kv.shape[2:-1], 2 * head_dim)
    k, v = rows[..., :head_dim], rows[..., head_dim:]
    k.copy_(kv[:, 0])
    v.copy_(kv[:, 1])
    return k, v


def unaligned(batch: Batch, copy: int) -> Cache:
    """Return a pool that begins one element late, so that no row of it is aligned."""
    kv = batch.kv[copy]
    pool = kv.new_empty(kv.numel() + 1)[1:].view(kv.shape)
    pool.copy_(kv)
    return pool
