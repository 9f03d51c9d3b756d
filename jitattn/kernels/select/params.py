"""Launch arguments of kernels that choose tokens and pages.

Twin: templates/include/jitattn/select_params.cuh, which says what each is.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

from jitattn.spec.params import Lengths, PageList


class QueryRows(ctypes.Structure):
    """The query tokens of a batch, which are the last ones of their requests."""

    _fields_ = (
        ("qo_indptr", c_void_p),
        ("indptr_stride", c_int64),
        ("seq_lens", Lengths),
        ("num_tokens", c_int64),
        ("max_q_len", c_int32),
        ("max_kv_len", c_int32),
    )


class IndexCache(ctypes.Structure):
    """Where keys and their scales lie, in bytes."""

    _fields_ = (
        ("keys", c_void_p),
        ("scales", c_void_p),
        ("num_pages", c_int64),
        ("page_stride", c_int64),
        ("key_stride", c_int64),
        ("scale_shift", c_int64),
        ("is_aligned", c_int32),
    )


class IndexLogitsParams(ctypes.Structure):
    """Argument of the kernel that scores keys for an indexer."""

    _fields_ = (
        ("q", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("cache", IndexCache),
        ("pages", PageList),
        ("rows", QueryRows),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("weights_token_stride", c_int64),
        ("weights_head_stride", c_int64),
        ("out_stride", c_int64),
        ("num_heads", c_int32),
        ("num_chunks", c_int32),
        ("chunk_tokens", c_int32),
    )


class ChoiceParams(ctypes.Structure):
    """Argument of the kernels that choose the largest scores of a row."""

    _fields_ = (
        ("scores", c_void_p),
        ("entries", c_void_p),
        ("numbers", c_void_p),
        ("counts", c_void_p),
        ("pages", PageList),
        ("rows", QueryRows),
        ("scores_stride", c_int64),
        ("entries_stride", c_int64),
        ("entries_head_stride", c_int64),
        ("numbers_stride", c_int64),
        ("numbers_head_stride", c_int64),
        ("counts_stride", c_int64),
        ("counts_head_stride", c_int64),
        ("num_kv_heads", c_int32),
        ("k", c_int32),
        ("is_aligned", c_int32),
    )


class PageBoundsParams(ctypes.Structure):
    """Argument of the kernel that keeps the least and largest keys of pages."""

    _fields_ = (
        ("keys", c_void_p),
        ("bounds", c_void_p),
        ("pages", PageList),
        ("rows", QueryRows),
        ("num_pages", c_int64),
        ("page_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("bounds_stride", c_int64),
        ("bounds_side_stride", c_int64),
        ("bounds_head_stride", c_int64),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_parts", c_int32),
        ("is_update", c_int32),
    )


class PageScoresParams(ctypes.Structure):
    """Argument of the kernel that bounds the scores of pages."""

    _fields_ = (
        ("q", c_void_p),
        ("bounds", c_void_p),
        ("scores", c_void_p),
        ("pages", PageList),
        ("seq_lens", Lengths),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("num_pages", c_int64),
        ("bounds_stride", c_int64),
        ("bounds_side_stride", c_int64),
        ("bounds_head_stride", c_int64),
        ("q_code", c_int32),
        ("group_size", c_int32),
        ("num_kv_heads", c_int32),
        ("max_pages", c_int32),
        ("num_chunks", c_int32),
        ("chunk_pages", c_int32),
    )
