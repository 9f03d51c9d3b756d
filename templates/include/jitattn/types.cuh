// Element types as raw bits: storage, conversion to and from float, and the product they have.
// A float becomes the nearest number of a type, ties to even, and the largest finite one where none
// is near enough, infinities included; NaN stays NaN. Definition: jitattn/tensors/quantization.py.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

// Two 16-bit numbers in a word. The compiler follows them through moves, not through shifts.
__device__ __forceinline__ uint32_t join(uint16_t low, uint16_t high) {
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}
__device__ __forceinline__ void split(uint32_t word, uint16_t& low, uint16_t& high) {
  asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(word));
}

struct Half {
  using Storage = uint16_t;
  static constexpr int kMantissaBits = 10;
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ __forceinline__ uint16_t from_float(float value) {
    return static_cast<uint16_t>(pack(value, 0.f));
  }
  // `low` lands in the low half of the word.
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  static __device__ __forceinline__ uint32_t from_halves(uint32_t word) { return word; }
  // Product of two numbers in a word each; subnormal ones count.
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t word;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
  }
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t word;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
  }
  // a * b + c of two numbers in a word each, rounded once.
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t word;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
    return word;
  }
  // d[16 x 8] += a[16 x 16] b[16 x 8], accumulated in float.
  static __device__ __forceinline__ void mma(float (&d)[4], uint4 a, uint2 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr int kMantissaBits = 7;
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    return __int_as_float(static_cast<int>(static_cast<uint32_t>(bits) << 16));
  }
  static __device__ __forceinline__ uint16_t from_float(float value) {
    return static_cast<uint16_t>(pack(value, 0.f));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  // Conversion of two Half in a word; exact for values of few bits and infinities.
  static __device__ __forceinline__ uint32_t from_halves(uint32_t word) {
    uint16_t low, high;
    split(word, low, high);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(word)
        : "f"(Half::to_float(high)), "f"(Half::to_float(low)));
    return word;
  }
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t word;
    // Before compute capability 9.0 there is no other product than that plus -0.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(0x80008000u));
    return word;
  }
  static __device__ __forceinline__ void mma(float (&d)[4], uint4 a, uint2 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
};

struct Float {
  using Storage = float;
  static __device__ __forceinline__ float to_float(float value) { return value; }
  static __device__ __forceinline__ float from_float(float value) {
    constexpr float kLargest = 3.40282347e38f;
    return value > kLargest ? kLargest : value < -kLargest ? -kLargest : value;
  }
};

// Codes of the types a caller may choose at launch. Twin: jitattn/spec/params.py.
enum class FloatCode : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// Reads one number of a type known at launch: for vectors too short to deserve a kernel of their
// own.
__device__ __forceinline__ float load_float(const void* base, int64_t element, FloatCode code) {
  switch (code) {
    case FloatCode::kFloat16:
      return Half::to_float(static_cast<const uint16_t*>(base)[element]);
    case FloatCode::kBFloat16:
      return BFloat16::to_float(static_cast<const uint16_t*>(base)[element]);
    case FloatCode::kFloat32:
      return static_cast<const float*>(base)[element];
    default:
      return static_cast<float>(static_cast<const double*>(base)[element]);
  }
}

// Reads one integer of a vector whose width is known at launch.
__device__ __forceinline__ int64_t load_integer(const void* base, int64_t element, bool is_int64) {
  return is_int64 ? static_cast<const int64_t*>(base)[element]
                  : static_cast<const int32_t*>(base)[element];
}

}  // namespace jitattn
