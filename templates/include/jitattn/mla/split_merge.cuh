// Merge of a query tile's splits by consumers of a warpgroup kernel, where all splits have arrived.
//
// A CTA that has written its splits counts them. The one that finds all merges them, and with it
// those that came before, have nothing else to do and have waited for a while: they claim batches of
// rows. Nobody has to wait for the work of another, so CTAs need not run at the same time. A row's
// splits are merged in their order, whoever does it.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/output.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/barriers.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Threads that merge a row together, four columns each.
constexpr int kTeamThreads = kLatentDim / 4;
static_assert(kNumThreads / kTeamThreads == kMergeTeams, "all consumers merge");

__device__ __forceinline__ int team_idx() { return threadIdx.x / kTeamThreads; }

// Vectors of partials that a thread loads at a time: nothing else hides their latency.
constexpr int kMergeVectors = 16;

// Rows of a query tile that a team merges at a time, 2^log_splits of the vectors each. Lanes have
// the sums of a split of a row, of a vector each; they share what they find for their row.
struct MergeBatch {
  const PartialRows& partials;
  const QueryRows& rows;
  const QueryTile& query_tile;
  int log_splits;
  int32_t first_row;

  // So that most query tiles have all their splits under way together.
  static __device__ __forceinline__ int log_splits_of(int32_t num_splits) {
    return num_splits <= 2 ? 1 : num_splits <= 4 ? 2 : num_splits <= 8 ? 3 : 4;
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
      float4 parts[kMergeVectors];
      for_each<kMergeVectors>([&](int v) { parts[v] = load(of_vector(index, v)); });
      const float top = fmaxf(m, maximum(sums.x)), old_scale = exp2_approx(m - finite_maximum(top));
      m = top;
      const float scale = exp2_approx(sums.x - finite_maximum(m));
      d = add_sums(__fmul_rn(d, old_scale), sums.y, scale);
      o = o * old_scale;  // a row of more splits has all vectors
      const Row row(*this, m, d);
      for_each<kMergeVectors>([&](int v) {
        const int32_t split = v % count;
        const bool is_end = v % 2 == 1 && split + 1 == count;  // a row has two vectors at least
        if (v % 2 == 0 && split == 0 && first == 0) o = {0.f, 0.f, 0.f, 0.f};
        o = fma(parts[v], of_vector(scale, v), o);
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
      if (row >= batch.rows.num_rows) return;
      const int32_t token = batch.rows.token(row), head = batch.rows.head(row);
      const RowResult result(params, batch.query_tile, head, m, d);
      const int thread = threadIdx.x % kTeamThreads;
      if (thread < kMergeVectors && batch.lane_split() == 0) {
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
  static __device__ __forceinline__ int lane_vector() { return lane_idx() % kMergeVectors; }
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
    if (split >= query_tile.num_splits || lane_row() >= rows.num_rows) return -1;
    return static_cast<int32_t>(partials.row(split)) + lane_row();
  }
  __device__ __forceinline__ float4 load(int32_t index) const {
    if (index < 0) return {0.f, 0.f, 0.f, 0.f};
    const float* row = rows.params.partials + static_cast<int64_t>(index) * kValueDim;
    return __ldcg(reinterpret_cast<const float4*>(row + dim()));
  }
  // Over the splits of a lane's row.
  __device__ __forceinline__ float maximum(float value) const {
    for_each<4>([&](int i) {
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

// Merges the rows of a work item's query tile, for all consumers: teams claim batches of rows from a
// counter, or without one take them in turns.
__device__ __forceinline__ void merge_splits(const AttentionParams& params, const WorkItem& item,
                                             Shared& shared, int32_t* claims) {
  const QueryRows rows = item.rows(params);
  const PartialRows partials(params, item.block(params), item.query_tile);
  const int log_splits = MergeBatch::log_splits_of(item.query_tile.num_splits);
  const int32_t batch_rows = kMergeVectors >> log_splits;
  const int team = team_idx();
  const bool claims_for_team = claims && threadIdx.x % kTeamThreads == 0;
  int32_t claimed = 0;
  if (claims_for_team) claimed = atomicAdd(claims, 1);
#pragma unroll 1
  for (int32_t turn = 0;; ++turn) {
    int32_t batch = turn * kMergeTeams + team;
    if (claims) {
      int32_t& place = shared.claimed[team][turn % 2];
      if (claims_for_team) place = claimed;
      sync_threads<kTeamThreads>(kTeamBarrier + team);
      batch = place;
    }
    if (batch * batch_rows >= rows.num_rows) return;
    // The next, while this one is merged.
    if (claims_for_team) claimed = atomicAdd(claims, 1);
    MergeBatch{partials, rows, item.query_tile, log_splits, batch * batch_rows}.merge();
  }
}

// Counters of a query tile in several slots, zero between launches: of splits that have arrived, and
// in the upper half of those whose CTAs have left; and of claimed batches.
struct SplitCounters {
  static constexpr int32_t kHasLeft = 1 << 16;
  // Reads of a counter by a CTA that waits: some microseconds.
  static constexpr int kMostReads = 12;

  int32_t* splits;
  int32_t* claims;
  int32_t num_splits;
  int32_t own_splits;

  __device__ __forceinline__ SplitCounters(const AttentionParams& params, const WorkItem& item,
                                           int32_t own_splits)
      : num_splits(item.query_tile.num_splits), own_splits(own_splits) {
    const int32_t place = item.query_tile.first_slot * params.num_head_blocks;
    splits = params.counters + 2 * (place + item.block(params).index);
    claims = splits + 1;
  }

  // Counts this CTA's splits. Returns whether all have arrived, for which it waits a while; it is to
  // leave in any case.
  __device__ __forceinline__ bool arrive() const {
    int32_t arrived = atomic_add_acq_rel(splits, own_splits) + own_splits;
#pragma unroll 1
    for (int i = 0; i < kMostReads && arrived % kHasLeft != num_splits; ++i) {
      arrived = load_acquire(splits);
    }
    return arrived % kHasLeft == num_splits;
  }
  __device__ __forceinline__ void leave() const { end(own_splits * kHasLeft); }
  // Both, without a wait.
  __device__ __forceinline__ bool arrive_and_leave() const {
    return end(own_splits * (kHasLeft + 1)) % kHasLeft == num_splits;
  }

 private:
  __device__ __forceinline__ int32_t end(int32_t addend) const {
    const int32_t counted = atomic_add_acq_rel(splits, addend) + addend;
    // Nobody is left: ready for the next launch.
    if (counted / kHasLeft == num_splits) *claims = *splits = 0;
    return counted;
  }
};

// Whether a work item is the last of its CTA, as far as can be told from its slot.
__device__ __forceinline__ bool is_last_item(const AttentionParams& params, const WorkItem& item) {
  if (item.query_tile.last_slot > item.slot) return true;
  const SlotBoundary end = params.schedule.boundaries[item.slot + 1];
  return end.query_tile == item.index + 1 && end.tile == 0;
}

// Counts the splits of a work item whose query tile lies in several slots, for one thread. Returns
// what its CTA has to do for them.
__device__ __forceinline__ MergeRole arrive(const AttentionParams& params, const WorkItem& item,
                                            const SplitCounters& counters) {
  if (!is_last_item(params, item)) {
    return counters.arrive_and_leave() ? MergeRole::kMergesAlone : MergeRole::kNone;
  }
  if (counters.arrive()) return MergeRole::kHelps;
  counters.leave();
  return MergeRole::kNone;
}

// Ends a work item whose query tile has several splits, after `own_splits` of them.
__device__ __forceinline__ void merge_work_item(const AttentionParams& params, const WorkItem& item,
                                                Shared& shared, int32_t own_splits) {
  const SplitCounters counters(params, item, own_splits);
  const bool is_here = item.query_tile.first_slot == item.query_tile.last_slot;
  sync_threads<kNumThreads>(kConsumerBarrier);  // every thread's part is written
  if (threadIdx.x == 0) {
    shared.merge_role = is_here ? MergeRole::kMergesAlone : arrive(params, item, counters);
  }
  sync_threads<kNumThreads>(kConsumerBarrier);
  const MergeRole role = shared.merge_role;
  if (role == MergeRole::kNone) return;
  merge_splits(params, item, shared, role == MergeRole::kHelps ? counters.claims : nullptr);
  // All claims are made; and splits of one slot have been read, so that those of its next query tile
  // may overwrite them.
  sync_threads<kNumThreads>(kConsumerBarrier);
  if (threadIdx.x == 0 && role == MergeRole::kHelps) counters.leave();
}

}  // namespace jitattn
