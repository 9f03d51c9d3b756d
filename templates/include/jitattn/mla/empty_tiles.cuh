// Rows of query tiles that see no token: those who load Q write them when they have loaded all, beside
// products, so that nobody's work waits for them.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/work_items.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/lanes.cuh"

namespace jitattn {

// Rows that a warp writes at a time.
constexpr int kEmptyRows = 8;
constexpr int kRowGroups = kRowTile / kEmptyRows;

// A group of rows of a head block of a query tile.
struct EmptyRows {
  int32_t query_tile;
  int32_t block;
  int32_t first;

  __device__ __forceinline__ EmptyRows(const AttentionParams& params, int32_t index)
      : first(index % kRowGroups * kEmptyRows) {
    const int32_t work = index / kRowGroups;
    query_tile = params.num_head_blocks.divide(work);
    block = work - query_tile * params.num_head_blocks;
  }
};

// As kernels see it: run() may get a table that allows less than the planned one.
__device__ __forceinline__ QueryTile find_query_tile(const KernelParams& params, int32_t index) {
  QueryTile query_tile = params.attention.schedule.query_tiles[index];
  const Request& request = params.attention.schedule.requests[query_tile.request];
  const int32_t kv_len = PageTable::kIsList ? query_tile.kv_end : request.kv_len;
  if (query_tile.kv_end > 0 && !params.pages.holds(query_tile.request, kv_len)) {
    query_tile.kv_end = kInvalidLength;
  }
  return query_tile;
}

__device__ __forceinline__ void write_group(const KernelParams& params, int32_t index) {
  const AttentionParams& attention = params.attention;
  const EmptyRows group(attention, index);
  const QueryTile query_tile = find_query_tile(params, group.query_tile);
  const HeadBlock block(attention, group.block);
  QueryRows rows(attention, block, query_tile);
#pragma unroll 1
  do {
    write_empty_rows(attention, query_tile, block, rows, group.first,
                     min(rows.num_rows, group.first + kEmptyRows));
    // An invalid length has one query tile, which answers for all rows of the request.
  } while (query_tile.kv_end == kInvalidLength &&
           rows.advance(attention.num_row_blocks * kRowTile));
}

// For warp `own` of so many of each CTA. Each lane looks at a group, and groups side by side are other
// warps'.
__device__ __forceinline__ void write_empty_tiles(const KernelParams& params, int own,
                                                  int count_own) {
  const AttentionParams& attention = params.attention;
  const int32_t num_warps = gridDim.x * count_own, warp = own * gridDim.x + blockIdx.x;
  const int32_t count =
      attention.schedule.header->num_query_tiles * attention.num_head_blocks * kRowGroups;
#pragma unroll 1
  for (int32_t base = warp; base < count; base += kWarpSize * num_warps) {
    const int32_t index = base + lane_idx() * num_warps;
    bool is_empty = false;
    if (index < count) {
      const EmptyRows group(attention, index);
      is_empty = find_query_tile(params, group.query_tile).kv_end <= 0;
    }
    uint32_t found = __ballot_sync(0xffffffff, is_empty);
#pragma unroll 1
    for (; found; found &= found - 1) {
      write_group(params, base + (__ffs(found) - 1) * num_warps);
    }
  }
}

}  // namespace jitattn
