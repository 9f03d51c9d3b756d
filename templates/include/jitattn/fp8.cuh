// Element types of 8-bit caches, and their way to the 16-bit types of products.
#pragma once

#include "jitattn/blocks.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// Every value is one of Half and of BFloat16 as well, NaN and Inf of floats included.
// `to_halves` returns the values of bytes 0 and 2 of a word, and of bytes 1 and 3; `to_pairs` of
// bytes 0 and 1, and of 2 and 3.
struct Float8E5M2 {
  using Storage = uint8_t;
  static __device__ __forceinline__ uint2 to_halves(uint32_t bytes) {
    return {bytes << 8 & 0xff00ff00u, bytes & 0xff00ff00u};  // the high byte of Half
  }
  static __device__ __forceinline__ uint2 to_pairs(uint32_t bytes) {
    return {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};
  }
};

struct Float8E4M3 {
  using Storage = uint8_t;
  static constexpr int kMantissaBits = 3;
  static __device__ __forceinline__ uint2 to_halves(uint32_t bytes) {
    if constexpr (kArch < 890) return {shift(bytes << 8), shift(bytes)};
    uint16_t b0, b1, b2, b3;
    const uint2 pairs = convert(bytes);
    split(pairs.x, b0, b1);
    split(pairs.y, b2, b3);
    return {join(b0, b2), join(b1, b3)};
  }
  static __device__ __forceinline__ uint2 to_pairs(uint32_t bytes) {
    if constexpr (kArch < 890) {
      return {shift(__byte_perm(bytes, 0, 0x1404)), shift(__byte_perm(bytes, 0, 0x3424))};
    }
    return convert(bytes);
  }

 private:
  // The two bytes of the low half, and of the high one, which the instruction takes where it is.
  static __device__ __forceinline__ uint2 convert(uint32_t bytes) {
    uint16_t low, high;
    split(bytes, low, high);
    return {convert_half(low), convert_half(high)};
  }
  static __device__ __forceinline__ uint32_t convert_half(uint16_t bytes) {
    uint32_t word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(bytes));
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

// From -128 to 127.
struct Int8 {
  using Storage = uint8_t;
  static __device__ __forceinline__ uint2 to_halves(uint32_t bytes) {
    const uint32_t shifted = bytes ^ kSigns;
    return {subtract(__byte_perm(shifted, kThousands, 0x4240)),
            subtract(__byte_perm(shifted, kThousands, 0x4341))};
  }
  static __device__ __forceinline__ uint2 to_pairs(uint32_t bytes) {
    const uint32_t shifted = bytes ^ kSigns;
    return {subtract(__byte_perm(shifted, kThousands, 0x4140)),
            subtract(__byte_perm(shifted, kThousands, 0x4342))};
  }

 private:
  // A byte b from 0 to 255 below the high byte of 1024 is the Half 1024 + b.
  static constexpr uint32_t kSigns = 0x80808080u, kThousands = 0x64646464u;
  static __device__ __forceinline__ uint32_t subtract(uint32_t word) {
    uint32_t difference;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(word), "r"(0x64806480u));  // 1024 + 128
    return difference;
  }
};

// Whether an instruction converts two bytes.
template <typename Type>
constexpr bool kDequantisesPairs = false;
template <>
constexpr bool kDequantisesPairs<Float8E4M3> = kArch >= 890;

// Whether a type has an element in each byte.
template <typename Type>
constexpr bool kHasBytes = sizeof(typename Type::Storage) == 1 && !BlocksOf<Type>::kExist;

// The values of bytes 0 and 1 of a word, and of bytes 2 and 3, as pairs of a 16-bit type.
template <typename To, typename From>
__device__ __forceinline__ uint2 unpack_pairs(uint32_t bytes) {
  // Discarded here, since callers that are no templates compile what they don't use.
  if constexpr (!kHasBytes<From>)
    return {};
  else {
    const uint2 halves = From::to_pairs(bytes);
    return {To::from_halves(halves.x), To::from_halves(halves.y)};
  }
}

// The values of bytes 0 and 2 of a word, and of bytes 1 and 3, as pairs of a 16-bit type.
template <typename To, typename From>
__device__ __forceinline__ uint2 unpack(uint32_t bytes) {
  if constexpr (!kHasBytes<From>)
    return {};
  else {
    // Bytes change places before the conversion, of two neighbours at a time; what is to become
    // BFloat16 goes one by one in any case.
    constexpr bool kByPairs = To::kMantissaBits == 10 && kDequantisesPairs<From>;
    const uint2 halves =
        kByPairs ? From::to_pairs(__byte_perm(bytes, 0, 0x3120)) : From::to_halves(bytes);
    return {To::from_halves(halves.x), To::from_halves(halves.y)};
  }
}

}  // namespace jitattn
