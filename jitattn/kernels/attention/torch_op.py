"""``Plan.run`` inside a compiled function: ``torch.ops.jitattn.attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.common.torch_op import (
    CACHE,
    OUTPUTS,
    PAGES,
    PLAN,
    bound_of,
    cache_tensors,
    define,
    new_outputs,
    pages_tensors,
    planned_table,
    refuse_gradients,
)
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.tensor_handles import find

__all__ = ["attention"]


def attention(
    plan: Tensor,
    q: Tensor,
    kv_cache: list[Tensor],
    kv: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    pages: list[Tensor],
    page_table: str | None,
    sinks: Tensor | None,
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run a plan: ``torch.ops.jitattn.attention``.

    Args:
        plan: ``plan.handle`` of a plan that lives.
        q: as of ``Plan.run``.
        kv_cache: the cache's tensor; or those of K and V; or those of a ``QuantizedKV``: k, v,
            k_block_scales, v_block_scales.
        kv: ``handle`` of what ``bind`` made of the cache; None: it is bound on the spot.
        k_scale: the tensor that the cache was bound with as k_scale, if it was one.
        v_scale: likewise.
        pages: the tensors of a table to read instead of the plan's: ``pages.tensors``; or none.
        page_table: the table's layout, with ``pages``.
        sinks: as of ``Plan.run``.
        custom_mask: likewise; the bytes of a ragged one.
        mask_indptr: of a ragged mask.
        out: likewise; written.
        lse: likewise; written if given.

    Raises:
        TypeError, ValueError: as ``Plan.run``, or a handle of nothing that lives.
    """
    found: Any = find("plan", plan, "Plan")
    bound = bound_of(found, kv_cache, kv, "BoundCache", k_scale=k_scale, v_scale=v_scale)
    found.run(
        q,
        bound,
        pages=planned_table(pages, page_table),
        out=out,
        lse=lse,
        sinks=sinks,
        custom_mask=custom_mask if mask_indptr is None else (custom_mask, mask_indptr),
    )


define(
    attention,
    f"{PLAN}Tensor q, {CACHE}Tensor? v_scale, {PAGES}Tensor? sinks, Tensor? custom_mask, "
    f"Tensor? mask_indptr, {OUTPUTS}",
)


def trace_attention(
    plan: Any,
    q: Tensor,
    kv: Any,
    pages: PlannedTable | None,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None,
    custom_mask: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Put a ``Plan.run`` into the graph."""
    refuse_gradients({"q": q, "sinks": sinks})
    config = plan.planner.config
    tensors, handle, k_scale, v_scale = cache_tensors(kv, pages)
    mask, indptr = custom_mask if isinstance(custom_mask, tuple) else (custom_mask, None)
    width = config.head_dim_vo or config.head_dim
    dtype = getattr(torch, config.out_dtype or config.q_dtype)
    out, lse = new_outputs(q, width, dtype, out, lse, return_lse)
    torch.ops.jitattn.attention(
        plan.handle, q, tensors, handle, k_scale, v_scale, *pages_tensors(pages),
        sinks, mask, indptr, out, lse,
    )  # fmt: skip
    if return_lse:
        assert lse is not None
        return out, lse
    return out
