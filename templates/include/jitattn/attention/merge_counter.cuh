// The counter by which CTAs share the merge of a query tile that they have splits of.
#pragma once

#include "jitattn/attention/work_items.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Rows [begin, end) of a query tile.
struct RowRange {
  int32_t begin;
  int32_t end;
};

// The counter of a query tile that lies in several slots, whose CTAs do three things. Each publishes
// splits and stays; it leaves if the others take too long; or it takes a part of the rows to merge
// when all splits are published, of as many parts as CTAs have stayed. So nobody waits for a CTA that
// may not have begun, and the last to publish finds itself there at least. The last to take a part
// clears the counter for the next launch.
struct MergeCounter {
  int32_t* place;

  static constexpr int32_t kOneThere = 1 << 12, kOnePart = 1 << 22;
  // Some microseconds: what CTAs with equal work differ by.
  static constexpr int kMaxPolls = 16;

  __device__ __forceinline__ MergeCounter(const AttentionParams& params, const WorkItem& item)
      : place(params.counters + item.query_tile.first_slot * params.num_head_blocks +
              item.block(params).index) {}

  static __device__ __forceinline__ int32_t num_published(int32_t word) {
    return word & (kOneThere - 1);
  }
  static __device__ __forceinline__ int32_t num_there(int32_t word) {
    return word / kOneThere & (kOnePart / kOneThere - 1);
  }

  __device__ __forceinline__ void publish(int32_t num_splits) const {
    add_release(place, num_splits + kOneThere);
  }
  // The same; returns the counter, by which the last need not wait.
  __device__ __forceinline__ int32_t publish_and_read(int32_t num_splits) const {
    const int32_t added = num_splits + kOneThere;
    return atomic_add_acq_rel(place, added) + added;
  }

  // This CTA's part of `num_rows` rows, in steps of `step`: the slot's own, or the next where some have left.
  __device__ __forceinline__ RowRange take(const WorkItem& item, int32_t num_rows,
                                           int32_t step) const {
    const int32_t word = wait(item.query_tile.num_splits);
    if (num_published(word) != item.query_tile.num_splits) return {0, 0};
    const int32_t taken = take_next();
    clear_last(word, taken);
    return part(word, taken, item, num_rows, step);
  }

  // What take() does, one after the other, so that work fits between. The number of a part:
  __device__ __forceinline__ int32_t take_next() const {
    return atomicAdd(place, kOnePart) / kOnePart;
  }
  __device__ __forceinline__ void clear_last(int32_t word, int32_t taken) const {
    if (taken + 1 == num_there(word)) *place = 0;
  }
  static __device__ __forceinline__ bool are_all_there(int32_t word, const WorkItem& item) {
    return num_there(word) == item.query_tile.last_slot - item.query_tile.first_slot + 1;
  }
  // Needs the number where some have left.
  static __device__ __forceinline__ RowRange part(int32_t word, int32_t taken, const WorkItem& item,
                                                  int32_t num_rows, int32_t step) {
    const int32_t num_parts = num_there(word);
    const int32_t part = are_all_there(word, item) ? item.slot - item.query_tile.first_slot : taken;
    const int32_t size = (num_rows + num_parts * step - 1) / (num_parts * step) * step;
    return {min(part * size, num_rows), min((part + 1) * size, num_rows)};
  }

  // Waits for all splits. Returns the counter: without all of them this CTA has left.
  __device__ __forceinline__ int32_t wait(int32_t num_splits) const {
    return wait(num_splits, load_acquire(place));
  }
  // The same, where the counter was `word`.
  __device__ __forceinline__ int32_t wait(int32_t num_splits, int32_t word) const {
#pragma unroll 1
    for (int poll = 0; num_published(word) != num_splits; ++poll) {
      if (poll >= kMaxPolls) {
        const int32_t found = atomicCAS(place, word, word - kOneThere);
        if (found == word) return word;
      }
      sleep_ns(64);
      word = load_acquire(place);
    }
    return word;
  }
};

}  // namespace jitattn
