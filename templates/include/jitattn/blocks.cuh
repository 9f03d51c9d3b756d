// Types of caches with four bits an element, two in a byte, the even one in the low half. Blocks of
// elements along a row share what turns them into values, which lies in memory of its own.
#pragma once

#include "jitattn/prelude.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; the elements of a block share a scale of type
// e4m3.
struct Float4E2M1 {
  using Storage = uint8_t;
  static constexpr float kLargest = 6.f;
};

// Codes from 0 to 15. kDims of them, or those of a row (0), share a scale and a zero, a Half each,
// one after the other: a value is code * scale + zero.
template <int kDims>
struct Int4 {
  using Storage = uint8_t;
  static constexpr float kLargest = 15.f;
};

// Blocks of kBlockDims elements (0: a row), with so many bytes of scales each.
template <int kBlockDims, int kScaleBytes>
struct Blocks {
  static constexpr bool kExist = true;
  static constexpr bool kHaveZeros = kScaleBytes == 4;
  static constexpr int kDims = kBlockDims;

  // Whether a block begins at `dim`.
  static __device__ constexpr bool begins(int dim) {
    return kBlockDims == 0 ? dim == 0 : dim % kDivisor == 0;
  }
  // Byte of a row's scales with which those of the block of `dim` begin.
  static __device__ constexpr int place(int dim) {
    return kBlockDims == 0 ? 0 : dim / kDivisor * kScaleBytes;
  }
  // Bytes of the scales of a row.
  static __device__ constexpr int bytes(int dim) {
    return kBlockDims == 0 ? kScaleBytes : place(dim);
  }

 private:
  static constexpr int kDivisor = kBlockDims == 0 ? 1 : kBlockDims;
};

// The blocks of a type of caches; most have none.
template <typename Type>
struct BlocksOf : Blocks<0, 0> {
  static constexpr bool kExist = false;
};
template <>
struct BlocksOf<Float4E2M1> : Blocks<16, 1> {};
template <int kDims>
struct BlocksOf<Int4<kDims>> : Blocks<kDims, 4> {};

// The low half of a word twice, and the high one: products of halves take either where it is.
__device__ __forceinline__ uint32_t low_twice(uint32_t word) {
  uint16_t low, high;
  split(word, low, high);
  return join(low, low);
}
__device__ __forceinline__ uint32_t high_twice(uint32_t word) {
  uint16_t low, high;
  split(word, low, high);
  return join(high, high);
}
// The low halves of two words, and the high ones.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

// Eight elements in their order, of pairs of elements i and i + 4.
__device__ __forceinline__ uint4 in_order(const uint32_t (&pairs)[4]) {
  return {low_halves(pairs[0], pairs[1]), low_halves(pairs[2], pairs[3]),
          high_halves(pairs[0], pairs[1]), high_halves(pairs[2], pairs[3])};
}

}  // namespace jitattn
