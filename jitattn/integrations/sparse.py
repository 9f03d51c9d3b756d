"""What engines' indexers choose, as ``IndexLists``, and latent attention to it.

Engines say which tokens a query token sees by slots, by positions in its request, or by places in
the K of all requests, one after the other. The last two go through a table.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count
from jitattn.integrations.steps import Step
from jitattn.kernels.common.planner_base import is_capturing, plan_for_call
from jitattn.kernels.mla.api import MLAPlanner
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_tensor, check_vector
from jitattn.tensors.token_lists import IndexLists

_INT32 = (torch.int32,)


def lists_of_positions(
    positions: Tensor,
    table: Tensor,
    rows: Tensor | None,
    page_size: int,
    *,
    out: IndexLists | None = None,
) -> IndexLists:
    """Return the slots of tokens that are given by their positions in a request.

    It waits for nothing, and can be captured with ``out``.

    Args:
        positions: int32 [num_tokens, k], from 0 on; a negative one is nothing.
        table: int32 [num_requests, width], page ids; with ``page_size`` 1 the slots of tokens.
        rows: int32 or int64 [num_tokens], the row of ``table`` of each query token; None is one
            each, in order.
        page_size: tokens of a page.
        out: what an earlier call of these sizes returned, to be written again.

    Returns:
        ``out``, or new lists without counts.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: a shape or device doesn't fit. On the CPU also a position without a page; on the
            device its entry is 2**31 - 1, which attention answers with NaN.
    """
    _check_positions(positions, table, rows)
    page_size = check_count("page_size", page_size, least=1)
    num_rows, width = table.shape
    if table.numel() == 0:  # nothing is there
        num_rows, width, table = 1, 1, table.new_full((1, 1), -1)
    row = torch.arange(positions.shape[0], device=table.device) if rows is None else rows.long()
    begins = torch.where((row >= 0) & (row < num_rows), row * width, -1)[:, None]
    # Few operations on all entries: each is a launch.
    pages = positions.div(page_size, rounding_mode="floor")
    near = pages.clamp(0, width - 1)
    ids = table.take((begins + near).clamp_(min=0))
    most = (INT32_MAX - page_size) // page_size
    is_there = (near == pages).logical_and_(ids.clamp(0, most) == ids).logical_and_(begins >= 0)
    if positions.device.type == "cpu":
        _refuse_missing(positions, (positions >= 0) & ~is_there)
    slots = positions.remainder(page_size).add_(ids, alpha=page_size)
    found = torch.where(is_there, slots, INT32_MAX).masked_fill_(positions < 0, -1)
    return _into(out, found)


def lists_of_places(places: Tensor, slots: Tensor, *, out: IndexLists | None = None) -> IndexLists:
    """Return the slots of tokens that are given by their places in a list of all slots.

    Args:
        places: int32 [num_tokens, k]; a negative one is nothing.
        slots: int32 or int64 [n], the slots of the tokens of all requests, one after the other.
        out: as of ``lists_of_positions``.

    Raises:
        TypeError, ValueError: as ``lists_of_positions``.
    """
    check_vector("slots", slots, device=None)
    check_tensor("places", places, _INT32)
    rows = places.new_zeros(places.shape[:1])
    return lists_of_positions(places, slots.int()[None], rows, 1, out=out)


def _check_positions(positions: Tensor, table: Tensor, rows: Tensor | None) -> None:
    for name, tensor, wanted in (
        ("positions", positions, "[num_tokens, k]"),
        ("table", table, "[num_requests, width]"),
    ):
        check_tensor(name, tensor, _INT32)
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {wanted}")
    check_device("table", table, positions.device)
    num_tokens = positions.shape[0]
    if rows is None:
        if table.shape[0] != num_tokens:
            raise ValueError(
                f"table has {table.shape[0]} rows and positions {num_tokens}: without rows there "
                "is one for each query token"
            )
        return
    check_tensor("rows", rows, INTEGERS)
    if tuple(rows.shape) != (num_tokens,):
        raise ValueError(f"rows has shape {list(rows.shape)}: expected [{num_tokens}]")
    check_device("rows", rows, positions.device)


def _refuse_missing(positions: Tensor, is_missing: Tensor) -> None:
    if bool(is_missing.any()):
        token, place = is_missing.nonzero()[0].tolist()
        raise ValueError(
            f"positions[{token}, {place}] is {int(positions[token, place])}: the table has no page "
            "for it"
        )


def _into(out: IndexLists | None, slots: Tensor) -> IndexLists:
    if out is None:
        return IndexLists(slots)
    if out.counts is not None or out.slots.shape != slots.shape:
        raise ValueError(f"out is {out!r}: expected lists of {list(slots.shape)} without counts")
    out.slots.copy_(slots)
    return out


class SparseLatents:
    """Latent attention of a layer to lists of tokens.

    Attributes:
        num_heads: query heads of this device.
        sm_scale: multiplies scores.
        kv_lora_rank: elements of a latent.
        qk_rope_head_dim: elements of a rope part.
        batch_invariant: a query token's bits depend on its list alone.
    """

    def __init__(
        self,
        num_heads: int,
        sm_scale: float,
        *,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        batch_invariant: bool = False,
    ) -> None:
        """Hold what a layer is; no kernel is loaded."""
        self.num_heads = num_heads
        self.sm_scale = float(sm_scale)
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.batch_invariant = batch_invariant

    def planner(self, q_dtype: torch.dtype, cache: Tensor) -> MLAPlanner:
        """Return the planner of a cache, one for all layers of a kind.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
        """
        kv_dtype = torch.float8_e4m3fn if cache.dtype is torch.uint8 else cache.dtype
        arguments = {
            "num_heads": self.num_heads,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "sm_scale": self.sm_scale,
            "page_size": cache.shape[1],
            "q_dtype": q_dtype,
            "kv_dtype": kv_dtype,
            "page_table": "indices",
            "batch_invariant": self.batch_invariant,
        }
        return _planner(tuple(arguments.items()), cache.device)

    def attend(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        cache: Tensor,
        lists: IndexLists,
        *,
        step: Step | None = None,
        k_scale: ScaleLike | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend each query token to its list, on the current stream.

        Args:
            q_nope: [num_tokens, num_heads, kv_lora_rank], the projection of keys multiplied in.
            q_pe: [num_tokens, num_heads, qk_rope_head_dim].
            cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], or rows of 656 bytes
                that hold their scales; bytes are e4m3.
            lists: slots of the cache.
            step: ``step_of(num_tokens)`` of a step, for the plan that its layers share; None, and
                in a capture, plans anew.
            k_scale: of FP8 latents whose rows hold none; see ``MLAPlanner.bind``.
            return_lse: return lse as well.

        Returns:
            As ``MLAPlan.run``.

        Raises:
            TypeError, ValueError, ConfigError: naming what is not supported or doesn't fit.

        Defined by: jitattn/kernels/mla/reference.py::latent_attention.
        """
        if cache.dim() != 3:
            raise ValueError(
                f"cache has shape {list(cache.shape)}: expected [num_pages, page_size, elements]"
            )
        planner = self.planner(q_nope.dtype, cache)
        kv = planner.bind(cache, k_scale=k_scale)
        other = None
        if step is None or is_capturing(cache.device):
            plan: Any = plan_for_call(planner, lists, q_nope.shape[0])
        else:
            plan, other = step.plan_of(planner, lists)
        return plan.run(q_nope, q_pe, kv, pages=other, return_lse=return_lse)


def step_of(num_tokens: int) -> Step:
    """Return a step of so many query tokens that have lists."""
    return Step(num_tokens, None, 1)


@functools.lru_cache(maxsize=64)
def _planner(arguments: tuple[tuple[str, Any], ...], device: torch.device) -> MLAPlanner:
    given: Mapping[str, Any] = dict(arguments)
    return MLAPlanner(**given, device=device)
