// Element types as raw bits: storage, conversion to and from float, and the product they have.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

struct Half {
  using Storage = uint16_t;
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ __forceinline__ uint16_t from_float(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  // `low` lands in the low half of the word.
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  static __device__ __forceinline__ uint32_t from_halves(uint32_t word) { return word; }
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
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    return __int_as_float(static_cast<int>(static_cast<uint32_t>(bits) << 16));
  }
  static __device__ __forceinline__ uint16_t from_float(float value) {
    return static_cast<uint16_t>(pack(value, 0.f));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  // Of two Half in a word; exact for what has few bits.
  static __device__ __forceinline__ uint32_t from_halves(uint32_t word) {
    return pack(Half::to_float(word & 0xffff), Half::to_float(word >> 16));
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
  static __device__ __forceinline__ float from_float(float value) { return value; }
};

// Types of caches. Every value is one of Half and of BFloat16 as well, NaN and Inf included.
// `to_halves` returns the values of bytes 0 and 2 of a word, and of bytes 1 and 3.
struct Float8E5M2 {
  using Storage = uint8_t;
  static __device__ __forceinline__ uint2 to_halves(uint32_t bytes) {
    return {bytes << 8 & 0xff00ff00u, bytes & 0xff00ff00u};  // the high byte of Half
  }
};

struct Float8E4M3 {
  using Storage = uint8_t;
  static __device__ __forceinline__ uint2 to_halves(uint32_t bytes) {
    if constexpr (kArch < 890) return {shift(bytes << 8), shift(bytes)};
    const uint32_t low = convert(bytes), high = convert(bytes >> 16);
    return {low & 0xffff | high << 16, low >> 16 | high & 0xffff0000u};
  }

 private:
  // The two bytes of the low half.
  static __device__ __forceinline__ uint32_t convert(uint32_t bytes) {
    uint32_t word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(static_cast<uint16_t>(bytes)));
    return word;
  }
  // The high byte of each half: its exponent has another bias than that of Half. What would become
  // 480 is NaN.
  static __device__ __forceinline__ uint32_t shift(uint32_t bytes) {
    const uint32_t magnitudes = bytes >> 1 & 0x3f803f80u;
    const uint32_t largest = 0x3f003f00u, factor = 0x5c005c00u;  // 448 / 2**8, 2**8
    uint32_t word, is_nan;
    asm("mul.rn.f16x2 %0, %1, %2;"
        : "=r"(word)
        : "r"(magnitudes | bytes & 0x80008000u), "r"(factor));
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(is_nan) : "r"(magnitudes), "r"(largest));
    return word | is_nan;
  }
};

// The values of bytes 0 and 2 of a word, and of bytes 1 and 3, as pairs of a 16-bit type.
template <typename To, typename From>
__device__ __forceinline__ uint2 unpack(uint32_t bytes) {
  // Discarded here, since callers that are no templates compile what they don't use.
  if constexpr (sizeof(typename From::Storage) > 1)
    return {};
  else {
    const uint2 halves = From::to_halves(bytes);
    return {To::from_halves(halves.x), To::from_halves(halves.y)};
  }
}

// Codes of the types a caller may choose at launch. Twin: jitattn/params.py.
enum class FloatCode : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// Reads one number of a type known at launch: for vectors too short to deserve a kernel of their own.
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
