"""Launch arguments of the kernel that dequantises queries.

Twin: templates/include/jitattn/query_params.cuh.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class QueryParams(ctypes.Structure):
    """Argument of the kernel that dequantises queries."""

    _fields_ = (
        ("q", c_void_p),
        ("scales", c_void_p),
        ("out", c_void_p),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("scale_token_stride", c_int64),
        ("scale_head_stride", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int32),
        ("row_vectors", c_int32),
        ("scale", c_float),
        ("q_is_aligned", c_int32),
    )
