// Merges of query tiles with several splits, by the consumers of a warpgroup kernel: of those that lie
// in one slot at once, of others when a CTA has no more work, by all CTAs that have splits of it and are
// there. A row's splits are merged in their order, whoever does it.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/merge_counter.cuh"
#include "jitattn/attention/output.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/work_state.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Threads that merge a row together, four columns each.
constexpr int kTeamThreads = kLatentDim / 4;
constexpr int kMergeTeams = kNumThreads / kTeamThreads;

// Rows of a query tile that a team merges at a time, so many splits of each, of kVectors vectors of partials
// in all. A thread loads all vectors together: nothing else hides their latency. Lanes have the sums of a
// split of a row, of a vector each; they share what they find for their row. The code is as small as can
// be, since it runs once, when it has to be fetched.
template <int kVectors, int kSplits>
struct MergeBatch {
  static constexpr int kRows = kVectors / kSplits;

  const PartialRows& partials;
  const QueryRows& rows;
  const QueryTile& query_tile;
  int32_t first_row;
  int32_t end_row;

  __device__ __forceinline__ void merge() const {
    float m = neg_inf(), d = 0.f;  // of this lane's row
    const int32_t num_splits = uniform(query_tile.num_splits);
    float4 o[kRows] = {};
    const uint8_t* columns = own_columns();
#pragma unroll 1
    for (int32_t first = 0; first < num_splits; first += kSplits) {
      // Past the last row or split it is the last once more, which counts nothing: loads under conditions
      // would wait for each other. From L2, since other SMs write partials during this launch.
      const int32_t index = lane_index(first);
      float2 sums = __ldcg(rows.params.partial_sums + index);
      Part parts[kVectors];
      for_each<kVectors>([&](int v) {
        const int64_t row = __shfl_sync(0xffffffff, index, v);
        parts[v] = __ldcg(reinterpret_cast<const Part*>(columns + row * (kValueDim * 4)));
      });
      const float part_scale = kPacksPartials ? __ldcg(scale_of(index)) : 1.f;
      if (first + lane_split() >= num_splits) sums = {neg_inf(), 0.f};
      const float top = fmaxf(m, maximum(sums.x)), old_scale = exp2_approx(m - finite_maximum(top));
      const float scale = exp2_approx(sums.x - finite_maximum(top));
      m = top;
      d = fmaf(d, old_scale, total(__fmul_rn(sums.y, scale)));
      if (first > 0) for_each<kRows>([&](int r) { o[r] = o[r] * of_row(old_scale, r); });
      for_each<kVectors>([&](int v) {
        const float weight = __shfl_sync(0xffffffff, scale * part_scale, v);
        const float4 sum = fma(unpacked(parts[v]), weight, o[v / kSplits]);
        if (first + v % kSplits < num_splits) o[v / kSplits] = sum;
      });
    }
    write(m, d, o);
  }

 private:
  // Four columns of a row, as they lie.
  using Part = Choice<kPacksPartials, uint2, float4>::Type;
  static __device__ __forceinline__ float4 unpacked(uint2 part) { return unpack_partial(part); }
  static __device__ __forceinline__ float4 unpacked(float4 part) { return part; }

  static __device__ __forceinline__ int dim() { return threadIdx.x % kTeamThreads * 4; }
  static __device__ __forceinline__ int lane_vector() { return lane_idx() % kVectors; }
  static __device__ __forceinline__ int lane_split() { return lane_vector() % kSplits; }
  __device__ __forceinline__ int32_t lane_row() const {
    return first_row + lane_vector() / kSplits;
  }
  template <typename T>
  static __device__ __forceinline__ T of_row(T value, int r) {
    return __shfl_sync(0xffffffff, value, r * kSplits);
  }

  // The row of the partials that a lane's vector is in, of splits from `first` on.
  __device__ __forceinline__ int32_t lane_index(int32_t first) const {
    const int32_t split = min(first + lane_split(), query_tile.num_splits - 1);
    return static_cast<int32_t>(partials.row(split)) + min(lane_row(), end_row - 1);
  }
  // This thread's columns of the first row of all.
  __device__ __forceinline__ const uint8_t* own_columns() const {
    return forget(reinterpret_cast<const uint8_t*>(rows.params.partials) +
                  dim() / 4 * sizeof(Part));
  }
  // Of this warp's columns, which are in one half.
  __device__ __forceinline__ const float* scale_of(int32_t index) const {
    return rows.params.partials + static_cast<int64_t>(index) * kValueDim + kValueDim / 2 +
           dim() / (kValueDim / 2);
  }

  // Over the splits of a lane's row, in pairs: as many more that have nothing change nothing.
  static __device__ __forceinline__ float maximum(float value) {
#pragma unroll
    for (int step = 1; step < kSplits; step *= 2) {
      value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, step));
    }
    return value;
  }
  static __device__ __forceinline__ float total(float value) {
#pragma unroll
    for (int step = 1; step < kSplits; step *= 2) {
      value += __shfl_xor_sync(0xffffffff, value, step);
    }
    return value;
  }

  // Writes the rows, whose maxima and sums lanes have.
  __device__ __forceinline__ void write(float m, float d, const float4 (&o)[kRows]) const {
    const AttentionParams& params = rows.params;
    const int32_t row = lane_row();
    int64_t offset = -1;  // there is none
    float factor = 0.f;
    if (row < end_row) {
      const int32_t token = rows.token(row), head = rows.head(row);
      const RowResult result(params, query_tile, head, m, d);
      if (threadIdx.x % kTeamThreads < kVectors && lane_split() == 0) {
        write_lse(params, token, head, result.lse);
      }
      offset = token * params.out_token_stride + head * params.out_head_stride;
      factor = result.factor;
    }
    for_each<kRows>([&](int r) {
      const int64_t row_offset = of_row(offset, r);
      const float row_factor = of_row(factor, r);
      if (row_offset < 0) return;
      OutType::Storage* out = static_cast<OutType::Storage*>(params.out) + row_offset;
      store_four(params, out + dim(), o[r] * row_factor);
    });
  }
};

