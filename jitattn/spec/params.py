"""Launch arguments as the kernels lay them out.

Twins: the headers of templates/include/jitattn/ that name this module, and page_table.cuh.jinja and
variant_params.cuh.jinja of templates/parts/. tests/compile/test_params.py has the compiler compare
both.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

from jitattn.spec.dtype import DType
from jitattn.spec.layout import Layout
from jitattn.spec.variant import AttentionVariant, ParamType

# Codes of floating-point types that a caller may choose at launch: FloatCode in types.cuh.
FLOAT_CODES = {d.value: d.float_code for d in DType if d.float_code is not None}

# Custom masks: MaskKind in attention_params.cuh.
MASK_BOOL, MASK_PACKED, MASK_RAGGED = 0, 1, 2

# Bytes of the entries of a schedule: ScheduleHeader, Request, Unit, SlotBoundary, and the scans.
HEADER_BYTES, REQUEST_BYTES, UNIT_BYTES, BOUNDARY_BYTES = 16, 16, 32, 8
UNIT_BEGIN_BYTES, COST_BYTES = 4, 8


class Schedule(ctypes.Structure):
    """Pointers into the allocation that a plan owns."""

    _fields_ = (
        ("header", c_void_p),
        ("requests", c_void_p),
        ("units", c_void_p),
        ("boundaries", c_void_p),
        ("unit_begin", c_void_p),
        ("cost_begin", c_void_p),
    )


class ScheduleParams(ctypes.Structure):
    """Argument of the schedule kernel."""

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
        ("round_slots", c_int32),
        ("max_rounds", c_int32),
        ("num_ctas", c_int32),
        ("num_head_blocks", c_int32),
        ("tile_tokens", c_int32),
        ("unit_cost", c_int32),
        ("min_slot_cost", c_int32),
        ("max_splits", c_int32),
        ("min_split_tiles", c_int32),
    )


class Divisor(ctypes.Structure):
    """A number to divide by, and what makes that one multiplication and one shift."""

    _fields_ = (("value", c_int32), ("magic", c_uint32), ("shift", c_int32))

    @classmethod
    def of(cls, value: int) -> Divisor:
        """Return ``value``, at least 1, as a divisor of numbers below 2**31."""
        shift = (value - 1).bit_length()
        return cls(value, -(-(1 << (31 + shift)) // value), shift)


class Scale(ctypes.Structure):
    """What a stored value of a KV head is multiplied with: one of ``values``, or ``value``."""

    _fields_ = (("values", c_void_p), ("stride", c_int64), ("value", c_float))


class BlockScales(ctypes.Structure):
    """The scales of the blocks of K or V, with the strides of pages, tokens and heads."""

    _fields_ = (
        ("scales", c_void_p),
        ("page_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("unused", c_int64 * 12),
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
        ("k_scale", Scale),
        ("v_scale", Scale),
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
        ("claims_pieces", c_int32),
        ("max_splits", c_int32),
        ("is_causal", c_int32),
        ("window_left", c_int32),
        ("has_padding", c_int32),
        ("mask_kind", c_int32),
        ("mask_width", c_int32),
        ("sink_code", c_int32),
        ("q_is_aligned", c_int32),
        ("early_kv", c_int32),
        ("out_is_aligned", c_int32),
        ("score_scale", c_float),
        ("cap_log2", c_float),
    )


class MergeParams(ctypes.Structure):
    """Argument of the kernel that merges attention states."""

    _fields_ = (
        ("outs", c_void_p),
        ("lses", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("outs_state_stride", c_int64),
        ("outs_token_stride", c_int64),
        ("outs_head_stride", c_int64),
        ("lses_state_stride", c_int64),
        ("lses_token_stride", c_int64),
        ("lses_head_stride", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("num_states", c_int32),
        ("head_dim", c_int32),
    )


class RowStrides(ctypes.Structure):
    """Of the rows of Q, K and V, in elements."""

    _fields_ = (("token", c_int64), ("head", c_int64))


class CacheStrides(ctypes.Structure):
    """Of a cache, in elements; of NVFP4 in bytes."""

    _fields_ = (("page", c_int64), ("token", c_int64), ("head", c_int64))


# With which PreprocessParams begins, in this order.
PREPROCESS_ADDRESSES = (
    *("q", "k", "v", "q_out", "k_cache", "v_cache", "k_block_scales", "v_block_scales"),
    *("seq_lens", "qo_indptr", "slots", "positions", "position_delta"),
    *("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "turns", "axes"),
)


class PreprocessParams(ctypes.Structure):
    """Argument of the kernel that puts Q, K and V where attention reads them, but its table."""

    _fields_ = (
        *((name, c_void_p) for name in PREPROCESS_ADDRESSES),
        ("q_scale", Scale),
        ("k_scale", Scale),
        ("v_scale", Scale),
        ("q_strides", RowStrides),
        ("k_strides", RowStrides),
        ("v_strides", RowStrides),
        ("out_strides", RowStrides),
        ("k_cache_strides", CacheStrides),
        ("v_cache_strides", CacheStrides),
        ("k_block_strides", CacheStrides),
        ("v_block_strides", CacheStrides),
        ("seq_lens_stride", c_int64),
        ("qo_indptr_stride", c_int64),
        ("slots_stride", c_int64),
        ("axis_stride", c_int64),
        ("position_stride", c_int64),
        ("delta_stride", c_int64),
        ("seq_lens_are_int64", c_int32),
        ("slots_are_int64", c_int32),
        ("positions_are_int64", c_int32),
        ("deltas_are_int64", c_int32),
        ("num_tokens", c_int32),
        ("batch_size", c_int32),
        ("num_qo_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("num_k_pages", c_int32),
        ("num_v_pages", c_int32),
        ("max_kv_len", c_int32),
        ("rotary_dim", c_int32),
        ("zero_tail", c_int32),
        ("q_norm_code", c_int32),
        ("k_norm_code", c_int32),
        ("items_per_token", Divisor),
        ("norm_eps", c_float),
        ("attention_factor", c_float),
    )


class PageList(ctypes.Structure):
    """Where the tokens of requests lie, of any page table layout."""

    _fields_ = (
        ("entries", c_void_p),
        ("rows", c_void_p),
        ("indptr", c_void_p),
        ("row_stride", c_int64),
        ("value_stride", c_int64),
        ("entry_stride", c_int64),
        ("rows_stride", c_int64),
        ("indptr_stride", c_int64),
        ("num_rows", c_int64),
        ("num_entries", c_int64),
        ("page_size", Divisor),
        ("entries_are_int64", c_int32),
        ("rows_are_int64", c_int32),
        ("are_slots", c_int32),
    )


class Lengths(ctypes.Structure):
    """A length of each request."""

    _fields_ = (
        ("values", c_void_p),
        ("stride", c_int64),
        ("are_int64", c_int32),
        ("batch_size", c_int32),
    )


class GatherSide(ctypes.Structure):
    """K or V, and where its tokens go."""

    _fields_ = (
        ("cache", c_void_p),
        ("out", c_void_p),
        ("block_scales", c_void_p),
        ("page_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("block_page_stride", c_int64),
        ("block_token_stride", c_int64),
        ("block_head_stride", c_int64),
        ("num_pages", c_int64),
        ("scale", Scale),
        ("row_vectors", Divisor),
        ("head_vectors", Divisor),
    )


class GatherParams(ctypes.Structure):
    """Argument of the kernel that gathers K and V."""

    _fields_ = (
        ("k", GatherSide),
        ("v", GatherSide),
        ("pages", PageList),
        ("seq_lens", Lengths),
        ("kv_indptr", c_void_p),
        ("num_tokens", c_int64),
        ("tile_rows", c_int32),
        ("is_aligned", c_int32),
    )


# Of CopyParams: what one launch copies between, and what a page may be in memory.
MAX_POOLS, PAGE_DIMS = 128, 4


class CopyPool(ctypes.Structure):
    """Where the pages of a source and of a destination begin."""

    _fields_ = (("src", c_void_p), ("dst", c_void_p))


class CopyDim(ctypes.Structure):
    """A dimension of a page, in words."""

    _fields_ = (("src_stride", c_int64), ("dst_stride", c_int64), ("size", Divisor))


class CopyParams(ctypes.Structure):
    """Argument of the kernel that copies pages."""

    _fields_ = (
        ("pairs", c_void_p),
        ("pair_stride", c_int64),
        ("side_stride", c_int64),
        ("num_parts", c_int64),
        ("src_page_stride", c_int64),
        ("dst_page_stride", c_int64),
        ("num_src_pages", c_int64),
        ("num_dst_pages", c_int64),
        ("dims", CopyDim * PAGE_DIMS),
        ("pairs_are_int64", c_int32),
        ("num_pools", c_int32),
        ("page_parts", c_int32),
        ("page_words", c_int32),
        ("word_bytes", c_int32),
        ("pools", CopyPool * MAX_POOLS),
    )


class BlockTableParams(ctypes.Structure):
    """Argument of the kernel that makes block tables."""

    _fields_ = (
        ("table", c_void_p),
        ("slots", PageList),
        ("seq_lens", Lengths),
        ("kv_start", Lengths),
        ("slot_map", c_void_p),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("slot_map_stride", c_int64),
        ("num_slots", c_int64),
        ("slot_map_is_int64", c_int32),
        ("width", c_int32),
        ("lanes_log2", c_int32),
    )


class BatchInfoParams(ctypes.Structure):
    """Argument of the kernel that says of query tokens whose they are."""

    _fields_ = (
        ("seq_lens", Lengths),
        ("q_lens", Lengths),
        ("pages", PageList),
        ("qo_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("requests", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_tokens", c_int64),
    )


class TableRequest(ctypes.Structure):
    """A request of the kernel that makes the tables of layers, and what has changed of it."""

    _fields_ = (
        ("row", c_int32),
        ("table_row", c_int32),
        ("scratch_start", c_int32),
        ("scratch_stop", c_int32),
        ("scratch_begin", c_int32),
        ("change_begin", c_int32),
        ("change_end", c_int32),
    )


class SlotChange(ctypes.Structure):
    """The slot that a block has from now on."""

    _fields_ = (("block", c_int32), ("slot", c_int32))


class TableLayer(ctypes.Structure):
    """Pages of a slot, and which of them is a layer's."""

    _fields_ = (("num_pages", c_int32), ("offset", c_int32))


