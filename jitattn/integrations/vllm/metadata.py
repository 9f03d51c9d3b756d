"""A step's metadata, as the builder hands it to layers, and the tensors of a layer group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from jitattn.integrations.steps import FP8, Step
from jitattn.tensors.page_tables import BlockTable, RaggedKV

CACHE_DTYPES = ("auto", "float16", "bfloat16", *FP8)


@dataclass(frozen=True, eq=False)
class Context:
    """What decode context parallelism needs of a step besides.

    Keys of a request are spread over ranks: query tokens attend to those that this one has of
    earlier steps, and then to this step's, which each rank has at hand.

    Attributes:
        cached: this rank's KV tokens of each request before this step, seen by all of its queries.
        new: the query tokens themselves as K and V, one request after the other.
        new_pages: where those begin.
    """

    cached: Step
    new: Step
    new_pages: RaggedKV


@dataclass(eq=False)
class Metadata:
    """A batch, as the builder hands it to the layers of its group.

    Attributes:
        num_actual_tokens: rows of q that count, or more where vLLM pads.
        causal: whether query tokens see no later ones.
        pages: int32 [num_reqs, width], page ids; entries past a request's last page may be any.
        slot_mapping: int64 [num_tokens], page * page_size + place; -1 is not written.
        step: lengths, offsets and plans, shared by tables of the same requests.
        context: what decode context parallelism needs besides, or None.
    """

    num_actual_tokens: int
    causal: bool
    pages: BlockTable
    slot_mapping: Tensor
    step: Step
    context: Context | None = None


@dataclass(frozen=True)
class Tensors:
    """What kernels want to know of tensors.

    Attributes:
        head_dim_vo: elements of a head of V.
        q_dtype: of queries and outputs.
        kv_dtype: of the cache as it is allocated; FP8 may come as bytes.
        page_size: tokens of a page.
        device: where they are.
    """

    head_dim_vo: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    device: torch.device

    @classmethod
    def of(cls, query: Tensor, k_cache: Tensor, v_cache: Tensor) -> Self:
        """Read it off q and [num_pages, num_kv_heads, page_size, elements] of K and V."""
        page_size = k_cache.shape[2]
        return cls(v_cache.shape[3], query.dtype, k_cache.dtype, page_size, query.device)
