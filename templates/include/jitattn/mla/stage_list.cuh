// What a list says of the tokens of a stage, as producers found it, for those who mask its scores.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/lanes.cuh"

namespace jitattn {

// Lanes of a producer that share a row of a tile, and the rows that such lanes have.
constexpr int kLoaderLanes = kDequantises ? 4 : 8;
constexpr int kLoaderStep = kWarpSize / kLoaderLanes;
constexpr int kLoaderRows = 16 / kLoaderStep;

// A word for each producer warp's sixteen rows. Bit kLoaderLanes * r + i is of row kLoaderStep * i + r:
// i of the lanes that have row r. The last bit of these lanes says that an entry is beyond the pool.
struct StageList {
  static constexpr int kWords = kTileTokens / 16;
  static constexpr uint32_t kFirstLanes = 0xffffffffu / ((1u << kLoaderLanes) - 1);
  static constexpr uint32_t kWhole = kFirstLanes * ((1u << kLoaderRows) - 1);
  static constexpr uint32_t kOutsideBit = 1u << (kLoaderLanes - 1);
  static_assert(kLoaderRows < kLoaderLanes, "a bit is left");

  uint32_t words[kWords];

  // A producer warp's word; `id_of` a lane's row is its entry. For whole warps.
  template <typename IdOf>
  static __device__ __forceinline__ uint32_t word(const IdOf& id_of) {
    uint32_t word = 0;
    bool is_outside = false;
    for_each<kLoaderRows>([&](int i) {
      word |= (__ballot_sync(0xffffffff, id_of(i) >= 0) & kFirstLanes) << i;
      is_outside |= id_of(i) == kOutside;
    });
    return __any_sync(0xffffffff, is_outside) ? word | kOutsideBit : word;
  }
  // Whether the lane's row `i` is listed, by its warp's word.
  static __device__ __forceinline__ bool has_own(uint32_t word, int i) {
    return word >> (lane_idx() / kLoaderLanes * kLoaderLanes + i) & 1;
  }

  __device__ __forceinline__ bool is_whole() const {
    bool is_whole = true;
    for_each<kWords>([&](int i) { is_whole &= words[i] == kWhole; });
    return is_whole;
  }
  // Token `token` of the eight from 8 * `group` on.
  __device__ __forceinline__ bool has(int group, int token) const {
    const int bit = token % kLoaderStep * kLoaderLanes + token / kLoaderStep;
    return words[group / 2] >> (group % 2 * (8 / kLoaderStep)) >> bit & 1;
  }
  // The score of tokens that are not listed: NaN where an entry is beyond the pool.
  __device__ __forceinline__ float unseen() const {
    uint32_t any = 0;
    for_each<kWords>([&](int i) { any |= words[i]; });
    return any & kOutsideBit ? quiet_nan() : neg_inf();
  }
};

}  // namespace jitattn
