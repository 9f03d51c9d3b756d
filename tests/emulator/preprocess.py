"""The kernel of ``preprocess_qkv`` and ``append_kv``, compiled for the CPU as it is rendered."""

from __future__ import annotations

import functools

from jitattn.jit.render import render
from jitattn.kernels.preprocess.spec import PreprocessSpec
from tests.emulator.cuda_runtime import CONVERSIONS, with_headers
from tests.emulator.device import Program

# What stands before a kernel or a header of its arithmetic, beside the device's.
HOST_HEADERS = ("prelude", "ptx", "types", "fp8")
HOST = f"""
inline float rsqrtf(float x) {{ return 1.f / std::sqrt(x); }}
namespace jitattn {{
inline float max_or_nan(float a, float b) {{ return a != a || b != b ? NAN : a < b ? b : a; }}
{CONVERSIONS}
}}  // namespace jitattn
"""


@functools.cache
def compiled(spec: PreprocessSpec) -> Program:
    """The kernel of ``spec`` as a function of the host."""
    return Program(HOST + with_headers(render(spec, "sm_80"), HOST_HEADERS))
