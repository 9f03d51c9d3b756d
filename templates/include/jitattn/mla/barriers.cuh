// Barriers between producers and consumers of products of warpgroups.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/stage_list.cuh"
#include "jitattn/mla/wgmma_tiles.cuh"
#include "jitattn/mla/work_state.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Hardware barriers besides those of every such CTA.
constexpr int kGroupBarrier = 3;  // and the next: of a warpgroup

// TMA tiles of a KV tile, and warps that copy them in turn.
constexpr int kNumTmaTiles = kTileTokens / kTmaTokens;
constexpr int kTileWarps = kNumTmaTiles > 1 ? 2 : 1;

// Each half of a stage holds the values of one warpgroup, which empties it after the probabilities,
// hence after the scores. The second half also has the probabilities, which both read.
struct Shared : WorkState {
  float tops[kRowTile];                 // maxima of a tile
  float sums[2][kNumGroups][kRowTile];  // of kv splits in turn
  float row_scales[kRowTile];           // of the last work item
  alignas(16) StageList listed[2];      // of a stage, of lists
  uint64_t tile_barriers[2][2][2];      // full or empty, stage, half

  __device__ __forceinline__ uint32_t full(int stage, int half) {
    return smem_address(&tile_barriers[0][stage][half]);
  }
  __device__ __forceinline__ uint32_t empty(int stage, int half) {
    return smem_address(&tile_barriers[1][stage][half]);
  }

  __device__ __forceinline__ void init_barriers() {
    // Arrivals: one lane a warp for TMA tiles and for stored tiles, each lane for its own
    // asynchronous copies; then a lane besides for what lists say.
    constexpr int kProducerWarps = kProducerThreads / kWarpSize;
    constexpr int kStorers = kCopiesLater ? kProducerThreads : kProducerWarps;
    constexpr int kLoaders = kUsesTma ? kTileWarps : kStorers;
    constexpr int kNotes = kCopiesLater && PageTable::kIsList ? kProducerWarps : 0;
    init_items(kQueryThreads);
    for (int i = 0; i < 4; ++i) {
      mbarrier_init(full(i / 2, i % 2), i % 2 == 1 ? kLoaders + kNotes : kLoaders);
      mbarrier_init(empty(i / 2, i % 2), i % 2 == 1 ? kNumWarps : kNumWarps / kNumGroups);
    }
    fence_mbarrier_init();
  }
};

}  // namespace jitattn
