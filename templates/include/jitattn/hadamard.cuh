// Products of rows and Hadamard matrices, by threads that have 16 elements of a row each.
// Definition: jitattn/kernels/preprocess/hadamard.py.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

// Products with Sylvester's matrix of order kCount, of each kCount elements side by side.
template <int kCount>
__device__ __forceinline__ void add_butterflies(float (&x)[16]) {
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b, x[i + step] = a - b;
    }
  }
}

// Likewise of elements with the same index in kCount lanes side by side.
template <int kCount>
__device__ __forceinline__ void add_lane_butterflies(float (&x)[16], int32_t lane, uint32_t mask) {
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
    const float sign = lane & step ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float other = __shfl_xor_sync(mask, x[i], step);
      x[i] = other + sign * x[i];
    }
  }
}

// Sums of kOrder groups of kPower elements, with signs: bit j of signs[i] is set where sum i, of a
// thread's 16 / kPower, takes group j away.
template <int kOrder, int kPower>
__device__ __forceinline__ void add_groups(float (&sums)[16], const float* row,
                                           const uint64_t (&signs)[16 / kPower]) {
  static_assert(kPower % 4 == 0 && 16 % kPower == 0, "a thread has whole groups, of vectors");
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = 0.f;
#pragma unroll 4
  for (int j = 0; j < kOrder; ++j) {
    float4 vectors[kPower / 4];
#pragma unroll
    for (int i = 0; i < kPower / 4; ++i) {
      vectors[i] = reinterpret_cast<const float4*>(row + j * kPower)[i];
    }
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const uint32_t bit = static_cast<uint32_t>(signs[i / kPower] >> j) << 31;
      const float sign = __uint_as_float(0x3f800000u | bit);
      const float4 vector = vectors[i % kPower / 4];
      sums[i] += sign * vector.x, sums[i + 1] += sign * vector.y;
      sums[i + 2] += sign * vector.z, sums[i + 3] += sign * vector.w;
    }
  }
}

}  // namespace jitattn
