// Blocks of int4 on their way to the 16-bit types of products: codes of four bits, scales and zeros.
#pragma once

#include "jitattn/blocks.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// Codes i and i + 4 of the eight in a word, as Halves. With few constants it takes a shift more, and
// three registers less of a loop.
template <int kElement, bool kHasFewConstants>
__device__ __forceinline__ uint32_t code_pair(uint32_t word) {
  // A code c is the lowest four bits of the Half 1024 + c, or the next ones of 1024 + 16 c.
  constexpr uint32_t kThousands = 0x64006400u;
  const uint32_t shifted = word >> (kHasFewConstants ? 4 * kElement : kElement / 2 * 8);
  if constexpr (kHasFewConstants || kElement % 2 == 0) {
    return Half::add(shifted & 0x000f000fu | kThousands, 0xe400e400u);  // -1024
  }
  return Half::fma(shifted & 0x00f000f0u | kThousands, 0x2c002c00u, 0xd400d400u);  // 1 / 16, -64
}

// Four pairs of values: elements i and i + 4 of a word, of a pair of scales and one of zeros. Each
// is rounded once to Half.
template <typename Type, bool kHasFewConstants = false>
struct AffinePairs {
  uint32_t words[4];

  __device__ __forceinline__ AffinePairs(uint32_t elements, uint32_t scales, uint32_t zeros) {
    words[0] = value_pair<0>(elements, scales, zeros);
    words[1] = value_pair<1>(elements, scales, zeros);
    words[2] = value_pair<2>(elements, scales, zeros);
    words[3] = value_pair<3>(elements, scales, zeros);
  }

 private:
  template <int kElement>
  static __device__ __forceinline__ uint32_t value_pair(uint32_t elements, uint32_t scales,
                                                        uint32_t zeros) {
    const uint32_t codes = code_pair<kElement, kHasFewConstants>(elements);
    return Type::from_halves(Half::fma(codes, scales, zeros));
  }
};

// Eight elements of a word in their order. `scale` is the block's, and above it the zero.
template <typename Type>
__device__ __forceinline__ uint4 affine_eight(uint32_t elements, uint32_t scale) {
  return in_order(AffinePairs<Type>(elements, low_twice(scale), high_twice(scale)).words);
}

}  // namespace jitattn
