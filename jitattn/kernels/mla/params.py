"""Launch arguments that MLA has besides those of attention, as kernels lay them out.

Twin: templates/include/jitattn/mla_params.cuh; tests/compile/test_params.py has the compiler
compare both.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

from jitattn.kernels.common.params import kernel_params
from jitattn.spec.layout import Layout, ListLayout


class MLAParams(ctypes.Structure):
    """Arguments of MLA kernels besides ``AttentionParams``."""

    _fields_ = (
        ("q_pe", c_void_p),
        ("latent_scales", c_void_p),
        ("q_pe_token_stride", c_int64),
        ("q_pe_head_stride", c_int64),
        ("scale_page_stride", c_int64),
        ("scale_token_stride", c_int64),
        ("q_pe_is_aligned", c_int32),
        ("merges_splits", c_int32),
    )


MLA_FIELDS = (("mla", MLAParams),)
"""Where they lie in ``struct KernelParams``: behind the page table."""

# ``struct KernelParams`` of mla/constants.cuh.jinja, with tensor maps of latents and of k_pe.
MLA_PARAMS = {
    layout: kernel_params(layout, None, MLA_FIELDS) for layout in (*Layout, ListLayout.INDICES)
}
