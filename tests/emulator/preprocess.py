"""A kernel without shared memory, compiled for the CPU: its rendered source, run lane by lane.

The lanes of a row are threads that meet where they exchange values, so that a kernel runs as it is
written. Headers that speak PTX are replaced by C++ that means the same.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from jitattn.jit.render import render
from jitattn.kernels.preprocess.spec import PreprocessSpec
from jitattn.kernels.preprocess.tile import preprocess_tile
from tests.emulator.cuda_runtime import (
    CONVERSIONS,
    PAIRS,
    QUALIFIERS,
    TYPES,
    WORDS,
    library_of,
    with_headers,
)

HOST_HEADERS = ("prelude", "ptx", "types", "fp8")
HOST = f"""
#include <barrier>
#include <thread>
#include <vector>
{QUALIFIERS}{WORDS}
struct Dim {{ unsigned x; }};
inline thread_local Dim threadIdx, blockIdx;
inline float rsqrtf(float x) {{ return 1.f / std::sqrt(x); }}
// The lanes of a row, and what they exchange.
struct Exchange {{
  explicit Exchange(int lanes) : meeting(lanes) {{}}
  std::barrier<> meeting;
  float values[32];
}};
inline thread_local Exchange* exchange;
extern const int kRowLanes;
inline float __shfl_xor_sync(uint32_t, float value, int step) {{
  const int lane = threadIdx.x % kRowLanes;
  exchange->values[lane] = value;
  exchange->meeting.arrive_and_wait();
  const float other = exchange->values[lane ^ step];
  exchange->meeting.arrive_and_wait();
  return other;
}}
namespace jitattn {{
constexpr int kWarpSize = 32;
constexpr int32_t kInt32Max = 0x7fffffff;
inline void launch_dependents() {{}}
inline void wait_for_previous_kernel() {{}}
inline void prefetch_to_l2(const void*) {{}}
// The hardware's are within 2**-20 of these.
inline float sin_approx(float x) {{ return std::sin(x); }}
inline float cos_approx(float x) {{ return std::cos(x); }}
inline float max_or_nan(float a, float b) {{ return a != a || b != b ? NAN : a < b ? b : a; }}
{CONVERSIONS}
{PAIRS}{TYPES}
}}  // namespace jitattn
"""
_CALL = """
extern "C" void call(const void* params, int grid) {
  const auto& given = *static_cast<const jitattn::KernelParams*>(params);
  const int kRows = jitattn::kNumThreads / kRowLanes;
  Exchange shared(kRowLanes);
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kRowLanes; ++lane) {
    lanes.emplace_back([&, lane] {
      exchange = &shared;
      for (int row = 0; row < grid * kRows; ++row) {
        blockIdx.x = row / kRows;
        threadIdx.x = row % kRows * kRowLanes + lane;
        SYMBOL(given);
        shared.meeting.arrive_and_wait();
      }
    });
  }
  for (auto& lane : lanes) lane.join();
}
"""

EmulatedKernel = Callable[[ctypes.Structure, int], None]


@functools.cache
def emulated_kernel(spec: PreprocessSpec) -> EmulatedKernel:
    """Return what runs the kernel of ``spec`` with its parameters and the size of its grid."""
    source = with_headers(render(spec, "sm_80"), HOST_HEADERS)
    call = _CALL.replace("SYMBOL", spec.symbol)
    text = f"const int kRowLanes = {preprocess_tile(spec).lanes};\n{source}{call}"
    function = library_of(text, begin=HOST, standard="c++20").call

    def run(params: ctypes.Structure, grid: int) -> None:
        function(ctypes.byref(params), grid)

    return run
