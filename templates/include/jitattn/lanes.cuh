// Lanes and warps of a CTA, loops over registers, rows in shared memory.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

__device__ __forceinline__ int lane_idx() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_idx() { return threadIdx.x / kWarpSize; }

// A value that is the same in all lanes, as the compiler sees: it has no other code for when it is not.
__device__ __forceinline__ int32_t uniform(int32_t value) {
  return __shfl_sync(0xffffffff, value, 0);
}

// The first of two types, or the second.
template <bool kIsFirst, typename First, typename Second>
struct Choice {
  using Type = First;
};
template <typename First, typename Second>
struct Choice<false, First, Second> {
  using Type = Second;
};

// Calls body(0) ... body(kCount - 1), unrolled: arrays indexed inside stay in registers.
template <int kCount, typename Body>
__device__ __forceinline__ void for_each(Body body) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) body(i);
}

// A row in shared memory, padded to an odd number of 16-byte vectors: that puts the eight rows that
// ldmatrix reads together into different banks.
__device__ constexpr int padded_row(int num_bytes) { return ((num_bytes + 15) / 16 | 1) * 16; }

}  // namespace jitattn
