// Work items of a warpgroup CTA.
#pragma once

#include "jitattn/attention/output.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Ring of work items, written ahead of the consumers.
// Producers that dequantise are some KV tiles ahead of the last that consumers can see.
constexpr int kNumWorkItems = kDequantises ? 8 : 4;

// Rows of a work item, for a kernel whose warpgroups may have none of them: it defines kMayPass.
template <bool kExist>
struct NotedRows {
  __device__ __forceinline__ void note(int32_t) {}
};
template <>
struct NotedRows<true> {
  int32_t num_rows;

  __device__ __forceinline__ void note(int32_t count) { num_rows = count; }
};

// As consumers see it.
struct WorkItem : WorkItemFacts, NotedRows<kMayPass> {
  int32_t query_stage;
  int32_t first_common;  // keys [first_common, last_common) are seen by all rows
  int32_t last_common;
  ScoreScale score_scale;  // positive: Q has its sign

  __device__ __forceinline__ HeadBlock block(const AttentionParams& params) const {
    return HeadBlock(params, work);
  }
  __device__ __forceinline__ QueryRows rows(const AttentionParams& params) const {
    return QueryRows(params, block(params), query_tile, request);
  }
  // Scale that the soft cap leaves.
  __device__ __forceinline__ float scale() const {
    return kUseLogitsSoftCap ? 1.f : score_scale.rest;
  }
  __device__ __forceinline__ bool is_empty() const { return begin >= end; }
  __device__ __forceinline__ bool is_in_one_slot() const {
    return query_tile.first_slot == query_tile.last_slot;
  }
  __device__ __forceinline__ int32_t split(int32_t tile) const {
    return split_of(query_tile, slot, first, tile);
  }
  __device__ __forceinline__ int32_t split_end(int32_t tile) const {
    return end_of_split(query_tile, tile, end);
  }
};

// A place in a ring of stages, and the parity of the phase that is waited for there.
struct Ring {
  int32_t stage;
  uint32_t parity;

  __device__ __forceinline__ void next(int32_t count) {
    if (++stage == count) stage = 0, parity ^= 1;
  }
};

// Prefetches the begin of the schedule to L1, since one thread looks entries up one after the
// other.
__device__ __forceinline__ void prefetch_schedule(const Schedule& schedule, int thread) {
  constexpr int kLineBytes = 128;
  const auto* line = reinterpret_cast<const char*>(schedule.header) + thread * kLineBytes;
  if (line < reinterpret_cast<const char*>(schedule.boundaries)) prefetch_line(line);
}

// Whether the first work item of a CTA is as the schedule says: run() may get a table that allows less
// than the planned one. Else it is found as the others are.
__device__ __forceinline__ bool is_usable(const KernelParams& params, const WorkItemFacts& first) {
  const int32_t kv_len = PageTable::kIsList ? first.query_tile.kv_end : first.request.kv_len;
  return first.work >= 0 && params.pages.holds(first.query_tile.request, kv_len);
}

// Copies the first work item of this CTA to shared memory, for a warp whose lanes meet before and
// after it.
__device__ __forceinline__ void fetch_first_item(const Schedule& schedule, WorkItemFacts& item) {
  constexpr int kVectors = sizeof(WorkItemFacts) / 16;
  const WorkItemFacts& source = schedule.first_items[blockIdx.x];
  if (lane_idx() < kVectors) {
    reinterpret_cast<uint4*>(&item)[lane_idx()] =
        reinterpret_cast<const uint4*>(&source)[lane_idx()];
  }
}

// The same with all of that. Returns whether it is usable.
__device__ __forceinline__ bool copy_first_item(const KernelParams& params, WorkItemFacts& item) {
  __syncwarp();
  fetch_first_item(params.attention.schedule, item);
  __syncwarp();
  const bool is_known = is_usable(params, item);
  __syncwarp();  // all lanes have read it: one may overwrite it
  return is_known;
}

// What an iterator over work items remembers.
struct WorkPlace {
  int32_t num_work_tiles;
  int32_t section_heads;
  int32_t work;
  int32_t query_tile;
  int32_t last_query_tile;
};

// Work items of this CTA: the query tiles of its work tiles. The first work tile is that of the
// CTA's index; if there are more work tiles than CTAs, the others are claimed, so that all CTAs end
// together.
//
// Work tile x is head block x % num_head_blocks of slot x / num_head_blocks. Whole query tiles are
// dealt one head section at a time, so that CTAs that run together read the same K and V.
struct WorkItemIterator : WorkPlace {
  const KernelParams& params;

  __device__ __forceinline__ WorkItemIterator(const KernelParams& params, const WorkPlace& place)
      : WorkPlace(place), params(params) {}

  __device__ __forceinline__ explicit WorkItemIterator(const KernelParams& params)
      : params(params) {
    num_work_tiles = params.attention.schedule.header->num_slots * params.attention.num_head_blocks;
    const int32_t heads = params.attention.schedule.header->section_heads;
    section_heads = heads > 0 ? heads : params.attention.num_head_blocks;
    work = kUnknownWork;
    query_tile = last_query_tile = 0;
  }

