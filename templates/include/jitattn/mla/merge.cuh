// What the splits of a unit hold together. Where they lie in one slot, its CTA merges them; where
// in several, a kernel of its own does, whose CTAs have a row each: one CTA alone would take longer
// for the wide rows of a unit than all took to make them.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/output.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Four columns of a row: out and lse.
__device__ __forceinline__ void write_result(const QueryRows& rows, const Unit& unit, int row,
                                             int dim, float2 sums, float4 o) {
  const AttentionParams& params = rows.params;
  const int32_t token = rows.token(row), head = rows.head(row);
  const RowResult result(params, unit, head, sums.x, sums.y);
  write_out(params, token, head, dim, o * result.factor);
  if (dim == 0) write_lse(params, token, head, result.lse);
}

__device__ __forceinline__ void merge_row(const PartialRows& partials, const QueryRows& rows,
                                          const Unit& unit, int row, int dim) {
  const MergedSplits splits(rows.params, partials, unit.num_splits, row, dim);
  write_result(rows, unit, row, dim, {splits.m, splits.d}, splits.o);
}

constexpr int kMergeThreads = kLatentDim / 4;
constexpr int kMergeWarps = kMergeThreads / kWarpSize;

// Units whose splits lie in several slots, of those that the threads look at together.
struct SplitUnits {
  int32_t most_rows;
  int32_t most_splits;
  uint32_t votes[kMergeWarps];
  Unit units[kMergeThreads];
  Request requests[kMergeThreads];

  // To be called by all threads. Returns how many there are. All CTAs list them in the same order,
  // since each has its share of the rows of this list.
  __device__ __forceinline__ int32_t find(const KernelParams& params, int32_t first,
                                          int32_t num_units) {
    if (threadIdx.x == 0) most_rows = most_splits = 0;
    __syncthreads();
    const Schedule& schedule = params.attention.schedule;
    const int32_t index = first + threadIdx.x;
    Unit unit = {};
    Request request = {};
    int32_t num_rows = 0;
    if (index < num_units) {
      unit = schedule.units[index];
      request = schedule.requests[unit.request];
      num_rows = rows_of(params, unit, request);
    }
    const int warp = threadIdx.x / kWarpSize;
    const uint32_t vote = __ballot_sync(0xffffffff, num_rows > 0);
    if (lane_idx() == 0) votes[warp] = vote;
    if (num_rows > 0) {
      atomicMax(&most_rows, num_rows);
      atomicMax(&most_splits, unit.num_splits);
    }
    __syncthreads();
    int32_t place = __popc(vote & ((1u << lane_idx()) - 1)), count = 0;
    for_each<kMergeWarps>([&](int w) {
      const int32_t found = __popc(votes[w]);
      if (w < warp) place += found;
      count += found;
    });
    if (num_rows > 0) units[place] = unit, requests[place] = request;
    __syncthreads();
    return count;
  }

 private:
  // Of a unit from its first on, if its splits are to be merged.
  static __device__ __forceinline__ int32_t rows_of(const KernelParams& params, const Unit& unit,
                                                    const Request& request) {
    if (unit.kv_end <= 0 || unit.num_splits <= 1 || unit.first_slot >= unit.last_slot) return 0;
    // Whose table allows less than the planned one has its answer, and no splits.
    if (!params.pages.holds(unit.request, request.kv_len)) return 0;
    return request.q_len * params.attention.group_size - unit.first_row;
  }
};

// What a thread merges of a row: splits [begin, end) of four columns. Where there are many splits,
// the warps share them, each for the same columns.
struct MergeShare {
  bool is_shared;
  int32_t begin;
  int32_t end;
  int dim;

  // `block` counts the columns of a warp.
  __device__ __forceinline__ MergeShare(const Unit& unit, int block)
      : is_shared(has_many(unit.num_splits)), begin(0), end(unit.num_splits), dim(threadIdx.x * 4) {
    if (!is_shared) return;
    const int32_t share = (end + kMergeWarps - 1) / kMergeWarps;
    begin = min(static_cast<int32_t>(threadIdx.x) / kWarpSize * share, end);
    end = min(begin + share, end);
    dim = (block * kWarpSize + lane_idx()) * 4;
  }

  // A batch-invariant unit never has as many, so that its rows are merged in one order.
  static __device__ __forceinline__ bool has_many(int32_t num_splits) {
    return num_splits > kMergeSplits;
  }
};

// What the warps of a CTA have of a row.
struct WarpStates {
  float2 sums[kMergeWarps];
  float4 o[kMergeWarps][kWarpSize];

  // To be called by all threads: puts together what they have, in every warp.
  __device__ __forceinline__ void combine(float2& own_sums, float4& own_o) {
    const int warp = threadIdx.x / kWarpSize, lane = lane_idx();
    o[warp][lane] = own_o;
    if (lane == 0) sums[warp] = own_sums;
    __syncthreads();
    own_sums = {neg_inf(), 0.f};
    own_o = {0.f, 0.f, 0.f, 0.f};
    for_each<kMergeWarps>([&](int w) { own_sums.x = fmaxf(own_sums.x, sums[w].x); });
    for_each<kMergeWarps>([&](int w) {
      const float scale = exp2_approx(sums[w].x - finite_maximum(own_sums.x));
      own_sums.y = fmaf(sums[w].y, scale, own_sums.y);
      own_o = fma(o[w][lane], scale, own_o);
    });
    __syncthreads();  // read
  }
};

// Rows of the units that lie in several slots, a CTA each, or some where there are many splits. The
// kernel before began this one when the schedule was there, so that the first units are found beside
// it.
__device__ __forceinline__ void merge_units(const KernelParams& params) {
  __shared__ SplitUnits split;
  __shared__ WarpStates states;
  const AttentionParams& attention = params.attention;
  const int32_t num_units = attention.schedule.header->num_units;
  const int32_t block_rows = attention.num_head_blocks * kRowTile;
#pragma unroll 1
  for (int32_t first = 0; first == 0 || first < num_units; first += kMergeThreads) {
    const int32_t count = split.find(params, first, num_units);
    const int32_t num_rows = min(split.most_rows, block_rows);
    // Column blocks of a row, of which but the first are for rows of many splits.
    const int32_t num_blocks = MergeShare::has_many(split.most_splits) ? kMergeWarps : 1;
    if (first == 0) wait_for_previous_kernel();
#pragma unroll 1
    for (int32_t item = blockIdx.x; item < count * num_rows * num_blocks; item += gridDim.x) {
      const int32_t place = item / (num_rows * num_blocks), rest = item % (num_rows * num_blocks);
      const int32_t row = rest / num_blocks, column_block = rest % num_blocks;
      const Unit& unit = split.units[place];
      const HeadBlock block(attention, row / kRowTile);
      const QueryRows rows(attention, block, unit, split.requests[place]);
      if (row % kRowTile >= rows.num_rows) continue;
      const MergeShare share(unit, column_block);
      if (!share.is_shared && column_block > 0) continue;
      const PartialRows partials(attention, block, unit);
      const MergedSplits<true> own(attention, partials, share.end, row % kRowTile, share.dim,
                                   share.begin);
      float2 sums = {own.m, own.d};
      float4 o = own.o;
      if (share.is_shared) states.combine(sums, o);
      if (share.is_shared && threadIdx.x >= kWarpSize) continue;
      write_result(rows, unit, row % kRowTile, share.dim, sums, o);
    }
    __syncthreads();  // all have read the units
  }
}

}  // namespace jitattn