class LayerTablesParams(ctypes.Structure):
    """Argument of the kernel that makes the tables of a group's layers."""

    _fields_ = (
        ("tables", c_void_p),
        ("slots", c_void_p),
        ("requests", c_void_p),
        ("changes", c_void_p),
        ("scratch_slots", c_void_p),
        ("layers", c_void_p),
        ("layer_stride", c_int64),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("batch_size", c_int32),
        ("num_layers", c_int32),
        ("width", c_int32),
        ("num_blocks", c_int32),
        ("first_block", c_int32),
        ("span", c_int32),
    )


_TABLE_ROWS = (
    ("table", c_void_p),
    ("rows", c_void_p),
    ("row_stride", c_int64),
    ("column_stride", c_int64),
    ("rows_stride", c_int64),
    ("rows_are_int64", c_int32),
)


class TablePages(ctypes.Structure):
    """``struct PageTable`` of the layouts "shared" and "token"."""

    _fields_ = _TABLE_ROWS


class SeparatePages(ctypes.Structure):
    """``struct PageTable`` of the layout "separate"."""

    _fields_ = (*_TABLE_ROWS, ("kv_stride", c_int64))


class CsrPages(ctypes.Structure):
    """``struct PageTable`` of the layout "csr"."""

    _fields_ = (
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("indptr_stride", c_int64),
        ("indices_stride", c_int64),
        ("num_entries", c_int64),
    )


