"""Launch arguments of the preprocess kernel.

Twin: templates/include/jitattn/preprocess_params.cuh.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from jitattn.spec.layout import Layout
from jitattn.spec.params import PAGE_PARAMS, Divisor, ScaleParams


class RowStrides(ctypes.Structure):
    """Of the rows of Q, K and V, in elements."""

    _fields_ = (("token", c_int64), ("head", c_int64))


class CacheStrides(ctypes.Structure):
    """Of a cache, in elements; of four bits in bytes."""

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
        ("q_scale", ScaleParams),
        ("k_scale", ScaleParams),
        ("v_scale", ScaleParams),
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
        ("groups_per_token", Divisor),
        ("norm_eps", c_float),
        ("attention_factor", c_float),
    )


def _preprocess_params(layout: Layout | None) -> type[ctypes.Structure]:
    pages = (("pages", PAGE_PARAMS[layout]),) if layout else (("_padding", ctypes.c_char * 8),)
    name = f"PreprocessKernelParams_{layout.value if layout else 'slots'}"
    fields = (("op", PreprocessParams), *pages)
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# ``struct KernelParams`` of preprocess.cu.jinja, by layout; None: slots, whose table is empty.
PREPROCESS_PARAMS = {
    layout: _preprocess_params(layout) for layout in (None, *Layout) if layout != "ragged"
}
