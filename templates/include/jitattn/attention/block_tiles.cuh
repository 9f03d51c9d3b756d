// Tiles of NVFP4 and int4 in registers: 16 tokens by 32 dims, for two products.
#pragma once

#include "jitattn/blocks.cuh"
#include "jitattn/int4.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/nvfp4.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Rows so wide leave few registers.
constexpr bool kHasWideKeys = kKeyDim > 256;

// Numbers of ProductType divided by kProductFactor. A lane has g = lane / 4 and t = lane % 4.
struct BlockTile {
  // Of K: dims 8 t + i and 8 t + i + 4 of token g + 8 h, the order of load_query(). Of V: dim
  // 4 g + i of tokens 2 t + 8 h and 2 t + 8 h + 1.
  uint32_t pairs[2][4];  // [h][i]

  __device__ __forceinline__ void set(int h, uint32_t elements, uint32_t scales) {
    const BlockPairs<ProductType> numbers(elements, scales);
    for_each<4>([&](int i) { pairs[h][i] = numbers.words[i]; });
  }
  __device__ __forceinline__ void set(int h, uint32_t elements, uint32_t scales, uint32_t zeros) {
    const AffinePairs<ProductType, kHasWideKeys> numbers(elements, scales, zeros);
    for_each<4>([&](int i) { pairs[h][i] = numbers.words[i]; });
  }
};

// The scales of a lane's blocks in shared memory, rows one after the other.
template <int kDim>
struct BlockScaleRows {
  static constexpr int kBytes = block_bytes(kDim);

  // Block scale of token `row`; `half` says which of a step's blocks.
  static __device__ __forceinline__ uint32_t place(uint32_t smem, int row, int half) {
    return smem + row * kBytes + half;
  }

  // Block scales of two rows, `apart` rows from each other, as bytes. Zeros past the last block,
  // where memory may hold NaN.
  static __device__ __forceinline__ uint32_t load(uint32_t place, int rows_apart, int step,
                                                  int half) {
    if (kBytes % 2 != 0 && 2 * step + half >= kBytes) return 0;
    const uint32_t low = ld_shared_byte(place + 2 * step);
    return low | ld_shared_byte(place + rows_apart * kBytes + 2 * step) << 8;
  }
};

// Block of 16 dims of a step that a lane has, of K and of V.
__device__ __forceinline__ int key_half() { return lane_idx() % 4 / 2; }
__device__ __forceinline__ int value_half() { return lane_idx() / 16; }

// The scales of a lane's blocks of K or V, from the first of its rows on. Where blocks are rows, those
// of kTiles tiles of 16 tokens are loaded once, for all steps.
template <int kDim, int kTiles>
struct LaneScales {
  static constexpr int kBytes = block_bytes(kDim);
  static constexpr bool kKeeps =
      kTiles > 0 && !kHasWideKeys && kHasZeros && BlocksOf<KVType>::kDims == 0;

  uint32_t place;
  uint32_t kept[kKeeps ? kTiles : 1][4];  // of rows 0, 1, 8 and 9 from the first on

  // Of the first row of tile `j`.
  __device__ __forceinline__ uint32_t of_tile(int j) const { return place + j * 16 * kBytes; }

  // Loads what is kept of a tile, of rows 0 and 8, or of rows 1 and 9, too.
  __device__ __forceinline__ void keep(bool has_pairs) {
    if constexpr (kKeeps) {
      for_each<kTiles>([&](int j) {
        for_each<2>([&](int i) {
          kept[j][2 * i] = ld_shared_4(of_tile(j) + 8 * i * kBytes);
          if (has_pairs) kept[j][2 * i + 1] = ld_shared_4(of_tile(j) + (8 * i + 1) * kBytes);
        });
      });
    }
  }

  // The scale and the zero of a row of tile `j`, 0, 1, 8 or 9. Zeros past the last element, whose
  // codes may be any.
  __device__ __forceinline__ uint32_t pair(int j, int row, int step, int half) const {
    if (kDim % 32 != 0 && 32 * step + 16 * half >= kDim) return 0;
    if constexpr (kKeeps) return kept[j][row / 8 * 2 + row % 2];
    return ld_shared_4(of_tile(j) + row * kBytes + BlocksOf<KVType>::place(32 * step));
  }
};

template <int kTiles = 0>
__device__ __forceinline__ LaneScales<kKeyDim, kTiles> key_scales(uint32_t smem) {
  LaneScales<kKeyDim, kTiles> scales;
  scales.place = BlockScaleRows<kKeyDim>::place(smem, lane_idx() / 4, kHasZeros ? 0 : key_half());
  scales.keep(false);
  return scales;
}
template <int kTiles = 0>
__device__ __forceinline__ LaneScales<kValueDim, kTiles> value_scales(uint32_t smem) {
  LaneScales<kValueDim, kTiles> scales;
  scales.place =
      BlockScaleRows<kValueDim>::place(smem, lane_idx() % 4 * 2, kHasZeros ? 0 : value_half());
  scales.keep(true);
  return scales;
}

// Tile `j` of K, 16 tokens by the 32 dims of a step. A lane names the place of token lane % 16.
template <typename Scales>
__device__ __forceinline__ BlockTile load_key_blocks(uint32_t lane_smem, const Scales& scales,
                                                     int j, int step) {
  BlockTile tile;
  const uint2 words = ldmatrix_x2(lane_smem);
  if constexpr (kHasZeros) {
    const uint32_t low = scales.pair(j, 0, step, key_half());
    const uint32_t high = scales.pair(j, 8, step, key_half());
    tile.set(0, words.x, low_twice(low), high_twice(low));
    tile.set(1, words.y, low_twice(high), high_twice(high));
    return tile;
  }
  const uint32_t bytes = BlockScaleRows<kKeyDim>::load(scales.of_tile(j), 8, step, key_half());
  const uint32_t pair = block_scale_pair<ProductType>(bytes);
  tile.set(0, words.x, low_twice(pair));
  tile.set(1, words.y, high_twice(pair));
  return tile;
}

// The same of V.
template <typename Scales>
__device__ __forceinline__ BlockTile load_value_blocks(uint32_t lane_smem, const Scales& scales,
                                                       int j, int step) {
  using Rows = BlockScaleRows<kValueDim>;
  BlockTile tile;
  const uint2 words = ldmatrix_x2_trans(lane_smem);
  if constexpr (kHasZeros) {
    const auto set = [&](int h, uint32_t elements) {
      const uint32_t low = scales.pair(j, 8 * h, step, value_half());
      const uint32_t high = scales.pair(j, 8 * h + 1, step, value_half());
      tile.set(h, elements, low_halves(low, high), high_halves(low, high));
    };
    set(0, words.x);
    set(1, words.y);
    return tile;
  }
  const uint32_t place = scales.of_tile(j);
  const uint32_t low = Rows::load(place, 1, step, value_half());
  const uint32_t high = Rows::load(place + 8 * Rows::kBytes, 1, step, value_half());
  tile.set(0, words.x, block_scale_pair<ProductType>(low));
  tile.set(1, words.y, block_scale_pair<ProductType>(high));
  return tile;
}

}  // namespace jitattn
