"""Launch arguments of the merge kernel. Twin: templates/include/jitattn/merge_params.cuh."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p


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
