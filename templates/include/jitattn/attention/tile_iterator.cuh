// Iterator over the KV tiles of a CTA's work tiles.
#pragma once

#include "jitattn/attention/work_queue.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Steps through the KV tiles of a CTA's work tiles, across query tiles, one step ahead of the
// copies.
struct TileIterator {
  const KernelParams& params;
  const Queue& queue;
  int32_t index;  // of the work tile
  int32_t work;
  bool is_done;             // there is no further work tile
  int32_t last_query_tile;  // of its slot

  // The step whose page ids are under way.
  int32_t query_tile;
  int32_t tile;
  int32_t tile_end;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t early_end;  // tokens from here on are not to be read before the previous kernel's end
  PageTable::Row page_row;

  // Its table entries, and the tokens of its slice that exist: [first, last).
  int32_t k_id;
  int32_t v_id;
  int32_t slice;
  int32_t first;
  int32_t last;

  // The prefill kernel waits first thing.
  static constexpr bool kMayBeEarly = !kSharesTiles;
  static constexpr bool kIsContiguousSlice = PageTable::kContiguousTokens % kSliceTokens == 0;

  __device__ __forceinline__ TileIterator(const KernelParams& params, const Queue& queue)
      : params(params), queue(queue) {
    index = -1;
    work = last_query_tile = query_tile = 0;
    is_done = false;
    tile = tile_end = 0;
    kv_begin = kv_end = early_end = 0;
    page_row = {};
    next_work_tile();
    next_step();
  }

  // Moves to the next step and loads its page ids; none past the last work tile.
  __device__ __forceinline__ void next_step() {
    ++tile;
#pragma unroll 1
    while (tile >= tile_end && !is_done) {
      if (query_tile < last_query_tile) {
        next_query_tile();
      } else if (Queue::kHasOneWorkTile) {
        break;
      } else {
        next_work_tile();
      }
    }
    slice = tile * kTileTokens + warp_idx() * kSliceTokens;
    first = max(kv_begin - slice, 0);
    last = tile < tile_end ? min(kv_end - slice, kSliceTokens) : 0;
    fetch_page_ids();
  }

  // To be called before tokens of the step are copied.
  __device__ __forceinline__ void wait_for_tokens() const {
    if (kMayBeEarly && first < last && slice + last > early_end) wait_for_previous_kernel();
  }

 private:
  __device__ __forceinline__ void next_work_tile() {
    const int32_t next = queue.work_tile(++index);
    is_done = next == kNoWork;
    if (is_done) return;
    work = next;
    const SlotRange slot(params.attention, work);
    last_query_tile = slot.last_query_tile;
    query_tile = slot.begin.query_tile - 1;
  }

  __device__ __forceinline__ void next_query_tile() {
    ++query_tile;
    const TileRange tiles(params, SlotRange(params.attention, work), query_tile);
    if (tiles.begin >= tiles.end) return;
    tile = tiles.begin;
    tile_end = tiles.end;
    kv_begin = tiles.query_tile.kv_begin;
    kv_end = tiles.query_tile.kv_end;
    if constexpr (kMayBeEarly) early_end = tiles.early_end;
    page_row = params.pages.row(tiles.query_tile.request);
  }

  // Reads only entries of tokens that exist. If a slice may not be contiguous, each lane reads the
  // entry of its own token, lane % kSliceTokens.
  __device__ __forceinline__ void fetch_page_ids() {
    const int token = kIsContiguousSlice ? first : lane_idx() % kSliceTokens;
    k_id = v_id = 0;
    if (token < first || token >= last) return;
    k_id = params.pages.k_id(page_row, slice + token);
    v_id = PageTable::kSharesPages ? k_id : params.pages.v_id(page_row, slice + token);
  }
};

}  // namespace jitattn
