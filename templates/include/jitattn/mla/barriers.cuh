// Barriers between producers and consumers of MLA.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/merge_counter.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/wgmma_tiles.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Hardware barriers; 0 is the whole CTA's.
constexpr int kProbabilityBarrier = 1;  // and the next: those of a warpgroup are there
constexpr int kGroupBarrier = 3;        // and the next: of a warpgroup
constexpr int kConsumerBarrier = 5;
constexpr int kQueryBarrier = 6;

// Whether tokens arrive by asynchronous copies.
constexpr bool kCopiesLater = kUseVectorLoads && !kDequantises;

// TMA tiles of a KV tile, and warps that copy them in turn.
constexpr int kNumTmaTiles = kTileTokens / kTmaTokens;
constexpr int kTileWarps = kNumTmaTiles > 1 ? 2 : 1;

// Each half of a stage holds the values of one warpgroup, which empties it after the probabilities,
// hence after the scores.
struct Shared {
  WorkItem work_items[kNumWorkItems];
  WorkItemFacts first_item;             // as the schedule has it
  float2 tops[kNumGroups][kRowTile];    // of a warpgroup's last tile: maximum, old scale
  float sums[2][kNumGroups][kRowTile];  // of kv splits in turn
  float row_scales[kRowTile];           // of the last work item
  WorkItem split_items[2];              // of which splits are published; kNoWork: none
  RowRange split_rows[2];               // that this CTA merges of them
  uint64_t item_barriers[kNumWorkItems];
  uint64_t query_barriers[2];
  uint64_t tile_barriers[2][2][2];  // full or empty, stage, half

  __device__ __forceinline__ uint32_t item_full(int i) { return smem_address(item_barriers + i); }
  __device__ __forceinline__ uint32_t q_full() { return smem_address(query_barriers); }
  __device__ __forceinline__ uint32_t q_empty() { return smem_address(query_barriers + 1); }
  __device__ __forceinline__ uint32_t full(int stage, int half) {
    return smem_address(&tile_barriers[0][stage][half]);
  }
  __device__ __forceinline__ uint32_t empty(int stage, int half) {
    return smem_address(&tile_barriers[1][stage][half]);
  }

  __device__ __forceinline__ void init_barriers() {
    // Arrivals: one lane a warp for TMA tiles and for stored tiles, each lane for its own
    // asynchronous copies.
    constexpr int kStorers = kCopiesLater ? kProducerThreads : kProducerThreads / kWarpSize;
    constexpr int kLoaders = kUsesTma ? kTileWarps : kStorers;
    for (int i = 0; i < kNumWorkItems; ++i) mbarrier_init(item_full(i), 1);
    mbarrier_init(q_full(), kQueryThreads);
    mbarrier_init(q_empty(), kNumWarps);
    for (int i = 0; i < 4; ++i) {
      mbarrier_init(full(i / 2, i % 2), kLoaders);
      mbarrier_init(empty(i / 2, i % 2), kNumWarps / kNumGroups);
    }
    fence_mbarrier_init();
    for (WorkItem& item : split_items) item.work = kNoWork;
    work_items[kNumWorkItems - 1].work = kNoWork;  // before the first
  }

  // Whether the first work item is as the schedule has it, with tokens and rows. Else it is found as
  // the others are.
  __device__ __forceinline__ bool knows_first_item(const KernelParams& params) const {
    if (!is_usable(params, first_item)) return false;
    const AttentionParams& attention = params.attention;
    const HeadBlock block(attention, first_item.work);
    return QueryRows(attention, block, first_item.query_tile, first_item.request).num_rows > 0;
  }
  // Writes the next work item of `source`, for one thread.
  __device__ __forceinline__ void find_item(WorkItemIterator& source, int32_t index) {
    WorkItem& item = work_items[index];
    const bool is_known = source.work == kUnknownWork && knows_first_item(source.params);
    if (is_known) static_cast<WorkItemFacts&>(item) = first_item;
    source.next(item, is_known);
  }
};

}  // namespace jitattn
