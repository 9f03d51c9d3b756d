"""``Plan.run`` inside a compiled function: ``torch.ops.jitattn.attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.attention.api import Plan
from jitattn.kernels.attention.queries import (
    FP8,
    check_fp8_queries,
    check_q_scale,
    dequantize_into,
)
from jitattn.kernels.common.torch_op import (
    CACHE,
    PAGES,
    PLAN,
    bound_of,
    cache_tensors,
    define,
    new_outputs,
    pages_tensors,
    planned_table,
    refuse_gradients,
    scale_of,
    scale_parts,
)
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_rows, check_tensor, check_writable
from jitattn.tensors.tensor_handles import find

__all__ = ["attention", "dequantize_queries"]


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
    q_scale: Tensor | None = None,
    q_factor: float | None = None,
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
        q_scale: of FP8 queries that attention kernels read: a tensor; or else
        q_factor: a number, or neither.

    Raises:
        TypeError, ValueError: as ``Plan.run``, or a handle of nothing that lives.
    """
    found: Any = find("plan", plan, "Plan")
    bound = bound_of(found, kv_cache, kv, "BoundCache", k_scale=k_scale, v_scale=v_scale)
    # Queries that are dequantised in front are by then.
    reads_fp8 = found.planner.tensor_dtypes.q is FP8
    run: Any = type(found).run if reads_fp8 else Plan.run
    run(
        found,
        q,
        bound,
        pages=planned_table(pages, page_table),
        out=out,
        lse=lse,
        sinks=sinks,
        custom_mask=custom_mask if mask_indptr is None else (custom_mask, mask_indptr),
        q_scale=scale_of(q_scale, q_factor),
    )


define(
    attention,
    f"{PLAN}Tensor q, {CACHE}Tensor? v_scale, {PAGES}Tensor? sinks, Tensor? custom_mask, "
    "Tensor? mask_indptr, Tensor(a!) out, Tensor(b!)? lse, Tensor? q_scale=None, "
    "float? q_factor=None) -> ()",
)


def dequantize_queries(
    q: Tensor, q_scale: Tensor | None, q_factor: float | None, out: Tensor
) -> None:
    """Multiply FP8 queries with their scales: ``torch.ops.jitattn.dequantize_queries``.

    Args:
        q: as of ``Plan.run`` with ``q_dtype="float8_e4m3fn"``.
        q_scale: a tensor; or else
        q_factor: a number, or neither.
        out: like q, contiguous, float16 on a CUDA device and float64 of the reference backend;
            written.

    Raises:
        TypeError, ValueError: as ``Plan.run``, or ``out`` doesn't fit.
    """
    check_fp8_queries(q)
    scale = check_q_scale(scale_of(q_scale, q_factor), q)
    values = (torch.float16, torch.float64) if q.device.type == "cuda" else (torch.float64,)
    check_tensor("out", out, values)
    check_rows("out", out, tuple(q.shape), out.dtype, q.device)
    check_writable("out", out)
    if not out.is_contiguous():
        raise ValueError(f"out has strides {list(out.stride())}: expected a contiguous tensor")
    dequantize_into(q, scale, out)


define(dequantize_queries, "Tensor q, Tensor? q_scale, float? q_factor, Tensor(a!) out) -> ()")


def trace_dequantize(plan: Any, q: Tensor, q_scale: ScaleLike | None) -> Tensor:
    """Put the dequantisation of queries into the graph, and return its values."""
    if q.dtype is not FP8:
        raise TypeError(f"q has dtype {q.dtype}: expected {FP8}")
    out = torch.empty(q.shape, dtype=plan.planner.tensor_dtypes.q, device=q.device)
    torch.ops.jitattn.dequantize_queries(q, *scale_parts(q_scale), out)
    return out


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
    q_scale: ScaleLike | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Put a ``Plan.run`` into the graph."""
    refuse_gradients({"q": q, "sinks": sinks})
    config = plan.planner.config
    tensors, handle, k_scale, v_scale = cache_tensors(kv, pages)
    mask, indptr = custom_mask if isinstance(custom_mask, tuple) else (custom_mask, None)
    width = config.head_dim_vo or config.head_dim
    dtype = getattr(torch, config.kernel_out_dtype)
    out, lse = new_outputs(q, width, dtype, out, lse, return_lse)
    torch.ops.jitattn.attention(
        plan.handle, q, tensors, handle, k_scale, v_scale, *pages_tensors(pages),
        sinks, mask, indptr, out, lse, *scale_parts(q_scale),
    )  # fmt: skip
    if return_lse:
        assert lse is not None
        return out, lse
    return out
