// Work items of a warpgroup CTA of latent attention, in shared memory, and the barriers of Q.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/merge_counter.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kProducerThreads = kNumProducers * 4 * kWarpSize;
constexpr int kCtaThreads = kNumThreads + kProducerThreads;

// Hardware barriers; 0 is the whole CTA's.
constexpr int kVoteBarrier =
    1;  // its own: tools follow a barrier that votes or waits, not one of both
constexpr int kConsumerBarrier = 5;
constexpr int kQueryBarrier = 6;
constexpr int kFirstQueryBarrier = 7;

// Whether tokens arrive by asynchronous copies.
constexpr bool kCopiesLater = kUseVectorLoads && !kDequantises;

struct WorkState {
  WorkItem work_items[kNumWorkItems];
  WorkItemFacts first_item;  // as the schedule has it
  WorkItem split_items[2];   // of which splits are published; kNoWork: none
  int32_t split_words[2];    // their counters, when they were
  RowRange split_rows[2];    // that this CTA merges of them
  uint64_t item_barriers[kNumWorkItems];
  uint64_t query_barriers[2];

  __device__ __forceinline__ uint32_t item_full(int i) { return smem_address(item_barriers + i); }
  __device__ __forceinline__ uint32_t q_full() { return smem_address(query_barriers); }
  __device__ __forceinline__ uint32_t q_empty() { return smem_address(query_barriers + 1); }

  // `query_threads` load Q; each warp of consumers says when it needs it no more.
  __device__ __forceinline__ void init_items(int query_threads) {
    for (int i = 0; i < kNumWorkItems; ++i) mbarrier_init(item_full(i), 1);
    mbarrier_init(q_full(), query_threads);
    mbarrier_init(q_empty(), kNumWarps);
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
  // Writes the next work item of `source`, for one thread. Rows of those that see no token are written
  // apart.
  __device__ __forceinline__ void find_item(WorkItemIterator& source, int32_t index) {
    WorkItem& item = work_items[index];
    const bool is_known = source.work == kUnknownWork && knows_first_item(source.params);
    if (is_known) static_cast<WorkItemFacts&>(item) = first_item;
    source.next(item, is_known);
    while (item.work != kNoWork &&
           (item.is_empty() || item.rows(source.params.attention).num_rows == 0)) {
      source.next(item, false);
    }
  }
  // Calls `load(item, is_first)` for all work items, as who copies tokens alone: for the first, where
  // it is known early, without a wait for who finds the others.
  template <typename Load>
  __device__ __forceinline__ void for_each_item(const KernelParams& params, const Load& load) {
    Ring found = {0, 0};
    bool is_known = knows_first_item(params);
#pragma unroll 1
    while (true) {
      if (!is_known) mbarrier_wait(item_full(found.stage), found.parity);
      const WorkItemFacts& item = is_known ? first_item : work_items[found.stage];
      if (item.work == kNoWork) break;
      load(item, is_known);
      if (is_known) mbarrier_wait(item_full(found.stage), found.parity);
      is_known = false;
      found.next(kNumWorkItems);
    }
  }
};

}  // namespace jitattn
