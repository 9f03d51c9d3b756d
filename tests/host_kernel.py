"""A kernel without shared memory, compiled for the CPU: its rendered source, run lane by lane.

The lanes of a row are threads that meet where they exchange values, so that a kernel runs as it is
written. Headers that speak PTX are replaced by C++ that means the same.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jitattn.render import render
from jitattn.sources import TEMPLATES
from jitattn.spec import PreprocessSpec
from jitattn.tiling import preprocess_tile_for

_PRELUDE = """
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Dim { unsigned x; };
inline thread_local Dim threadIdx, blockIdx;
template <typename To, typename From> To bits_of(From value) {
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
inline uint32_t __float_as_uint(float value) { return bits_of<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return bits_of<float>(bits); }
inline float __int_as_float(int32_t bits) { return bits_of<float>(bits); }
inline int __float2int_rn(float value) { return static_cast<int>(std::lrint(value)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <typename T> T min(T a, T b) { return b < a ? b : a; }
// The lanes of a row, and what they exchange.
struct Exchange {
  explicit Exchange(int lanes) : meeting(lanes) {}
  std::barrier<> meeting;
  float values[32];
};
inline thread_local Exchange* exchange;
inline float __shfl_xor_sync(uint32_t, float value, int step) {
  const int lane = threadIdx.x % JITATTN_LANES;
  exchange->values[lane] = value;
  exchange->meeting.arrive_and_wait();
  const float other = exchange->values[lane ^ step];
  exchange->meeting.arrive_and_wait();
  return other;
}
namespace jitattn {
constexpr int kArch = 800;
constexpr int kWarpSize = 32;
constexpr int32_t kInt32Max = 0x7fffffff;
}  // namespace jitattn
"""
_PTX = """
#pragma once
#include "jitattn/types.cuh"
namespace jitattn {
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
// The hardware's are within 2**-20 of these.
inline float sin_approx(float x) { return std::sin(x); }
inline float cos_approx(float x) { return std::cos(x); }
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : a < b ? b : a; }
inline float saturate(float value, float largest) {
  return value != value ? value : std::fmin(std::fmax(value, -largest), largest);
}
inline uint32_t cvt_f16x2(float low, float high) {
  return Half::pack(saturate(low, 65504.f), saturate(high, 65504.f));
}
inline uint32_t cvt_bf16x2(float low, float high) {
  const float largest = __uint_as_float(0x7f7f0000u);
  return BFloat16::pack(saturate(low, largest), saturate(high, largest));
}
uint32_t cvt_e4m3x2(float low, float high);
uint32_t cvt_e5m2x2(float low, float high);
}  // namespace jitattn
"""
_TYPES = """
#pragma once
namespace jitattn {
inline uint32_t join(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }
inline void split(uint32_t word, uint16_t& low, uint16_t& high) { low = word, high = word >> 16; }
struct Half {
  using Storage = uint16_t;
  static float to_float(uint16_t bits) { return bits_of<_Float16>(bits); }
  static uint16_t from_float(float value) {
    return bits_of<uint16_t>(static_cast<_Float16>(value));
  }
  static uint32_t pack(float low, float high) { return join(from_float(low), from_float(high)); }
};
struct BFloat16 {
  using Storage = uint16_t;
  static float to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
  static uint16_t from_float(float value) {
    const uint32_t bits = __float_as_uint(value);
    return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
  }
  static uint32_t pack(float low, float high) { return join(from_float(low), from_float(high)); }
};
enum class FloatCode : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };
inline float load_float(const void* base, int64_t i, FloatCode code) {
  if (code == FloatCode::kFloat16) return Half::to_float(static_cast<const uint16_t*>(base)[i]);
  if (code == FloatCode::kBFloat16) {
    return BFloat16::to_float(static_cast<const uint16_t*>(base)[i]);
  }
  return static_cast<const float*>(base)[i];
}
inline int64_t load_integer(const void* base, int64_t i, bool is_int64) {
  return is_int64 ? static_cast<const int64_t*>(base)[i] : static_cast<const int32_t*>(base)[i];
}
}  // namespace jitattn
"""
_FP8 = """
#pragma once
#include "jitattn/types.cuh"
namespace jitattn {
struct Float8E4M3 {
  using Storage = uint8_t;
  static uint2 to_halves(uint32_t byte) {
    const uint32_t magnitude = byte & 0x7f;
    const float value = Half::to_float(magnitude << 7) * 256.f;
    const uint32_t bits = magnitude == 0x7f ? 0x7fffu : Half::from_float(value);
    return {bits | (byte & 0x80) << 8, 0};
  }
};
struct Float8E5M2 {
  using Storage = uint8_t;
  static uint2 to_halves(uint32_t byte) { return {byte << 8 & 0xff00, 0}; }
};
struct Int8 {
  using Storage = uint8_t;
};
}  // namespace jitattn
"""
HOST_HEADERS = {"prelude": _PRELUDE, "ptx": _PTX, "types": _TYPES, "fp8": _FP8}
_CALL = """
extern "C" void call(const void* params, int grid) {
  const auto& given = *static_cast<const jitattn::KernelParams*>(params);
  constexpr int kRowLanes = JITATTN_LANES, kRows = jitattn::kNumThreads / kRowLanes;
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

HostKernel = Callable[[ctypes.Structure, int], None]


def host_kernel(spec: PreprocessSpec, folder: Path) -> HostKernel:
    """Return what runs the kernel of ``spec`` with its parameters and the size of its grid."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run the kernel on the CPU")
    headers = folder / "jitattn"
    headers.mkdir(exist_ok=True)
    for name, text in HOST_HEADERS.items():
        (headers / f"{name}.cuh").write_text(text)
    for path in (TEMPLATES / "include/jitattn").glob("*.cuh"):
        if path.stem not in HOST_HEADERS:
            (headers / path.name).write_text(path.read_text())
    source = folder / f"{spec.symbol}.cpp"
    lanes = preprocess_tile_for(spec).lanes
    text = re.sub(r"^#line.*$", "", render(spec, "sm_80"), flags=re.MULTILINE)
    call = _CALL.replace("SYMBOL", spec.symbol)
    source.write_text(f"#define JITATTN_LANES {lanes}\n{text}{call}")
    library = source.with_suffix(".so")
    flags = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    done = subprocess.run(
        [compiler, *flags, "-I", folder, "-o", library, source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(library)).call

    def run(params: ctypes.Structure, grid: int) -> None:
        function(ctypes.byref(params), grid)

    return run
