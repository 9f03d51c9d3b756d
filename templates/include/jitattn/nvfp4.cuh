// Blocks of NVFP4 on their way to the 16-bit types of products: numbers of four bits and scales of
// type e4m3.
#pragma once

#include "jitattn/blocks.cuh"
#include "jitattn/fp8.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// Whether numbers of four bits go by e4m3, which instructions turn into Half.
template <typename Type>
constexpr bool kGoesByE4M3 = Type::kMantissaBits == 10 && kArch >= 890;

// Inverse factor of the products below, whose at most six significant bits stay exact: numbers of
// four bits are so much less as those of e4m3. Else a scale of 448 times the factor that makes a
// subnormal of a 16-bit type a number would be none, and times this much less it is one.
template <typename Type>
constexpr float kBlockFactor = kGoesByE4M3<Type> ? 64.f : 128.f;

// Elements i and i + 4 of the eight in a word, too small by a factor: the three bits of a magnitude
// become the lowest ones of the exponent and the highest one of the mantissa.
template <typename Type, int kElement>
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t word) {
  constexpr int kPlace = Type::kMantissaBits - 1, kShift = kPlace - 4 * kElement;
  const uint32_t shifted =
      kShift >= 0 ? word << (kShift >= 0 ? kShift : 0) : word >> (kShift >= 0 ? 0 : -kShift);
  const uint32_t signs = word << (12 - 4 * kElement) & 0x80008000u;
  return signs | shifted & 0x00070007u << kPlace;
}

// Two scales, the bytes of the low half of a word, divided by kBlockFactor and by the factor that
// e2m1_pair() leaves out.
template <typename Type>
__device__ __forceinline__ uint32_t block_scale_pair(uint32_t bytes) {
  if constexpr (kGoesByE4M3<Type>) return Float8E4M3::to_pairs(bytes).x;
  // 2**7 of Half, whose subnormals are 2**-14 times what they look like; 2**119 of BFloat16.
  constexpr uint32_t kFactors = Type::kMantissaBits == 10 ? 0x58005800u : 0x7b007b00u;
  return Type::mul(Type::from_halves(Float8E4M3::to_pairs(bytes).x), kFactors);
}

// Four pairs of numbers: elements i and i + 4 of a word, times a pair of scales.
template <typename Type>
struct BlockPairs {
  uint32_t words[4];

  __device__ __forceinline__ BlockPairs(uint32_t elements, uint32_t scales) {
    if constexpr (kGoesByE4M3<Type>) {
      // Elements i and i + 4 in bytes side by side; magnitudes as the lowest bits of e4m3's
      // exponent and the highest one of its mantissa.
      const uint32_t bytes = __byte_perm(elements, 0, 0x3120);
      constexpr uint32_t kSigns = 0x80808080u, kMagnitudes = 0x1c1c1c1cu;
      const uint2 even = Float8E4M3::to_pairs(bytes << 4 & kSigns | bytes << 2 & kMagnitudes);
      const uint2 odd = Float8E4M3::to_pairs(bytes & kSigns | bytes >> 2 & kMagnitudes);
      words[0] = Type::mul(even.x, scales);
      words[1] = Type::mul(odd.x, scales);
      words[2] = Type::mul(even.y, scales);
      words[3] = Type::mul(odd.y, scales);
      return;
    }
    words[0] = Type::mul(e2m1_pair<Type, 0>(elements), scales);
    words[1] = Type::mul(e2m1_pair<Type, 1>(elements), scales);
    words[2] = Type::mul(e2m1_pair<Type, 2>(elements), scales);
    words[3] = Type::mul(e2m1_pair<Type, 3>(elements), scales);
  }
};

// Eight elements of a word in their order.
template <typename Type>
__device__ __forceinline__ uint4 block_eight(uint32_t elements, uint32_t scales) {
  return in_order(BlockPairs<Type>(elements, scales).words);
}

}  // namespace jitattn