class RaggedPages(ctypes.Structure):
    """``struct PageTable`` of the layout "ragged"."""

    _fields_ = (
        ("kv_indptr", c_void_p),
        ("indptr_stride", c_int64),
        ("num_entries", c_int64),
    )


_PAGES: dict[Layout, type[ctypes.Structure]] = {
    Layout.SHARED: TablePages,
    Layout.SEPARATE: SeparatePages,
    Layout.CSR: CsrPages,
    Layout.TOKEN: TablePages,
    Layout.RAGGED: RaggedPages,
}


TENSOR_MAP_BYTES = 128
"""Of a ``TensorMap``, or of ``BlockScales`` in its place, at a multiple of 64."""

ATTENTION_OFFSET = 2 * TENSOR_MAP_BYTES
"""Where ``AttentionParams`` begins in ``KernelParams``."""


def _kernel_params(
    layout: Layout, *others: tuple[str, type[ctypes.Structure]]
) -> type[ctypes.Structure]:
    fields: tuple[tuple[str, Any], ...] = (
        ("k_map", ctypes.c_char * TENSOR_MAP_BYTES),
        ("v_map", ctypes.c_char * TENSOR_MAP_BYTES),
        ("attention", AttentionParams),
        ("pages", _PAGES[layout]),
        *others,
    )
    num_bytes = sum(ctypes.sizeof(kind) for _, kind in fields)
    padding = ("_padding", ctypes.c_char * (-num_bytes % 64))
    name = "_".join(("KernelParams", layout.value, *(name for name, _ in others)))
    return type(name, (ctypes.Structure,), {"_fields_": (*fields, padding)})


