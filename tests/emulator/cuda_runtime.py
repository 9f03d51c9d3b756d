"""CUDA on the CPU: what templates ask of a device, said in C++, and the compiler that takes it.

Launchers choose how the threads of a CTA meet: device.py (coroutines, of all warps) and pages.py
(threads of the host, each a warp).
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from jitattn.jit.sources import TEMPLATES
from tests.support.shared_files import shared_file

QUALIFIERS = """
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
"""
# The words of a machine, and what takes them apart.
WORDS = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
using std::max;
using std::min;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
template <typename To, typename From> To bits_of(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline float __int_as_float(int32_t x) { return bits_of<float>(x); }
inline float __uint_as_float(uint32_t x) { return bits_of<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_of<uint32_t>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::lrint(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t both = a | uint64_t(b) << 32;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= uint32_t(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return word;
}
"""
# A block of `kBlock` threads, a number of the kernel's, that are threads of the host.
THREADS = """
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
extern const int kBlock;
struct Index { int x = 0; };
thread_local Index threadIdx;
struct Barrier {
  std::mutex mutex;
  std::condition_variable changed;
  int waiting = 0, phase = 0;
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const int entered = phase;
    if (++waiting == kBlock) {
      waiting = 0, ++phase;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return phase != entered; });
  }
};
static Barrier barrier;
inline void __syncthreads() { if (kBlock > 1) barrier.wait(); }
"""
# Pairs of 16-bit numbers in a word.
PAIRS = """
template <typename Type>
struct Numbers {
  using Storage = uint16_t;
  static uint32_t pack(float low, float high) {
    return Type::from_float(low) | uint32_t(Type::from_float(high)) << 16;
  }
};
"""
# types.cuh and fp8.cuh; needs a `Numbers` such as that of PAIRS.
TYPES = """
inline uint32_t join(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }
inline void split(uint32_t word, uint16_t& low, uint16_t& high) { low = word, high = word >> 16; }
inline float saturated(float x, float largest) {
  return x > largest ? largest : x < -largest ? -largest : x;
}
struct Half : Numbers<Half> {
  static constexpr int kMantissaBits = 10;
  static float to_float(uint16_t x) { return bits_of<_Float16>(x); }
  static uint16_t from_float(float x) {
    return x == x ? bits_of<uint16_t>(static_cast<_Float16>(saturated(x, 65504.f))) : 0x7fff;
  }
  static uint32_t from_halves(uint32_t word) { return word; }
  // Rounded once: a double has the product, and the sum but for numbers far apart.
  static uint16_t fma(uint16_t a, uint16_t b, uint16_t c) {
    const double sum = double(to_float(a)) * to_float(b) + to_float(c);
    return sum == sum ? bits_of<uint16_t>(static_cast<_Float16>(sum)) : 0x7fff;
  }
  static uint32_t add(uint32_t a, uint32_t b) { return fma(a, 0x3c003c00u, b); }
  static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return fma(uint16_t(a), uint16_t(b), uint16_t(c)) |
           uint32_t(fma(uint16_t(a >> 16), uint16_t(b >> 16), uint16_t(c >> 16))) << 16;
  }
};
struct BFloat16 : Numbers<BFloat16> {
  static constexpr int kMantissaBits = 7;
  static float to_float(uint16_t x) { return bits_of<float>(uint32_t(x) << 16); }
  static uint16_t from_float(float x) { return rounded(saturated(x, bits_of<float>(0x7f7f0000))); }
  static uint32_t from_halves(uint32_t word) {
    return join(rounded(Half::to_float(word)), rounded(Half::to_float(word >> 16)));
  }
  static uint16_t rounded(float x) {
    const uint32_t bits = bits_of<uint32_t>(x);
    return x == x ? bits + 0x7fff + (bits >> 16 & 1) >> 16 : 0x7fff;
  }
};
struct Float {
  using Storage = float;
  static float from_float(float x) { return saturated(x, 3.40282347e38f); }
};
enum class FloatCode : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };
inline float load_float(const void* base, int64_t i, FloatCode code) {
  switch (code) {
    case FloatCode::kFloat16: return Half::to_float(static_cast<const uint16_t*>(base)[i]);
    case FloatCode::kBFloat16: return BFloat16::to_float(static_cast<const uint16_t*>(base)[i]);
    case FloatCode::kFloat32: return static_cast<const float*>(base)[i];
    default: return static_cast<const double*>(base)[i];
  }
}
inline int64_t load_integer(const void* base, int64_t i, bool is_int64) {
  return is_int64 ? static_cast<const int64_t*>(base)[i] : static_cast<const int32_t*>(base)[i];
}
// Types of caches, by a function of a byte.
template <typename Type>
struct Bytes {
  using Storage = uint8_t;
  static uint32_t at(uint32_t bytes, int i, int j) {
    return join(Type::half(bytes >> 8 * i), Type::half(bytes >> 8 * j));
  }
  static uint2 to_halves(uint32_t b) { return {at(b, 0, 2), at(b, 1, 3)}; }
  static uint2 to_pairs(uint32_t b) { return {at(b, 0, 1), at(b, 2, 3)}; }
};
struct Float8E4M3 : Bytes<Float8E4M3> {
  static constexpr int kMantissaBits = 3;
  static uint16_t half(uint8_t b) {
    const bool is_nan = (b & 0x7f) == 0x7f;
    const float size = Half::to_float((b & 0x7f) << 7) * 256.f;
    return (is_nan ? 0x7fff : Half::from_float(size)) | (b & 0x80) << 8;
  }
};
struct Float8E5M2 : Bytes<Float8E5M2> {
  static uint16_t half(uint8_t b) { return b << 8; }
};
struct Int8 : Bytes<Int8> {
  static uint16_t half(uint8_t b) { return Half::from_float(int8_t(b)); }
};
"""
# Where convert.cuh asks for a later architecture.
CONVERSIONS = """
constexpr int kArch = 800;
uint32_t cvt_e4m3x2(float low, float high);
uint32_t cvt_e5m2x2(float low, float high);
"""


