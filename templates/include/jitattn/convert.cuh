// Conversion of a float to the types that caches store: the nearest value, ties to even, and the
// largest finite one where none is near enough, infinities included. NaN stays NaN where a type has
// one, and is 0 in the others. Twin: jitattn/tensors/quantization.py, which is the definition.
#pragma once

#include "jitattn/blocks.cuh"
#include "jitattn/fp8.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/ptx.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

// The magnitude of `value` as the code of a type with so many bits of mantissa and this exponent
// bias. NaN has none.
template <int kMantissaBits, int kBias, uint32_t kLargestCode>
__device__ __forceinline__ uint32_t round_magnitude(float value) {
  constexpr int kShift = 23 - kMantissaBits;
  const uint32_t bits = __float_as_uint(fabsf(value));
  const uint32_t half = (1u << (kShift - 1)) - 1 + (bits >> kShift & 1);  // up, from odd to even
  const uint32_t normal = (bits + half >> kShift) - (uint32_t(127 - kBias) << kMantissaBits);
  // Below the smallest normal number all steps are the same: that of floats near this one.
  const float base = static_cast<float>(1u << (24 - kBias - kMantissaBits));
  const uint32_t subnormal = __float_as_uint(fabsf(value) + base) - __float_as_uint(base);
  const uint32_t code = bits < uint32_t(128 - kBias) << 23 ? subnormal : normal;
  return code < kLargestCode ? code : kLargestCode;
}

// The byte of an 8-bit float.
template <int kMantissaBits, int kBias, uint32_t kLargestCode>
__device__ __forceinline__ uint32_t round_to_float8(float value) {
  const uint32_t magnitude = round_magnitude<kMantissaBits, kBias, kLargestCode>(value);
  const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
  return value == value ? magnitude | sign : 0x7fu;
}

__device__ __forceinline__ uint32_t to_e4m3(float value) {
  return round_to_float8<3, 7, 0x7e>(value);
}
__device__ __forceinline__ uint32_t to_e5m2(float value) {
  return round_to_float8<2, 15, 0x7b>(value);
}
__device__ __forceinline__ uint32_t to_int8(float value) {
  const float clamped = fminf(fmaxf(value, -128.f), 127.f);  // -128 for NaN
  return value == value ? static_cast<uint32_t>(__float2int_rn(clamped)) & 0xff : 0;
}
// Four bits.
__device__ __forceinline__ uint32_t to_e2m1(float value) {
  const uint32_t magnitude = round_magnitude<1, 1, 7>(value);
  const uint32_t sign = __float_as_uint(value) >> 28 & 8;
  return value == value ? magnitude | sign : 0;
}

// Two numbers as neighbours: a word of 16-bit types, the low half of one of 8-bit types.
template <typename Type>
__device__ __forceinline__ uint32_t pack_saturated(float low, float high) {
  if constexpr (kIsSame<Type, Half> || kIsSame<Type, BFloat16>) {
    return Type::pack(low, high);
  } else if constexpr (kIsSame<Type, Float8E4M3>) {
    if constexpr (kArch >= 890) return cvt_e4m3x2(low, high);
    return to_e4m3(low) | to_e4m3(high) << 8;
  } else if constexpr (kIsSame<Type, Float8E5M2>) {
    if constexpr (kArch >= 890) return cvt_e5m2x2(low, high);
    return to_e5m2(low) | to_e5m2(high) << 8;
  } else {
    static_assert(kIsSame<Type, Int8>, "blocks have a scale: pack_e2m1, pack_int4");
    return to_int8(low) | to_int8(high) << 8;
  }
}

// The scale of a block whose largest magnitude is `largest`, as the byte of an e4m3: the sixth part
// of it, to the nearest. NaN makes the whole block NaN.
__device__ __forceinline__ uint32_t block_scale(float largest) {
  return to_e4m3(largest / Float4E2M1::kLargest);
}

__device__ __forceinline__ float e4m3_to_float(uint32_t byte) {
  return Half::to_float(static_cast<uint16_t>(Float8E4M3::to_halves(byte).x));
}
__device__ __forceinline__ float e5m2_to_float(uint32_t byte) {
  return Half::to_float(static_cast<uint16_t>(Float8E5M2::to_halves(byte).x));
}
__device__ __forceinline__ float int8_to_float(uint32_t byte) {
  return static_cast<float>(static_cast<int8_t>(byte));
}
// Of four bits, which are the exponent and the highest bit of the mantissa of a Half.
__device__ __forceinline__ float e2m1_to_float(uint32_t code) {
  return 16384.f * Half::to_float(static_cast<uint16_t>((code & 7) << 9 | (code & 8) << 12));
}

// Two numbers of a block as a byte. `scale` is the block's, as a float.
__device__ __forceinline__ uint32_t pack_e2m1(float low, float high, float scale) {
  // A block whose scale is too small to be stored is 0.
  if (scale == 0.f) return 0;
  return to_e2m1(low / scale) | to_e2m1(high / scale) << 4;
}

// Largest magnitude of a value of int4: with a scale that is rounded up, values are still Halves.
constexpr float kLargestInt4 = 57344.f;

// The scale of a block of int4 and its zero, as the low and the high half of a word, for the largest
// value and the largest negated one. NaN makes the whole block NaN.
__device__ __forceinline__ uint32_t affine_scale(float largest, float largest_negated) {
  if (largest != largest || largest_negated != largest_negated) return 0x7fff7fffu;
  const float high = fminf(fmaxf(largest, -kLargestInt4), kLargestInt4);
  const float low = -fminf(fmaxf(largest_negated, -kLargestInt4), kLargestInt4);
  return Half::pack((high - low) / Int4<0>::kLargest, low + 0.f);  // a zero of -0 is 0
}

// A code of four bits, of a block's scale and zero.
__device__ __forceinline__ uint32_t to_int4(float value, float scale, float zero) {
  const float steps = __fadd_rn(value, -zero) / scale;
  return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(steps, 0.f), Int4<0>::kLargest)));
}

// Two numbers of a block as a byte. A block of NaN, or of one value, has codes of 0.
__device__ __forceinline__ uint32_t pack_int4(float low, float high, float scale, float zero) {
  if (!(scale > 0.f)) return 0;
  return to_int4(low, scale, zero) | to_int4(high, scale, zero) << 4;
}

}  // namespace jitattn
