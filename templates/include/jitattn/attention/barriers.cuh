// Barriers between producers and consumers.
#pragma once

#include "jitattn/attention/split_merges.cuh"
#include "jitattn/attention/wgmma_tiles.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Whether vectors land in shared memory before they are dequantised, or in registers.
constexpr bool kDequantisesLandings = kDequantises && kNumLandings > 0;
constexpr bool kDequantisesRegisters = kDequantises && !kDequantisesLandings;

// All producer warps, where they dequantise landings; a warpgroup beside those that dequantise
// registers; and one, where others transpose V.
constexpr int kNumQueryWarps = kDequantisesLandings    ? kProducerThreads / kWarpSize
                               : kDequantisesRegisters ? kGroupThreads / kWarpSize
                               : kHasFP8Products       ? 1
                                                       : 2;
constexpr int kDequantWarps = kProducerThreads / kWarpSize - kNumQueryWarps;
constexpr int kQueryThreads = kNumQueryWarps * kWarpSize;
// Producer warps of K, and of V.
constexpr int kTileWarps = kHasFP8Products         ? 1
                           : kDequantisesRegisters ? kDequantWarps / 2
                                                   : (kProducerThreads / kWarpSize - 2) / 2;
constexpr int kTransposeWarps = kHasFP8Products ? kProducerThreads / kWarpSize - 2 : 0;

// Hardware barriers; 0 is the whole CTA's.
constexpr int kTurnBarrier = 1;  // and the next, one a warpgroup
constexpr int kConsumerBarrier = kTurnBarrier + kNumGroups;
constexpr int kQueryBarrier = kConsumerBarrier + 1;
constexpr int kFirstQueryBarrier = kQueryBarrier + 1;  // and the next, one a warpgroup
constexpr int kTransposeBarrier = kFirstQueryBarrier + kNumGroups;

// What a warp that does nothing but find work items remembers.
struct FinderState : WorkPlace {
  uint32_t num_items;
  bool is_known;  // whether the next one has the facts of the first
};

// Beside such a warp: its state, and who has done with a work item.
template <bool kExist>
struct FinderShared {
  __device__ __forceinline__ void init_barriers() {}
};
template <>
struct FinderShared<true> {
  FinderState finder;
  uint64_t empty_barriers[kNumWorkItems];

  __device__ __forceinline__ uint32_t item_empty(int i) { return smem_address(empty_barriers + i); }
  __device__ __forceinline__ void init_barriers() {
    // Arrivals: all threads that read work items.
    for (int i = 0; i < kNumWorkItems; ++i) mbarrier_init(item_empty(i), kCtaThreads - kWarpSize);
  }
};

// Where rows of Q become another type: factors of their scores.
template <bool kExist>
struct RowFactors {};
template <>
struct RowFactors<true> {
  float row_factors[kNumQueryStages][kRowTile];
};

// Where products have 8 bits: landings of V, and scales of the rows of Q.
template <bool kExist>
struct FP8Shared {
  __device__ __forceinline__ void init_barriers(int loaders) {}
};
template <>
struct FP8Shared<true> {
  static constexpr int kCount = kNumLandings > 0 ? kNumLandings : 1;
  uint64_t landing_barriers[2][kCount];
  ScoreScale row_scales[kNumQueryStages][kRowTile];

  __device__ __forceinline__ uint32_t landing_full(int i) {
    return smem_address(landing_barriers[0] + i);
  }
  __device__ __forceinline__ uint32_t landing_empty(int i) {
    return smem_address(landing_barriers[1] + i);
  }
  __device__ __forceinline__ void init_barriers(int loaders) {
    for (int i = 0; i < kCount; ++i) {
      mbarrier_init(landing_full(i), loaders);
      mbarrier_init(landing_empty(i), kTransposeWarps);
    }
  }
};

struct Shared : FP8Shared<kHasFP8Products>,
                RowFactors<kConvertsQueries>,
                FinderShared<kDequantisesRegisters> {
  WorkItem work_items[kNumWorkItems];
  WorkItemFacts first_items[2 * kTileWarps];  // for each warp that loads tiles
  SplitMerges merges;
  uint64_t item_barriers[kNumWorkItems];
  uint64_t query_barriers[2][kNumQueryStages];
  uint64_t key_barriers[2][kNumKeyParts];
  uint64_t value_barriers[2][kNumStages];

  __device__ __forceinline__ uint32_t item_full(int i) { return smem_address(item_barriers + i); }
  __device__ __forceinline__ uint32_t q_full(int i) { return smem_address(query_barriers[0] + i); }
  __device__ __forceinline__ uint32_t q_empty(int i) { return smem_address(query_barriers[1] + i); }
  __device__ __forceinline__ uint32_t k_full(int i) { return smem_address(key_barriers[0] + i); }
  __device__ __forceinline__ uint32_t k_empty(int i) { return smem_address(key_barriers[1] + i); }
  __device__ __forceinline__ uint32_t v_full(int i) { return smem_address(value_barriers[0] + i); }
  __device__ __forceinline__ uint32_t v_empty(int i) { return smem_address(value_barriers[1] + i); }

  __device__ __forceinline__ void init_barriers() {
    // Arrivals: one lane for TMA tiles, one a warp for dequantised tiles, each lane for its own
    // asynchronous copies.
    constexpr int kLoaders = kDequantisesLandings    ? kNumQueryWarps / 2
                             : kDequantisesRegisters ? kDequantWarps
                             : kUsesTma              ? 1
                                                     : kTileWarps * kWarpSize;
    for (int i = 0; i < kNumWorkItems; ++i) {
      mbarrier_init(item_full(i), kDequantisesRegisters ? kWarpSize : 1);
    }
    for (int i = 0; i < kNumQueryStages; ++i) {
      // Where one of their warps finds work items, the others load Q.
      mbarrier_init(q_full(i), kQueryThreads - (kDequantisesRegisters ? kWarpSize : 0));
      mbarrier_init(q_empty(i), kNumWarps);
    }
    for (int i = 0; i < kNumKeyParts; ++i) {
      mbarrier_init(k_full(i), kLoaders);
      if (i < kNumStages) mbarrier_init(v_full(i), kHasFP8Products ? kTransposeWarps : kLoaders);
      mbarrier_init(k_empty(i), kNumWarps);
      if (i < kNumStages) mbarrier_init(v_empty(i), kNumWarps);
    }
    FP8Shared<kHasFP8Products>::init_barriers(kLoaders);
    FinderShared<kDequantisesRegisters>::init_barriers();
    for_each<2>([&](int i) { merges.items[i].work = kNoWork; });
    fence_mbarrier_init();
  }
};

}  // namespace jitattn
