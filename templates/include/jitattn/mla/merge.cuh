// Merge of a query tile's splits, of kernels with products of warps, and where query tiles have many
// splits. Splits in one slot are merged by its CTA, splits in several slots by a second kernel with a
// row for each CTA: one CTA would take longer to merge the wide rows than all CTAs to compute them.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/output.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Four columns of a row: out and lse.
__device__ __forceinline__ void write_result(const QueryRows& rows, const QueryTile& query_tile,
                                             int row, int dim, float2 sums, float4 o) {
  const AttentionParams& params = rows.params;
  const int32_t token = rows.token(row), head = rows.head(row);
  const RowResult result(params, query_tile, head, sums.x, sums.y);
  write_out(params, token, head, dim, o * result.factor);
  if (dim == 0) write_lse(params, token, head, result.lse);
}

__device__ __forceinline__ void merge_row(const PartialRows& partials, const QueryRows& rows,
                                          const QueryTile& query_tile, int row, int dim) {
  const MergedSplits splits(rows.params, partials, query_tile.num_splits, row, dim);
  write_result(rows, query_tile, row, dim, {splits.m, splits.d}, splits.o);
}

constexpr int kMergeThreads = kLatentDim / 4;
constexpr int kMergeWarps = kMergeThreads / kWarpSize;

// Query tiles with splits in several slots, among those that the threads of a CTA look at together.
struct SplitQueryTiles {
  int32_t most_rows;
  int32_t most_splits;
  uint32_t votes[kMergeWarps];
  QueryTile query_tiles[kMergeThreads];
  Request requests[kMergeThreads];

  // To be called by all threads. Returns how many there are. All CTAs list them in the same order,
  // since each merges its part of the list's rows.
  __device__ __forceinline__ int32_t find(const KernelParams& params, int32_t first,
                                          int32_t num_query_tiles) {
    if (threadIdx.x == 0) most_rows = most_splits = 0;
    __syncthreads();
    const Schedule& schedule = params.attention.schedule;
    const int32_t index = first + threadIdx.x;
    QueryTile query_tile = {};
    Request request = {};
    int32_t num_rows = 0;
    if (index < num_query_tiles) {
      query_tile = schedule.query_tiles[index];
      request = schedule.requests[query_tile.request];
      num_rows = rows_of(params, query_tile, request);
    }
    const int warp = threadIdx.x / kWarpSize;
    const uint32_t vote = __ballot_sync(0xffffffff, num_rows > 0);
    if (lane_idx() == 0) votes[warp] = vote;
    if (num_rows > 0) {
      atomicMax(&most_rows, num_rows);
      atomicMax(&most_splits, query_tile.num_splits);
    }
    __syncthreads();
    int32_t place = __popc(vote & ((1u << lane_idx()) - 1)), count = 0;
    for_each<kMergeWarps>([&](int w) {
      const int32_t found = __popc(votes[w]);
      if (w < warp) place += found;
      count += found;
    });
    if (num_rows > 0) query_tiles[place] = query_tile, requests[place] = request;
    __syncthreads();
    return count;
  }

 private:
  // Rows of a query tile whose splits this kernel merges; else 0.
  static __device__ __forceinline__ int32_t rows_of(const KernelParams& params,
                                                    const QueryTile& query_tile,
                                                    const Request& request) {
    if (query_tile.kv_end <= 0 || query_tile.num_splits <= 1 ||
        query_tile.first_slot >= query_tile.last_slot)
      return 0;
    // A request whose table allows less than planned has its NaN rows already.
    if (!params.pages.holds(query_tile.request, request.kv_len)) return 0;
    return request.q_len * params.attention.group_size - query_tile.first_row;
  }
};

// Splits [begin, end) of four columns that a thread merges. Warps share many splits of the same
// columns.
struct SplitRange {
  bool is_shared;
  int32_t begin;
  int32_t end;
  int dim;

  // `block` counts the columns of a warp.
  __device__ __forceinline__ SplitRange(const QueryTile& query_tile, int block)
      : is_shared(has_many(query_tile.num_splits)),
        begin(0),
        end(query_tile.num_splits),
        dim(threadIdx.x * 4) {
    if (!is_shared) return;
    const int32_t range = (end + kMergeWarps - 1) / kMergeWarps;
    begin = min(static_cast<int32_t>(threadIdx.x) / kWarpSize * range, end);
    end = min(begin + range, end);
    dim = (block * kWarpSize + lane_idx()) * 4;
  }

  // A batch-invariant query tile never has as many, so that its rows are merged in one order.
  static __device__ __forceinline__ bool has_many(int32_t num_splits) {
    return num_splits > kMergeSplits;
  }
};

// Per-warp softmax states of a row.
struct WarpStates {
  float2 sums[kMergeWarps];
  float4 o[kMergeWarps][kWarpSize];

  // Merges the states of all warps, in every warp. For all threads.
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

// Merges the query tiles that lie in several slots, a row for each CTA, or for several with many
// splits. The attention kernel launches this one once the schedule is complete, so that the first
// query tiles are found beside it.
__device__ __forceinline__ void merge_query_tiles(const KernelParams& params) {
  __shared__ SplitQueryTiles split;
  __shared__ WarpStates states;
  const AttentionParams& attention = params.attention;
  const int32_t num_query_tiles = attention.schedule.header->num_query_tiles;
  const int32_t block_rows = attention.num_head_blocks * kRowTile;
#pragma unroll 1
  for (int32_t first = 0; first == 0 || first < num_query_tiles; first += kMergeThreads) {
    const int32_t count = split.find(params, first, num_query_tiles);
    const int32_t num_rows = min(split.most_rows, block_rows);
    // Column blocks of a row; only rows of many splits use more than the first.
    const int32_t num_blocks = SplitRange::has_many(split.most_splits) ? kMergeWarps : 1;
    if (first == 0) wait_for_previous_kernel();
#pragma unroll 1
    for (int32_t work = blockIdx.x; work < count * num_rows * num_blocks; work += gridDim.x) {
      const int32_t place = work / (num_rows * num_blocks), rest = work % (num_rows * num_blocks);
      const int32_t row = rest / num_blocks, column_block = rest % num_blocks;
      const QueryTile& query_tile = split.query_tiles[place];
      const HeadBlock block(attention, row / kRowTile);
      const QueryRows rows(attention, block, query_tile, split.requests[place]);
      if (row % kRowTile >= rows.num_rows) continue;
      const SplitRange range(query_tile, column_block);
      if (!range.is_shared && column_block > 0) continue;
      const PartialRows partials(attention, block, query_tile);
      const MergedSplits<true> own(attention, partials, range.end, row % kRowTile, range.dim,
                                   range.begin);
      float2 sums = {own.m, own.d};
      float4 o = own.o;
      if (range.is_shared) states.combine(sums, o);
      if (range.is_shared && threadIdx.x >= kWarpSize) continue;
      write_result(rows, query_tile, row % kRowTile, range.dim, sums, o);
    }
    __syncthreads();  // all have read the query tiles
  }
}

}  // namespace jitattn
