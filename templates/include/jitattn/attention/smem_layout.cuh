// Shared memory layout of a warp's slice of tokens.
//
// Copies of 16 bytes leave rows one after the other, padded. TMA tiles of a tensor map leave
// segments of kSegmentBytes of kTmaTokens rows each, segment after segment and TMA tile after TMA
// tile, with the vectors of a segment's row exchanged by the hardware's 128-byte swizzle: vector v
// of row r lies at v ^ r % 8. Either way the eight rows that ldmatrix reads together lie in
// different banks.
#pragma once

#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

template <int kDim>
struct SmemLayout {
  static constexpr int kRowBytes = stored_bytes(kDim);
  static constexpr int kSegments = kRowBytes / kSegmentBytes;
  static constexpr int kTmaBytes = kTmaTokens * kRowBytes;

  // Address of vector `vector`, 0 or 1, of row `row`; the slice begins at a multiple of 8 rows.
  static __device__ __forceinline__ uint32_t place(uint32_t smem, int row, int vector) {
    if constexpr (!kUsesTma) return smem + row * padded_row(kRowBytes) + vector * 16;
    return smem + row / kTmaTokens * kTmaBytes + row % kTmaTokens * kSegmentBytes +
           (vector ^ row % 8) * 16;
  }

  // Address `rows` rows, a multiple of 8, and `bytes` bytes of whole products beyond a place().
  static __device__ __forceinline__ uint32_t advance(uint32_t place, int rows, int bytes) {
    if constexpr (!kUsesTma) return place + rows * padded_row(kRowBytes) + bytes;
    return (place ^ bytes % kSegmentBytes) + rows / kTmaTokens * kTmaBytes +
           (rows % kTmaTokens + bytes / kSegmentBytes * kTmaTokens) * kSegmentBytes;
  }

  // Zeros in the rows outside [first, last), where a NaN may lie: one that the request does not
  // own, or one from before that no TMA tile has overwritten. It must not meet a probability of
  // zero.
  static __device__ __forceinline__ void clear_outside(uint32_t smem, int32_t first, int32_t last) {
    constexpr int kVectors = (kRowBytes + 15) / 16;
    static_assert(!kUsesTma || kSliceTokens * kVectors % kWarpSize == 0, "all lanes have a vector");
#pragma unroll 4
    for (int i = 0; i < kSliceTokens * kVectors; i += kWarpSize) {
      const int index = i + lane_idx(), row = index / kVectors, vector = index % kVectors;
      if (row >= first && row < last) continue;
      st_shared_16(advance(place(smem, row, 0), 0, vector * 16), {});
    }
    __syncwarp();
  }

  // The same in the rows that `listed` has no bit of.
  static __device__ __forceinline__ void clear_unlisted(uint32_t smem, uint32_t listed) {
    constexpr int kVectors = (kRowBytes + 15) / 16;
#pragma unroll 1
    for (int i = lane_idx(); i < kSliceTokens * kVectors; i += kWarpSize) {
      const int row = i / kVectors, vector = i % kVectors;
      if (listed >> row & 1) continue;
      st_shared_16(advance(place(smem, row, 0), 0, vector * 16), {});
    }
    __syncwarp();
  }
};

using KeyLayout = SmemLayout<kKeyDim>;
using ValueLayout = SmemLayout<kValueDim>;

}  // namespace jitattn
