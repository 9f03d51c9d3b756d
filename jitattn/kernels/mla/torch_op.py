"""``MLAPlan.run`` inside a compiled function: ``torch.ops.jitattn.mla_attention``."""

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

__all__ = ["mla_attention"]


def mla_attention(
    plan: Tensor,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: list[Tensor],
    kv: Tensor | None,
    k_scale: Tensor | None,
    pages: list[Tensor],
    page_table: str | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run a plan of latent attention: ``torch.ops.jitattn.mla_attention``.

    Args:
        plan: ``plan.handle`` of an ``MLAPlan`` that lives.
        q_nope: as of ``MLAPlan.run``.
        q_pe: likewise.
        kv_cache: the cache's tensor, or those of latents and rope parts.
        kv: as of ``attention``, like what follows.
        k_scale: the tensor that the cache was bound with as k_scale, if it was one.
        pages: the tensors of a table to read instead of the plan's, or none.
        page_table: the table's layout.
        out: written.
        lse: written if given.

    Raises:
        TypeError, ValueError: as ``MLAPlan.run``, or a handle of nothing that lives.
    """
    found: Any = find("plan", plan, "MLAPlan")
    bound = bound_of(found, kv_cache, kv, "BoundMLACache", k_scale=k_scale)
    found.run(q_nope, q_pe, bound, pages=planned_table(pages, page_table), out=out, lse=lse)


define(mla_attention, f"{PLAN}Tensor q_nope, Tensor q_pe, {CACHE}{PAGES}{OUTPUTS}")


def trace_mla_attention(
    plan: Any,
    q_nope: Tensor,
    q_pe: Tensor,
    kv: Any,
    pages: PlannedTable | None,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Put an ``MLAPlan.run`` into the graph."""
    refuse_gradients({"q_nope": q_nope, "q_pe": q_pe})
    tensors, handle, k_scale, _ = cache_tensors(kv, pages)
    config = plan.planner.config
    dtype = getattr(torch, config.kernel_out_dtype)
    out, lse = new_outputs(q_nope, config.kv_lora_rank, dtype, out, lse, return_lse)
    torch.ops.jitattn.mla_attention(
        plan.handle, q_nope, q_pe, tensors, handle, k_scale, *pages_tensors(pages), out, lse
    )
    if return_lse:
        assert lse is not None
        return out, lse
    return out
