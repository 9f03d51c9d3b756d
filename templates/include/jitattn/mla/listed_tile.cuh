// Tokens of a KV tile that a list has, for those who mask its scores.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// A bit for each token of a tile, of lists. Read from the table, as producers just did.
struct ListedTile {
  static constexpr int kWords = kTileTokens / kWarpSize;
  static_assert(kTileTokens % kWarpSize == 0, "a lane has a token of each word");

  uint32_t words[kWords];
  float unseen;  // score of other tokens: NaN where one is beyond the pool

  // For whole warps.
  __device__ __forceinline__ ListedTile(const KernelParams& params, int32_t request, int32_t tile) {
    if constexpr (PageTable::kIsList) {
      const PageTable::Row row = params.pages.row(request);
      unseen = neg_inf();
      for_each<kWords>([&](int i) {
        const int32_t token = tile * kTileTokens + i * kWarpSize + lane_idx();
        const int32_t id = checked(params.pages, params.pages.k_id(row, token));
        words[i] = __ballot_sync(0xffffffff, id >= 0);
        if (__any_sync(0xffffffff, id == kOutside)) unseen = quiet_nan();
      });
    }
  }

  __device__ __forceinline__ bool is_whole() const {
    bool is_whole = true;
    for_each<kWords>([&](int i) { is_whole &= words[i] == 0xffffffff; });
    return is_whole;
  }
  // Token `token` of the eight from 8 * `group` on.
  __device__ __forceinline__ bool has(int group, int token) const {
    return words[group / 4] >> (group % 4 * 8 + token) & 1;
  }
};

}  // namespace jitattn