# ``struct KernelParams`` of each layout.
KERNEL_PARAMS = {layout: _kernel_params(layout) for layout in Layout}


class LatentParams(ctypes.Structure):
    """What kernels of multi-head latent attention get besides ``AttentionParams``."""

    _fields_ = (
        ("q_pe", c_void_p),
        ("latent_scales", c_void_p),
        ("q_pe_token_stride", c_int64),
        ("q_pe_head_stride", c_int64),
        ("scale_page_stride", c_int64),
        ("scale_token_stride", c_int64),
        ("q_pe_is_aligned", c_int32),
        ("unused", c_int32),
    )


# The same of mla/constants.cuh.jinja, whose maps are those of latents and rope parts.
MLA_PARAMS = {layout: _kernel_params(layout, ("latent", LatentParams)) for layout in Layout}


@functools.cache
def table_type(rank: int) -> type[ctypes.Structure]:
    """Return ``VariantTable`` of so many sizes: a tensor that a variant reads."""
    fields = (("values", c_void_p), ("strides", c_int64 * rank), ("sizes", c_int64 * rank))
    return type(f"VariantTable{rank}", (ctypes.Structure,), {"_fields_": fields})


def _variant_field(kind: ParamType) -> type[Any]:
    if kind.sizes:
        return table_type(len(kind.sizes))
    if kind.is_pointer:
        return c_void_p
    return {"float": c_float, "int": c_int32}[kind.element]


@functools.lru_cache(maxsize=256)
def variant_params(variant: AttentionVariant) -> type[ctypes.Structure]:
    """Return ``VariantParams`` of a variant."""
    fields = [(name, _variant_field(kind)) for name, kind in variant.types.items()]
    # An empty struct has a size of its own in C++.
    return type("VariantParams", (ctypes.Structure,), {"_fields_": fields or [("unused", c_int32)]})


@functools.lru_cache(maxsize=256)
def kernel_params(
    layout: Layout, variant: AttentionVariant | None, *, is_latent: bool
) -> type[ctypes.Structure]:
    """Return ``struct KernelParams`` of attention kernels; of a variant, its parameters, too."""
    if variant is None:
        return (MLA_PARAMS if is_latent else KERNEL_PARAMS)[layout]
    latent = (("latent", LatentParams),) if is_latent else ()
    return _kernel_params(layout, ("variant", variant_params(variant)), *latent)


def _preprocess_params(layout: Layout | None) -> type[ctypes.Structure]:
    pages = (("pages", _PAGES[layout]),) if layout else (("_padding", ctypes.c_char * 8),)
    name = f"PreprocessKernelParams_{layout.value if layout else 'slots'}"
    fields = (("op", PreprocessParams), *pages)
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# ``struct KernelParams`` of preprocess.cu.jinja, by layout; None: slots, whose table is empty.
PREPROCESS_PARAMS = {
    layout: _preprocess_params(layout) for layout in (None, *Layout) if layout != "ragged"
}
