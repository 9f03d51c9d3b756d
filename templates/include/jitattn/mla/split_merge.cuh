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

// Rows of a query tile that a team merges at a time, 2^log_splits of kVectors vectors of partials each.
// A thread loads all vectors together: nothing else hides their latency. Lanes have the sums of a split
// of a row, of a vector each; they share what they find for their row.
template <int kVectors>
struct MergeBatch {
  const PartialRows& partials;
  const QueryRows& rows;
  const QueryTile& query_tile;
  int log_splits;
  int32_t first_row;
  int32_t end_row;

  // So that most query tiles have all their splits under way together.
  static __device__ __forceinline__ int log_splits_of(int32_t num_splits) {
    if (num_splits <= 4) return num_splits <= 2 ? 1 : 2;
    if (num_splits <= 8 || kVectors <= 8) return 3;
    return num_splits <= 16 || kVectors <= 16 ? 4 : 5;
  }

  __device__ __forceinline__ void merge() const {
    const int32_t num_splits = query_tile.num_splits, count = 1 << log_splits;
    float m = neg_inf(), d = 0.f;  // of this lane's row
    float4 o = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int32_t first = 0; first < num_splits; first += count) {
      const int32_t index = lane_index(first);
      float2 sums = {neg_inf(), 0.f};
      // Loads from L2, since other SMs write partials during this launch.
      if (index >= 0) sums = __ldcg(rows.params.partial_sums + index);
      Part parts[kVectors];
      for_each<kVectors>([&](int v) { parts[v] = load(of_vector(index, v)); });
      float part_scale = 1.f;
      if (kPacksPartials && index >= 0) part_scale = load_scale(index);
      const float top = fmaxf(m, maximum(sums.x)), old_scale = exp2_approx(m - finite_maximum(top));
      m = top;
      const float scale = exp2_approx(sums.x - finite_maximum(m));
      d = add_sums(__fmul_rn(d, old_scale), sums.y, scale);
      o = o * old_scale;  // a row of more splits has all vectors
      const Row row(*this, m, d);
      for_each<kVectors>([&](int v) {
        const int32_t split = v % count;
        const bool is_end = v % 2 == 1 && split + 1 == count;  // a row has two vectors at least
        if (v % 2 == 0 && split == 0 && first == 0) o = {0.f, 0.f, 0.f, 0.f};
        o = fma(unpacked(parts[v]), of_vector(scale * part_scale, v), o);
        if (is_end && first + count >= num_splits) row.write(v, o);
      });
    }
  }

 private:
  // A row of out, of a lane.
  struct Row {
    const AttentionParams& params;
    int64_t offset;  // -1: there is none
    float factor;

    __device__ __forceinline__ Row(const MergeBatch& batch, float m, float d)
        : params(batch.rows.params), offset(-1), factor(0.f) {
      const int32_t row = batch.lane_row();
      if (row >= batch.end_row) return;
      const int32_t token = batch.rows.token(row), head = batch.rows.head(row);
      const RowResult result(params, batch.query_tile, head, m, d);
      const int thread = threadIdx.x % kTeamThreads;
      if (thread < kVectors && batch.lane_split() == 0) {
        write_lse(params, token, head, result.lse);
      }
      offset = token * params.out_token_stride + head * params.out_head_stride;
      factor = result.factor;
    }

    __device__ __forceinline__ void write(int vector, float4 o) const {
      const float vector_factor = of_vector(factor, vector);
      const int64_t vector_offset = of_vector(offset, vector);
      if (vector_offset < 0) return;
      OutType::Storage* out = static_cast<OutType::Storage*>(params.out) + vector_offset;
      store_four(params, out + dim(), o * vector_factor);
    }
  };

  static __device__ __forceinline__ int dim() { return threadIdx.x % kTeamThreads * 4; }
  static __device__ __forceinline__ int lane_vector() { return lane_idx() % kVectors; }
  template <typename T>
  static __device__ __forceinline__ T of_vector(T value, int vector) {
    return __shfl_sync(0xffffffff, value, vector);
  }
  __device__ __forceinline__ int32_t lane_row() const {
    return first_row + (lane_vector() >> log_splits);
  }
  __device__ __forceinline__ int32_t lane_split() const {
    return lane_vector() & (1 << log_splits) - 1;
  }

  // The row of the partials that a lane's vector is in; -1 where there is none.
  __device__ __forceinline__ int32_t lane_index(int32_t first_split) const {
    const int32_t split = first_split + lane_split();
    if (split >= query_tile.num_splits || lane_row() >= end_row) return -1;
    return static_cast<int32_t>(partials.row(split)) + lane_row();
  }
  // Four columns of a row, as they lie.
  union Part {
    float4 floats;
    uint2 halves;
  };
  static __device__ __forceinline__ float4 unpacked(const Part& part) {
    return kPacksPartials ? unpack_partial(part.halves) : part.floats;
  }
  __device__ __forceinline__ const float* row_at(int32_t index) const {
    return rows.params.partials + static_cast<int64_t>(index) * kValueDim;
  }
  __device__ __forceinline__ Part load(int32_t index) const {
    Part part = {};
    if (index < 0) return part;
    if constexpr (kPacksPartials) {
      part.halves = __ldcg(reinterpret_cast<const uint2*>(row_at(index)) + dim() / 4);
    } else {
      part.floats = __ldcg(reinterpret_cast<const float4*>(row_at(index) + dim()));
    }
    return part;
  }
  // Of this warp's columns, which are in one half.
  __device__ __forceinline__ float load_scale(int32_t index) const {
    return __ldcg(row_at(index) + kValueDim / 2 + dim() / (kValueDim / 2));
  }
  // Over the splits of a lane's row.
  __device__ __forceinline__ float maximum(float value) const {
    for_each<5>([&](int i) {
      const float other = __shfl_xor_sync(0xffffffff, value, 1 << i);
      if (i < log_splits) value = fmaxf(value, other);
    });
    return value;
  }
  __device__ __forceinline__ float add_sums(float d, float sum, float scale) const {
    const int first = lane_vector() - lane_split();
#pragma unroll 1
    for (int split = 0; split < 1 << log_splits; ++split) {
      d = fmaf(of_vector(sum, first + split), of_vector(scale, first + split), d);
    }
    return d;
  }
};