def with_headers(text: str, known: Collection[str]) -> str:
    """Replace includes by the headers' text, each once, but for those that are ``known``."""
    included = set(known)

    def text_of(match: re.Match[str]) -> str:
        name = match[1]
        if name is None or name in included:
            return ""
        included.add(name)
        return pattern.sub(text_of, (TEMPLATES / f"include/jitattn/{name}.cuh").read_text())

    pattern = re.compile(r"#(?:include \"jitattn/(\w+)\.cuh\"|pragma .*|line .*)")
    return pattern.sub(text_of, text)


def library_of(
    text: str,
    *options: str,
    begin: str = "",
    needs: Sequence[ctypes.CDLL] = (),
) -> ctypes.CDLL:
    """Compile a program, once a run, and load it; skip the test without a compiler.

    Products and sums are rounded one by one, as they are written. ``begin`` is text that many
    programs begin with: g++ reads it once a run. The program calls the libraries that it ``needs``.
    """
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run kernels on the CPU")
    # Else libraries share the statics of inline functions by name, whose sizes differ by kernel.
    is_gnu = Path(compiler).name == "g++"
    apart = ["-fno-gnu-unique"] if is_gnu else []
    # A fortified longjmp() takes the jump to another stack for an error.
    always = [*apart, "-Og", "-w", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fPIC", "-pthread"]
    always.append("-fvisibility-inlines-hidden")  # so that a library calls its own, not its user's
    command = [compiler, "-std=c++17", *always, *options]
    if begin and is_gnu:
        command += ["-include", str(_precompiled(command, begin))]
    else:
        text = begin + text
    command += ["-shared", "-x", "c++", "-", "-x", "none", *(library._name for library in needs)]
    return ctypes.CDLL(str(_built(command, text)))


def _precompiled(command: Sequence[str], text: str) -> Path:
    """A header beside which g++ finds what it made of it."""

    def write(path: Path) -> None:
        path.write_text(text)

    header = shared_file(f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.hpp", write)
    _built([*command, "-x", "c++-header", str(header)], "", f"{header.name}.gch")
    return header


def _built(command: Sequence[str], text: str, name: str = "") -> Path:
    """What a compiler makes of a text, once a run."""

    def make(path: Path) -> None:
        done = subprocess.run([*command, "-o", path], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]

    digest = hashlib.sha256("\n".join((*command, text)).encode()).hexdigest()[:32]
    return shared_file(name or f"{digest}.so", make)