// Merges some rows of a work item's query tile, for all consumers.
struct RowMerge {
  const WorkItem& item;
  QueryRows rows;
  PartialRows partials;
  int32_t begin;  // of this thread's team
  int32_t end;

  __device__ __forceinline__ RowMerge(const AttentionParams& params, const WorkItem& item,
                                      RowRange range)
      : item(item), rows(item.rows(params)), partials(params, item.block(params), item.query_tile) {
    const int32_t size = (range.end - range.begin + kMergeTeams - 1) / kMergeTeams;
    begin = uniform(range.begin + size * static_cast<int32_t>(threadIdx.x / kTeamThreads));
    end = uniform(min(begin + size, range.end));
  }

  template <int kVectors, int kSplits>
  __device__ __forceinline__ void run() const {
    using Batch = MergeBatch<kVectors, kSplits>;
#pragma unroll 1
    for (int32_t row = begin; row < end; row += Batch::kRows) {
      Batch{partials, rows, item.query_tile, row, end}.merge();
    }
  }
  // The same for any number of splits.
  __device__ __forceinline__ void run() const {
    // Where TMA leaves registers for it, packed rows are merged twice as many vectors at a time, which
    // takes longer for few.
    constexpr bool kHasManyRows = kRowTile > 32;
    constexpr int kMost = kPacksPartials && kUsesTma && kHasManyRows ? 32 : 16;
    const int32_t num_splits = uniform(item.query_tile.num_splits);
    if (kHasManyRows && num_splits <= 2) {
      run<kMost, 2>();
    } else if (num_splits <= 4) {
      run<kMost, 4>();
    } else if (num_splits <= 8) {
      run<kMost, 8>();
    } else {
      run<kMost, 16>();
    }
  }
};

// Merges the splits of a query tile that lies in one slot, when they are written.
__device__ __forceinline__ void merge_here(const AttentionParams& params, const WorkItem& item) {
  sync_threads<kNumThreads>(kConsumerBarrier);  // every thread's part is written
  RowMerge(params, item, {0, item.rows(params).num_rows}).run<8, 8>();
  // The splits have been read: those of the slot's next query tile may overwrite them.
  sync_threads<kNumThreads>(kConsumerBarrier);
}

// Publishes `count` splits of a query tile in several slots. At most one of this CTA's began in an
// earlier slot, and one goes on in the next.
__device__ __forceinline__ void publish(const AttentionParams& params, WorkState& shared,
                                        const WorkItem& item, int32_t count) {
  constexpr int kWords = sizeof(WorkItem) / 4;
  static_assert(kWords <= kNumThreads, "a word a thread");
  sync_threads<kNumThreads>(kConsumerBarrier);  // every thread's part is written
  const int place = item.slot == item.query_tile.first_slot;
  if (threadIdx.x == 0) {
    shared.split_words[place] = MergeCounter(params, item).publish_and_read(count);
  }
  WorkItem& copy = shared.split_items[place];
  if (threadIdx.x < kWords) {
    reinterpret_cast<uint32_t*>(&copy)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(&item)[threadIdx.x];
  }
}

// Merges this CTA's parts of the query tiles that it has published splits of, when it has no more work.
__device__ __forceinline__ void merge_published(const AttentionParams& params, WorkState& shared) {
  sync_threads<kNumThreads>(kConsumerBarrier);  // the last is noted
  // A warp for each of both, since either may have to wait.
  const int own = warp_idx();
  int32_t word = 0, taken = 0;
  if (own < 2 && lane_idx() == 0 && shared.split_items[own].work != kNoWork) {
    const WorkItem& item = shared.split_items[own];
    const MergeCounter counter(params, item);
    word = counter.wait(item.query_tile.num_splits, shared.split_words[own]);
    const bool is_there = MergeCounter::num_published(word) == item.query_tile.num_splits;
    const int32_t num_rows = item.rows(params).num_rows;
    RowRange& range = shared.split_rows[own];
    if (!is_there) {
      range = {0, 0};
      word = 0;
    } else if (MergeCounter::are_all_there(word, item)) {
      range = MergeCounter::part(word, 0, item, num_rows, 1);
      taken = counter.take_next();  // nobody waits for the answer
    } else {
      taken = counter.take_next();
      range = MergeCounter::part(word, taken, item, num_rows, 1);
    }
  }
  sync_threads<kNumThreads>(kConsumerBarrier);
  if (word) MergeCounter(params, shared.split_items[own]).clear_last(word, taken);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const WorkItem& item = shared.split_items[i];
    if (uniform(item.work) == kNoWork) continue;
    RowMerge(params, item, shared.split_rows[i]).run();
  }
}

}  // namespace jitattn