// Merges some rows of a work item's query tile, for all consumers.
template <int kVectors>
__device__ __forceinline__ void merge_rows(const AttentionParams& params, const WorkItem& item,
                                           RowRange range) {
  using Batch = MergeBatch<kVectors>;
  const QueryRows rows = item.rows(params);
  const PartialRows partials(params, item.block(params), item.query_tile);
  const int log_splits = Batch::log_splits_of(item.query_tile.num_splits);
  // Of this thread's team.
  const int32_t size = (range.end - range.begin + kMergeTeams - 1) / kMergeTeams;
  const int32_t begin = range.begin + size * (threadIdx.x / kTeamThreads);
  const int32_t end = min(begin + size, range.end);
#pragma unroll 1
  for (int32_t row = begin; row < end; row += kVectors >> log_splits) {
    Batch{partials, rows, item.query_tile, log_splits, row, end}.merge();
  }
}

// Merges the splits of a query tile that lies in one slot, when they are written.
__device__ __forceinline__ void merge_here(const AttentionParams& params, const WorkItem& item) {
  sync_threads<kNumThreads>(kConsumerBarrier);  // every thread's part is written
  merge_rows<8>(params, item, {0, item.rows(params).num_rows});
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
    if (item.work == kNoWork) continue;
    // Where TMA leaves registers for it, packed rows are merged twice as many vectors at a time, which
    // takes longer for few rows.
    constexpr int kManyRows = 6;
    const RowRange rows = shared.split_rows[i];
    if (kPacksPartials && kUsesTma && rows.end - rows.begin >= kManyRows) {
      merge_rows<32>(params, item, rows);
    } else {
      merge_rows<16>(params, item, rows);
    }
  }
}

}  // namespace jitattn
