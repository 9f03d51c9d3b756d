"""Launch arguments that attention and MLA share, as their kernels lay them out.

Twins: the headers of templates/ that name this module; tests/compile/test_params.py has the
compiler compare both.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

from jitattn.spec.layout import AnyLayout
from jitattn.spec.params import PAGE_PARAMS, TENSOR_MAP_BYTES, Divisor, ScaleParams, variant_params
from jitattn.spec.variant import AttentionVariant

# Custom masks: MaskKind in attention_params.cuh.
MASK_BOOL, MASK_PACKED, MASK_RAGGED = 0, 1, 2
# Bytes of the entries of a schedule: ScheduleHeader, Request, QueryTile, SlotBoundary, scans.
HEADER_BYTES, REQUEST_BYTES, QUERY_TILE_BYTES, BOUNDARY_BYTES = 16, 16, 32, 8
QUERY_TILE_BEGIN_BYTES, COST_BYTES, FIRST_ITEM_BYTES = 4, 8, 80


class Schedule(ctypes.Structure):
    """Pointers into the allocation that a plan owns."""

    _fields_ = (
        ("header", c_void_p),
        ("requests", c_void_p),
        ("query_tiles", c_void_p),
        ("boundaries", c_void_p),
        ("query_tile_begin", c_void_p),
        ("cost_begin", c_void_p),
        ("first_items", c_void_p),
    )


MAX_KERNELS = 2
"""Of a plan."""


class ScheduleParams(ctypes.Structure):
    """Argument of the schedule kernel for one kernel of a plan; it has ``MAX_KERNELS`` of them."""

    _fields_ = (
        ("seq_lens", c_void_p),
        ("kv_indptr", c_void_p),
        ("qo_indptr", c_void_p),
        ("schedule", Schedule),
        ("seq_lens_stride", c_int64),
        ("kv_indptr_stride", c_int64),
        ("qo_indptr_stride", c_int64),
        ("max_kv_len", c_int64),
        ("num_entries", c_int64),
        ("entry_tokens", c_int32),
        ("seq_lens_are_int64", c_int32),
        ("batch_size", c_int32),
        ("max_q_len", c_int32),
        ("is_causal", c_int32),
        ("window_left", c_int32),
        ("group_size", c_int32),
        ("decode_rows", c_int32),
        ("prefill_rows", c_int32),
        ("wave_slots", c_int32),
        ("max_waves", c_int32),
        ("num_ctas", c_int32),
        ("num_first_items", c_int32),
        ("section_tokens", c_int32),
        ("num_head_blocks", c_int32),
        ("tile_tokens", c_int32),
        ("tile_visit_cost", c_int32),
        ("min_slot_cost", c_int32),
        ("merge_cost", c_int32),
        ("split_cost", c_int32),
        ("max_splits", c_int32),
        ("min_split_tiles", c_int32),
        ("splits_go_by_rows", c_int32),
        ("skips_empty_tiles", c_int32),
    )


class ListScheduleParams(ctypes.Structure):
    """The same for kernels of lists."""

    _fields_ = (
        *ScheduleParams._fields_,
        ("counts", c_void_p),
        ("count_stride", c_int64),
        ("count_head_stride", c_int64),
        ("num_count_heads", c_int32),
        ("width", c_int32),
    )


class AttentionParams(ctypes.Structure):
    """Argument of an attention kernel, but for its page table."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("sinks", c_void_p),
        ("partials", c_void_p),
        ("partial_sums", c_void_p),
        ("counters", c_void_p),
        ("num_claimed", c_void_p),
        ("mask", c_void_p),
        ("mask_indptr", c_void_p),
        ("schedule", Schedule),
        ("k_scale", ScaleParams),
        ("v_scale", ScaleParams),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k_page_stride", c_int64),
        ("k_token_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v_page_stride", c_int64),
        ("v_token_stride", c_int64),
        ("v_head_stride", c_int64),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse_token_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("sink_stride", c_int64),
        ("mask_row_stride", c_int64),
        ("mask_indptr_stride", c_int64),
        ("mask_bytes", c_int64),
        ("num_tokens", c_int32),
        ("num_qo_heads", c_int32),
        ("group_size", Divisor),
        ("num_row_blocks", Divisor),
        ("num_head_blocks", Divisor),
        ("claims_work_tiles", c_int32),
        ("max_splits", c_int32),
        ("max_slots", c_int32),
        ("is_causal", c_int32),
        ("window_left", c_int32),
        ("has_padding", c_int32),
        ("mask_kind", c_int32),
        ("mask_width", c_int32),
        ("sink_code", c_int32),
        ("q_is_aligned", c_int32),
        ("early_kv", c_int32),
        ("out_is_aligned", c_int32),
        ("is_second", c_int32),
        ("score_scale", c_float),
        ("cap_log2", c_float),
    )


ATTENTION_OFFSET = 2 * TENSOR_MAP_BYTES
"""Where ``AttentionParams`` begins in ``KernelParams``."""


ParamFields = tuple[tuple[str, type[ctypes.Structure]], ...]
"""Names and types of fields that a family's kernels have behind the page table."""


def _kernel_params(
    layout: AnyLayout, *others: tuple[str, type[ctypes.Structure]]
) -> type[ctypes.Structure]:
    fields: tuple[tuple[str, Any], ...] = (
        ("k_map", ctypes.c_char * TENSOR_MAP_BYTES),
        ("v_map", ctypes.c_char * TENSOR_MAP_BYTES),
        ("attention", AttentionParams),
        ("pages", PAGE_PARAMS[layout]),
        *others,
    )
    num_bytes = sum(ctypes.sizeof(kind) for _, kind in fields)
    padding = ("_padding", ctypes.c_char * (-num_bytes % 64))
    name = "_".join(("KernelParams", layout.value, *(name for name, _ in others)))
    return type(name, (ctypes.Structure,), {"_fields_": (*fields, padding)})


# ``struct KernelParams`` of each layout.
KERNEL_PARAMS = {layout: _kernel_params(layout) for layout in PAGE_PARAMS}


@functools.lru_cache(maxsize=256)
def kernel_params(
    layout: AnyLayout, variant: AttentionVariant | None, others: ParamFields = ()
) -> type[ctypes.Structure]:
    """Return ``struct KernelParams``, with a variant's parameters and ``others`` of a family."""
    if variant is None and not others:
        return KERNEL_PARAMS[layout]
    own = () if variant is None else (("variant", variant_params(variant)),)
    return _kernel_params(layout, *own, *others)
