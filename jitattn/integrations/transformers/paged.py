"""``"paged|jitattn"``: attention of ``generate_batch``, continuous batching."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.transformers.arguments import (
    planner_for,
    refuse_unsupported,
    score_arguments,
)
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
    _check_paged(cache, attention_mask, is_causal)
    batch = PagedBatch.of(module.layer_idx, cache, others)
    refuse_unsupported(dropout, others, query, key, value)
    if sliding_window is not None and sliding_window != batch.window:
        raise ValueError(
            f"sliding_window is {sliding_window}: the cache keeps a window of {batch.window}"
        )
    q = query.squeeze(0).transpose(0, 1)
    k, v, pages, page_size = batch.written(key, value)
    window_left = -1 if batch.window is None else batch.window - 1
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


def _check_paged(cache: Any, attention_mask: Tensor | None, is_causal: bool | None) -> None:
    if cache is None:
        raise ValueError(
            'cache is None: "paged|jitattn" is for generate_batch, and "jitattn" for generate'
        )
    if attention_mask is not None:
        raise ValueError('attention_mask is given: "paged|jitattn" takes lengths instead')
    if is_causal is False:
        raise ValueError("is_causal is False: a request's queries see what came before them")


@dataclass
class PagedBatch:
    """A batch of continuous batching, as one layer has it."""

    cache: Any
    layer_idx: int
    window: int | None
    qo_indptr: Tensor
    kv_indptr: Tensor
    max_q_len: int
    max_kv_len: int
    read_index: Sequence[Tensor]
    write_index: Sequence[Tensor]
    block_table: Tensor | None

    @classmethod
    def of(cls, layer_idx: int, cache: Any, given: dict[str, Any]) -> PagedBatch:
        """Take what describes the batch out of the other arguments."""
        window = cache.sliding_windows[layer_idx]
        window = None if window == 1 else window  # as the cache says that there is none
        kind = "full_attention" if window is None else "sliding_attention"

        def taken(name: str) -> Any:
            value = given.pop(name, None)
            if value is None:
                raise ValueError(f"{name} is None: continuous batching gives it")
            return value[kind] if isinstance(value, dict) else value

        return cls(
            cache,
            layer_idx,
            window,
            taken("cu_seq_lens_q").int(),
            taken("cu_seq_lens_k").int(),
            int(taken("max_seqlen_q")),
            int(taken("max_seqlen_k")),
            taken("read_index"),
            taken("write_index"),
            given.pop("block_table", None),
        )

    @functools.cached_property
    def seq_lens(self) -> Tensor:
        """KV tokens of each request."""
        return self.kv_indptr.diff()

    def written(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, PageTable, int | None]:
        """Write the new tokens; K, V, where a request's are, and the page size, if any."""
        cache = self.cache
        group, index = cache.layer_index_to_group_indices[self.layer_idx]
        caches = [
            tensors[index].unflatten(0, (-1, cache.block_size))
            for tensors in (cache.key_cache, cache.value_cache)
        ]
        if self.block_table is not None and self.window is None:
            pages = BlockTable(self.block_table[group, : self.seq_lens.shape[0]])
            k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (key, value))
            append_kv(
                k,
                v,
                (caches[0], caches[1]),
                pages=pages,
                seq_lens=self.seq_lens,
                qo_indptr=self.qo_indptr,
            )
            return caches[0], caches[1], pages, cache.block_size
        if self.block_table is not None:
            raise ValueError("block_table is given for a layer with a window, which has no blocks")
        k, v = key, value
        read_index, write_index = self.read_index[group], self.write_index[group]
        if self.window is not None or read_index.numel() == 0:
            k, v = cache.update(
                key_states=key,
                value_states=value,
                layer_idx=self.layer_idx,
                read_index=self.read_index,
                write_index=self.write_index,
            )
            return k, v, RaggedKV(self.kv_indptr), None
        for tensors, new in ((cache.key_cache, key), (cache.value_cache, value)):
            tensors[index].index_copy_(0, write_index, new.squeeze(0).transpose(0, 1))
        return caches[0], caches[1], self._blocks(read_index), cache.block_size

    def _blocks(self, read_index: Tensor) -> BlockTable:
        """Return the blocks of each request, from the slots of all of its tokens in order."""
        block_size = self.cache.block_size
        num_blocks = -(-self.max_kv_len // block_size)
        steps = torch.arange(num_blocks, device=read_index.device) * block_size
        # Entries past a request's last block are not read: they are any.
        firsts = (self.kv_indptr[:-1, None] + steps).clamp(max=read_index.shape[0] - 1)
        return BlockTable((read_index[firsts.long()] // block_size).int())
