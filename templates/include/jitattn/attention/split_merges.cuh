// Merges of splits that several CTAs share: each does a part of the rows.
#pragma once

#include "jitattn/attention/merge_counter.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/kernel.cuh"

namespace jitattn {

// Most kernels that change scores have no registers for it: they merge all splits from memory.
constexpr bool kAddsInRegisters =
    (!kUseLogitsSoftCap || kFixedMaximum) && !kUseCustomMask && !kHasVariant;

// Query tiles of which this CTA has published splits: at most one that began in an earlier slot and one
// that goes on in the next. All are merged at the end, when the other CTAs are there, too.
struct SplitMerges {
  static constexpr int kEarlier = 0, kLater = 1;

  WorkItem items[2];  // kNoWork: none
  int32_t begin;      // rows of this CTA
  int32_t end;

  // For all consumers, who synchronise before they look.
  __device__ __forceinline__ void note(const WorkItem& item) {
    const int index = item.slot > item.query_tile.first_slot ? kEarlier : kLater;
    constexpr int kWords = sizeof(WorkItem) / 4;
    static_assert(kWords <= kNumThreads, "a word a thread");
    if (threadIdx.x >= kWords) return;
    reinterpret_cast<uint32_t*>(items + index)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(&item)[threadIdx.x];
  }

  // Whether splits wait whose room the next query tile of this CTA needs, if there is one.
  __device__ __forceinline__ bool is_due() const {
    return !kAddsInRegisters && items[kLater].work != kNoWork;
  }

  // Takes the rows of this CTA, for one thread.
  __device__ __forceinline__ void take_rows(const AttentionParams& params, const WorkItem& item) {
    constexpr int kStep = kNumThreads / (kValueDim / 4);
    RowRange rows = {0, item.rows(params).num_rows};
    if (!item.is_in_one_slot()) rows = MergeCounter(params, item).take(item, rows.end, kStep);
    begin = rows.begin;
    end = rows.end;
  }
};

}  // namespace jitattn