  // Writes the next work item, which may be empty; kNoWork after the last. With `is_known` the item
  // has the facts of the first.
  __device__ __forceinline__ void next(WorkItem& item, bool is_known) {
    if (is_known) {
      work = item.work;
      query_tile = item.index;
      last_query_tile = item.last_index;
      complete(item);
      return;
    }
    item.work = kNoWork;
    item.is_first = false;
#pragma unroll 1
    while (work != kNoWork) {
      if (++query_tile > last_query_tile) {
        begin_work_tile(claim());
        continue;
      }
      const SlotRange slot(params.attention, work);
      const TileRange tiles(params, slot, query_tile);
      if (tiles.is_skipped) continue;
      item.slot = slot.slot;
      item.first = tiles.first;
      item.begin = tiles.begin;
      item.end = tiles.end;
      item.query_tile = tiles.query_tile;
      item.request = params.attention.schedule.requests[tiles.query_tile.request];
      item.work = work;
      complete(item);
      return;
    }
  }

 private:
  __device__ __forceinline__ void complete(WorkItem& item) const {
    const QueryRows rows = item.rows(params.attention);
    item.note(rows.num_rows);
    item.first_common = rows.first_common_key();
    item.last_common = rows.last_common_key();
    item.score_scale = score_scale_of(params.attention, rows.kv_head);
    // Not zero, so that -inf stays what it is.
    const float rest = fabsf(item.score_scale.rest) * (1.f / kQueryFactor);
    item.score_scale.rest = fmaxf(rest, 1e-30f);
  }

  __device__ __forceinline__ void begin_work_tile(int32_t work_tile) {
    const AttentionParams& attention = params.attention;
    work = work_tile;
    if (work != kNoWork) {
      work = work_of(work_tile, attention.schedule.header->num_slots, attention.num_head_blocks,
                     section_heads);
    }
    if (work == kNoWork) return;
    const SlotRange slot(params.attention, work);
    query_tile = slot.begin.query_tile - 1;
    last_query_tile = slot.last_query_tile;
  }

  __device__ __forceinline__ int32_t claim() const {
    // Found again where a warp with few registers finds work items.
    const int32_t num_ctas = kDequantises ? grid_size_again() : gridDim.x;
    const int32_t own = kDequantises ? cta_idx_again() : blockIdx.x;
    if (work == kUnknownWork) return own < num_work_tiles ? own : kNoWork;
    if (num_work_tiles <= num_ctas) return kNoWork;
    const int32_t claimed = atomicAdd(params.attention.num_claimed, 1);
    // Every CTA claims once in vain, and the last of them resets the counter for the next launch.
    if (claimed == num_work_tiles - 1) *params.attention.num_claimed = 0;
    return claimed + num_ctas < num_work_tiles ? claimed + num_ctas : kNoWork;
  }
};

// Tokens [first, last) of a tile, counted from its begin, and the tables of its request.
struct TileTokens {
  int32_t begin;
  int32_t first;
  int32_t last;

  TileTokens() = default;

  __device__ __forceinline__ TileTokens(const WorkItemFacts& item, int32_t tile) {
    begin = tile * kTileTokens;
    first = max(item.query_tile.kv_begin - begin, 0);
    // Not the query tile's end: what lies between is the request's own, and saves clearing V.
    last = min(item.request.kv_len - begin, kTileTokens);
  }
};

// Writes rows [first, end) of a query tile that sees no token, 32 at most, for a warp: each lane finds
// what is written of one of them.
__device__ __forceinline__ void write_empty_rows(const AttentionParams& params,
                                                 const QueryTile& query_tile,
                                                 const HeadBlock& block, const QueryRows& rows,
                                                 int first, int end) {
  const int count = end - first;
  if (count <= 0) return;
  const int row = first + min(static_cast<int>(lane_idx()), count - 1);
  const int32_t token = rows.token(row), head = rows.head(row);
  const RowResult result(params, query_tile, head, neg_inf(), 0.f);
  write_lse(params, token, head, result.lse);
  const int64_t place = token * params.out_token_stride + head * params.out_head_stride +
                        block.value_block * kValueDim;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float zero = 0.f * __shfl_sync(0xffffffff, result.factor, i);
    auto* out = static_cast<OutType::Storage*>(params.out) + __shfl_sync(0xffffffff, place, i);
#pragma unroll 1
    for (int dim = lane_idx() * 4; dim < kValueDim; dim += kWarpSize * 4) {
      store_four(params, out + dim, {zero, zero, zero, zero});
    }
  }
}

// Writes the rows of a query tile that sees no token: thread `thread` of `num_threads`, in whole warps.
__device__ __forceinline__ void write_empty(const AttentionParams& params, const WorkItem& item,
                                            int thread, int num_threads) {
  const HeadBlock block = item.block(params);
  QueryRows rows = item.rows(params);
#pragma unroll 1
  do {
#pragma unroll 1
    for (int first = thread / kWarpSize * kWarpSize; first < rows.num_rows; first += num_threads) {
      write_empty_rows(params, item.query_tile, block, rows, first,
                       min(rows.num_rows, first + kWarpSize));
    }
    // An invalid length has one query tile, which answers for all rows of the request.
  } while (item.query_tile.kv_end == kInvalidLength &&
           rows.advance(params.num_row_blocks * kRowTile));
}

}  // namespace jitattn
