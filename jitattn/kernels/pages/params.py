"""Launch arguments of kernels that move tokens and pages and make tables.

Twins: the headers of templates/include/jitattn/ that name this module.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

from jitattn.spec.params import Divisor, Lengths, PageList, ScaleParams


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
        ("scale", ScaleParams),
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
