"""Attention of ``generate_batch``, continuous batching."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.transformers.arguments import (
    planner_for,
    refuse_unsupported,
    score_arguments,
)
from jitattn.integrations.transformers.paged_caches import LayerCache, layer_cache
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.kernels.preprocess.api import append_kv
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import BlockTable, RaggedKV


def attend_paged(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
    cache: Any = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Write K and V into the cache and attend, as continuous batching asks.

    q is [1, num_qo_heads, num_tokens, head_dim], K and V likewise, the tokens of all requests one
    after the other. Layers with a window attend to what ``cache.update`` gathers, the others to the
    blocks where they lie. Requests without keys are padding.

    Returns:
        out [1, num_tokens, num_qo_heads, head_dim of V], and no weights.
    """
    _check_paged(cache, others, attention_mask, is_causal)
    layer = layer_cache(cache, module.layer_idx, sliding_window)
    batch = PagedBatch.of(layer, others)
    refuse_unsupported(dropout, others, query, key, value)
    if sliding_window is not None and sliding_window != layer.window:
        raise ValueError(
            f"sliding_window is {sliding_window}: the cache keeps a window of {layer.window}"
        )
    q = query.squeeze(0).transpose(0, 1)
    k, v, pages, page_size = batch.written(key, value)
    window_left = -1 if layer.window is None else layer.window - 1
    config = (
        ("num_qo_heads", q.shape[1]),
        ("num_kv_heads", k.shape[-2]),
        ("head_dim", q.shape[2]),
        ("head_dim_vo", v.shape[-1]),
        ("q_dtype", q.dtype),
        ("kv_dtype", k.dtype),
        *score_arguments(scaling, softcap, s_aux, window_left, causal=True),
        ("page_table", pages.layout.value),
        ("page_size", page_size),
    )
    plan = plan_for_call(
        planner_for(config, q.device),
        pages,
        batch.seq_lens,
        batch.qo_indptr,
        max_q_len=batch.max_q_len,
        # With a table of blocks its width is all that is known.
        max_kv_len=batch.max_kv_len if batch.block_table is None else None,
    )
    out = plan.run(q, (k, v), sinks=s_aux)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


def _check_paged(
    cache: Any, of_batch: dict[str, Any], attention_mask: Tensor | None, is_causal: bool | None
) -> None:
    if cache is None and of_batch.get("read_index") is None:
        raise ValueError(
            'cache is None: this attention is for generate_batch, and "jitattn" for generate'
        )
    if attention_mask is not None:
        raise ValueError("attention_mask is given: continuous batching gives lengths instead")
    if is_causal is False:
        raise ValueError("is_causal is False: a request's queries see what came before them")


# What each attribute is called, up to transformers 5.18 and from 5.19 on.
_MAX_Q_LEN = "max_seqlen_q", "max_length_q"
_MAX_KV_LEN = "max_seqlen_k", "max_length_k"


@dataclass
class PagedBatch:
    """A batch of continuous batching, as one layer has it.

    Attributes:
        layer: its cache.
        qo_indptr, kv_indptr: [num_requests + 1], tokens of requests in q, and in what is gathered.
        max_q_len, max_kv_len: of a request, at most.
        block_table: [num_groups, num_requests, any]; None: indices say where tokens are.
        of_batch: lengths and indices of all layers, as transformers gave them.
    """

    layer: LayerCache
    qo_indptr: Tensor
    kv_indptr: Tensor
    max_q_len: int
    max_kv_len: int
    block_table: Tensor | None
    of_batch: dict[str, Any]

    @classmethod
    def of(cls, layer: LayerCache, given: dict[str, Any]) -> PagedBatch:
        """Take what describes the batch out of the other arguments."""
        of_batch: dict[str, Any] = {}

        def taken(*names: str) -> Any:
            for name in names:
                value = given.pop(name, None)
                if value is not None:
                    of_batch[name] = value
                    return value
            raise ValueError(f"{names[-1]} is None: continuous batching gives it")

        def of_layer(*names: str) -> Any:
            value = taken(*names)
            return value[layer.kind] if isinstance(value, dict) else value

        block_table = given.pop("block_table", None)
        batch = cls(
            layer,
            of_layer("cu_seq_lens_q").int(),
            of_layer("cu_seq_lens_k").int(),
            int(of_layer(*_MAX_Q_LEN)),
            int(of_layer(*_MAX_KV_LEN)),
            block_table,
            of_batch,
        )
        for name in ("read_index", "write_index"):
            taken(name)
        return batch

    @functools.cached_property
    def seq_lens(self) -> Tensor:
        """KV tokens of each request."""
        return self.kv_indptr.diff()

    def written(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, PageTable, int | None]:
        """Write the new tokens; K, V, where a request's are, and the page size, if any."""
        layer, pool = self.layer, self.layer.pool
        if self.block_table is not None:
            return self._written_to_blocks(key, value, self.block_table)
        if pool is None:
            return *layer.update(key, value, self.of_batch), RaggedKV(self.kv_indptr), None
        read_index, write_index = (
            self.of_batch[name][layer.group] for name in ("read_index", "write_index")
        )
        if read_index.numel() == 0:  # all requests are new: K and V are all there is
            return *layer.update(key, value, self.of_batch), RaggedKV(self.kv_indptr), None
        for slots, new in zip(pool.slots, (key, value), strict=True):
            slots.index_copy_(0, write_index, new.squeeze(0).transpose(0, 1))
        # Entries past a request's last block are not read: they are any.
        steps = torch.arange(-(-self.max_kv_len // pool.block_size), device=read_index.device)
        firsts = self.kv_indptr[:-1, None] + steps * pool.block_size
        firsts = firsts.clamp(max=read_index.shape[0] - 1).long()
        pages = BlockTable(pool.blocks_of_slots(read_index[firsts]))
        return *pool.blocks, pages, pool.block_size

    def _written_to_blocks(
        self, key: Tensor, value: Tensor, block_table: Tensor
    ) -> tuple[Tensor, Tensor, PageTable, int | None]:
        """Write the new tokens where tables [num_groups, num_requests, any] of blocks say."""
        pool = self.layer.pool
        if pool is None:
            raise ValueError("block_table is given for a layer whose K and V are gathered")
        entries = block_table[self.layer.group, : self.seq_lens.shape[0]]
        pages = BlockTable(pool.blocks_of_table(entries))
        k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (key, value))
        append_kv(k, v, pool.blocks, pages=pages, seq_lens=self.seq_lens, qo_indptr=self.qo_indptr)
        return *pool.blocks, pages, pool.block_size
