// Blocks of int4 on their way to the 16-bit types of products: codes of four bits, scales and zeros.
#pragma once

#include "jitattn/blocks.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// Codes i and i + 4 of the eight in a word, as Halves.
template <int kElement>
__device__ __forceinline__ uint32_t code_pair(uint32_t word) {
  // A code c is the lowest four bits of the Half 1024 + c, or the next ones of 1024 + 16 c.
  constexpr uint32_t kThousands = 0x64006400u;
  constexpr bool kIsLow = kElement % 2 == 0;
  constexpr uint32_t kFactor = kIsLow ? 0x3c003c00u : 0x2c002c00u;  // 1; 1 / 16
  constexpr uint32_t kOffset = kIsLow ? 0xe400e400u : 0xd400d400u;  // -1024; -64
  const uint32_t shifted = kElement < 2 ? word : word >> 8;
  return Half::fma(shifted & (kIsLow ? 0x000f000fu : 0x00f000f0u) | kThousands, kFactor, kOffset);
}

// Four pairs of values: elements i and i + 4 of a word, of a pair of scales and one of zeros. Each
// is rounded once to Half.
template <typename Type>
struct AffinePairs {
  uint32_t words[4];

  __device__ __forceinline__ AffinePairs(uint32_t elements, uint32_t scales, uint32_t zeros) {
    words[0] = Type::from_halves(Half::fma(code_pair<0>(elements), scales, zeros));
    words[1] = Type::from_halves(Half::fma(code_pair<1>(elements), scales, zeros));
    words[2] = Type::from_halves(Half::fma(code_pair<2>(elements), scales, zeros));
    words[3] = Type::from_halves(Half::fma(code_pair<3>(elements), scales, zeros));
  }
};

// Eight elements of a word in their order. `scale` is the block's, and above it the zero.
template <typename Type>
__device__ __forceinline__ uint4 affine_eight(uint32_t elements, uint32_t scale) {
  return in_order(AffinePairs<Type>(elements, low_twice(scale), high_twice(scale)).words);
}

}  // namespace jitattn
