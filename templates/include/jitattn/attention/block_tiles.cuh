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

// Address of a lane's first block scale of a tile.
__device__ __forceinline__ uint32_t key_scale_place(uint32_t smem) {
  return BlockScaleRows<kKeyDim>::place(smem, lane_idx() / 4, kHasZeros ? 0 : key_half());
}
__device__ __forceinline__ uint32_t value_scale_place(uint32_t smem) {
  return BlockScaleRows<kValueDim>::place(smem, lane_idx() % 4 * 2, kHasZeros ? 0 : value_half());
}

// Scales and zeros of a lane's rows of a tile: 0, 1, 8 and 9 from its first on.
struct RowPairs {
  uint32_t rows[4];
};

// Scales of a lane's rows and blocks of a tile as bytes, two steps in a word: those of rows 0 and 8,
// or of rows 0 and 1 and of rows 8 and 9.
template <int kWords>
struct BytePairs {
  uint32_t words[2][kWords];

  // Of step `step`, in the low half of a word.
  __device__ __forceinline__ uint32_t of_step(int h, int step) const {
    return words[h][step / 2] >> step % 2 * 16;
  }
};

// Those of kTiles tiles of 16 tokens, which are loaded once for all steps where blocks are rows, or
// where those of a row are whole vectors. Of other blocks a tile has the address of the first.
template <int kDim, int kTiles>
struct LaneScales {
  static constexpr int kBytes = block_bytes(kDim);
  static constexpr bool kKeeps = kHasZeros && !kHasWideKeys && BlocksOf<KVType>::kDims == 0;
  static constexpr bool kKeepsBytes = kHasBlocks && !kHasZeros && !kHasWideKeys && kBytes % 4 == 0;
  static constexpr int kWords = kKeepsBytes ? kBytes / 4 : 1;

  uint32_t place;
  RowPairs kept[kKeeps ? kTiles : 1];
  BytePairs<kWords> bytes[kKeepsBytes ? kTiles : 1];

  // Of a lane that has rows 0 and 8 of each tile, or rows 1 and 9, too.
  __device__ __forceinline__ LaneScales(uint32_t lane_smem, bool has_odd_rows) : place(lane_smem) {
    if constexpr (kKeepsBytes) {
      const int half = has_odd_rows ? value_half() : key_half();
      const uint32_t which = half ? 0x7351 : 0x6240;
      for_each<kTiles>([&](int j) {
        for_each<2>([&](int h) {
          if (h && !has_odd_rows) return;
          const uint32_t row = lane_smem - half + (j * 16 + h * 8) * kBytes;
          uint32_t first[kWords], second[kWords];
          load_words(first, row);
          load_words(second, row + (has_odd_rows ? 1 : 8) * kBytes);
          for_each<kWords>(
              [&](int i) { bytes[j].words[h][i] = __byte_perm(first[i], second[i], which); });
        });
      });
    }
    if constexpr (kKeeps) {
      for_each<kTiles>([&](int j) {
        for_each<4>([&](int i) {
          const int row = i / 2 * 8 + i % 2;
          if (i % 2 && !has_odd_rows) return;
          kept[j].rows[i] = ld_shared_4(place + (j * 16 + row) * kBytes);
        });
      });
    }
  }
  static __device__ __forceinline__ void load_words(uint32_t (&words)[kWords], uint32_t place) {
    if constexpr (kWords % 2 == 0) {
      for_each<kWords / 2>([&](int i) {
        const uint2 pair = ld_shared_8(place + i * 8);
        words[2 * i] = pair.x;
        words[2 * i + 1] = pair.y;
      });
    } else {
      for_each<kWords>([&](int i) { words[i] = ld_shared_4(place + i * 4); });
    }
  }
  __device__ __forceinline__ auto of_tile(int j) const {
    if constexpr (kKeeps) {
      return kept[j];
    } else if constexpr (kKeepsBytes) {
      return bytes[j];
    } else {
      return place + j * 16 * kBytes;
    }
  }
};

// The scale and the zero of a row. Zeros past the last element, whose codes may be any.
template <int kDim>
__device__ __forceinline__ uint32_t scale_pair(uint32_t tile, int row, int step, int half) {
  if (kDim % 32 != 0 && 32 * step + 16 * half >= kDim) return 0;
  return ld_shared_4(tile + row * block_bytes(kDim) + BlocksOf<KVType>::place(32 * step));
}
template <int kDim>
__device__ __forceinline__ uint32_t scale_pair(const RowPairs& tile, int row, int step, int half) {
  if (kDim % 32 != 0 && 32 * step + 16 * half >= kDim) return 0;
  return tile.rows[row / 8 * 2 + row % 2];
}

// Two scales of a step as bytes: of rows `row` and `row` + `apart`.
template <int kDim>
__device__ __forceinline__ uint32_t scale_bytes(uint32_t tile, int row, int apart, int step,
                                                int half) {
  using Rows = BlockScaleRows<kDim>;
  return Rows::load(tile + row * Rows::kBytes, apart, step, half);
}
template <int kDim, int kWords>
__device__ __forceinline__ uint32_t scale_bytes(const BytePairs<kWords>& tile, int row, int,
                                                int step, int) {
  return tile.of_step(row / 8, step);
}

// 16 tokens of K by the 32 dims of a step. A lane names the place of token lane % 16; `tile_scales`
// are the address of its first block scale, or RowPairs, or BytePairs.
template <typename Scales>
__device__ __forceinline__ BlockTile load_key_blocks(uint32_t lane_smem, const Scales& tile_scales,
                                                     int step) {
  BlockTile tile;
  const uint2 words = ldmatrix_x2(lane_smem);
  if constexpr (kHasZeros) {
    const uint32_t low = scale_pair<kKeyDim>(tile_scales, 0, step, key_half());
    const uint32_t high = scale_pair<kKeyDim>(tile_scales, 8, step, key_half());
    tile.set(0, words.x, low_twice(low), high_twice(low));
    tile.set(1, words.y, low_twice(high), high_twice(high));
  } else {
    const uint32_t bytes = scale_bytes<kKeyDim>(tile_scales, 0, 8, step, key_half());
    const uint32_t scales = block_scale_pair<ProductType>(bytes);
    tile.set(0, words.x, low_twice(scales));
    tile.set(1, words.y, high_twice(scales));
  }
  return tile;
}

// The same of V.
template <typename Scales>
__device__ __forceinline__ BlockTile load_value_blocks(uint32_t lane_smem,
                                                       const Scales& tile_scales, int step) {
  BlockTile tile;
  const uint2 words = ldmatrix_x2_trans(lane_smem);
  if constexpr (kHasZeros) {
    const auto set = [&](int h, uint32_t elements) {
      const uint32_t low = scale_pair<kValueDim>(tile_scales, 8 * h, step, value_half());
      const uint32_t high = scale_pair<kValueDim>(tile_scales, 8 * h + 1, step, value_half());
      tile.set(h, elements, low_halves(low, high), high_halves(low, high));
    };
    set(0, words.x);
    set(1, words.y);
  } else {
    const uint32_t low = scale_bytes<kValueDim>(tile_scales, 0, 1, step, value_half());
    const uint32_t high = scale_bytes<kValueDim>(tile_scales, 8, 1, step, value_half());
    tile.set(0, words.x, block_scale_pair<ProductType>(low));
    tile.set(1, words.y, block_scale_pair<ProductType>(high));
  }
  return tile;
}

}  // namespace jitattn
