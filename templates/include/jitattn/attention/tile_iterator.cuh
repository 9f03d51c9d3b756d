// Iterator over the KV tiles of a CTA's work tiles.
#pragma once

#include "jitattn/attention/work_queue.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// The row of a query tile in the table. Lists have one for each KV head, of which the keys count
// that some row of the query tile may see.
template <typename Table>
__device__ __forceinline__ typename Table::Row row_of(const Table& pages,
                                                      const AttentionParams& attention,
                                                      const QueryTile& query_tile, int32_t work) {
  if constexpr (Table::kIsList) {
    const Request request = attention.schedule.requests[query_tile.request];
    const int32_t window = attention.window_left;
    const int32_t first_key = window < 0 ? 0 : request.kv_len - request.q_len - window;
    return pages.row(query_tile.request, HeadBlock(attention, work).kv_head, max(first_key, 0),
                     request.kv_len);
  } else {
    return pages.row(query_tile.request);
  }
}

// Positions of the tokens of the steps under way, of lists: a lane has that of its token of a
// slice, lane % kSliceTokens.
template <bool kIsList>
struct StepPositions {
  __device__ __forceinline__ void clear() {}
  __device__ __forceinline__ void push(int32_t) {}
  __device__ __forceinline__ int32_t oldest() const { return 0; }
};
template <>
struct StepPositions<true> {
  int32_t positions[kNumStages];

  __device__ __forceinline__ void clear() {
    for_each<kNumStages>([&](int i) { positions[i] = kNone; });
  }
  __device__ __forceinline__ void push(int32_t position) {
    for_each<kNumStages - 1>([&](int i) { positions[i] = positions[i + 1]; });
    positions[kNumStages - 1] = position;
  }
  __device__ __forceinline__ int32_t oldest() const { return positions[0]; }
};

// Rows of a slice that a list has, a bit each; of tables all.
template <bool kIsList>
struct ListedRows {
  // Of a position a lane. For whole warps.
  static __device__ __forceinline__ ListedRows of(int32_t) { return {}; }
  __device__ __forceinline__ bool has(int) const { return true; }
};
template <>
struct ListedRows<true> {
  uint32_t bits;

  static __device__ __forceinline__ ListedRows of(int32_t position) {
    return {__ballot_sync(0xffffffff, position >= 0)};
  }
  __device__ __forceinline__ bool has(int row) const { return bits >> row & 1; }
};
using Listed = ListedRows<PageTable::kIsList>;

// Whether all tokens of a slice lie one after the other, so that one entry of the table stands for
// them; else each lane has the entries of its own tokens, kWarpSize apart.
constexpr bool kIsContiguousSlice = PageTable::kContiguousTokens % kSliceTokens == 0;
constexpr int kLaneTokens = kSliceTokens > kWarpSize ? kSliceTokens / kWarpSize : 1;
constexpr int kLaneEntries = kIsContiguousSlice ? 1 : kLaneTokens;
static_assert(kLaneTokens <= 2, "a lane has one or two tokens");
static_assert(!PageTable::kIsList || kLaneTokens == 1, "of lists, a lane has one token");

struct LaneIds {
  int32_t ids[kLaneEntries];
};

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

  // Its table entries, unchecked at first, and the tokens of its slice that exist: [first, last).
  LaneIds k;
  LaneIds v;
  int32_t slice;
  int32_t first;
  int32_t last;
  int32_t position;  // of lists: of this lane's token, or the number that says it, at first

  // The prefill kernel waits first thing.
  static constexpr bool kMayBeEarly = !kSharesTiles;

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

  // To be called once before the step's entries and positions are used: what lists say has to come first.
  __device__ __forceinline__ void check_entries() { check_listed(params.pages); }

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
    page_row = row_of(params.pages, params.attention, tiles.query_tile, work);
    if constexpr (kMayBeEarly) {
      if (!params.attention.early_kv && warp_idx() == 0) prefetch_query(tiles.query_tile);
    }
  }

  // Asks for Q of the query tile, which is loaded some steps from now, all at once.
  __device__ __forceinline__ void prefetch_query(const QueryTile& query_tile) const {
    const AttentionParams& attention = params.attention;
    constexpr int kItemBytes = kHasFP8Queries ? 1 : 2, kLine = 128 / kItemBytes;  // elements
    constexpr int kLines = (kKeyDim + kLine - 1) / kLine;                         // of a row
    const QueryRows rows(attention, HeadBlock(attention, work), query_tile);
    const auto* q = reinterpret_cast<const uint8_t*>(attention.q);
#pragma unroll 1
    for (int i = lane_idx(); i < rows.num_rows * kLines; i += kWarpSize) {
      const int row = i / kLines;
      const int64_t element = rows.token(row) * attention.q_token_stride +
                              rows.head(row) * attention.q_head_stride + i % kLines * kLine;
      prefetch_line(q + element * kItemBytes);
    }
  }

  // Reads only entries of tokens that exist. If a slice may not be contiguous, each lane reads
  // those of its own tokens, from lane % kSliceTokens on.
  __device__ __forceinline__ void fetch_page_ids() {
    const int begin = kIsContiguousSlice ? first : lane_idx() % kSliceTokens;
    for_each<kLaneEntries>([&](int i) {
      const int token = begin + i * kWarpSize;
      k.ids[i] = v.ids[i] = 0;
      if constexpr (PageTable::kIsList) return fetch_listed(params.pages, token);
      if (token < first || token >= last) return;
      k.ids[i] = params.pages.k_id(page_row, slice + token);
      v.ids[i] = PageTable::kSharesPages ? k.ids[i] : params.pages.v_id(page_row, slice + token);
    });
  }

  // The same of a list, whose entries may be none, and what says the position of this lane's token.
  template <typename Table>
  __device__ __forceinline__ void fetch_listed(const Table& pages, int token) {
    if constexpr (Table::kIsList) {
      const int own = lane_idx() % kSliceTokens;
      k.ids[0] = kNone;
      if (token >= first && token < last) k.ids[0] = pages.k_id(page_row, slice + token);
      if (own >= first && own < last) position = pages.number(page_row, slice + own);
    }
  }

  template <typename Table>
  __device__ __forceinline__ void check_listed(const Table& pages) {
    if constexpr (Table::kIsList) {
      const int own = lane_idx() % kSliceTokens;
      const int32_t id = k.ids[0] = v.ids[0] = pages.checked(k.ids[0]);
      const int32_t key = pages.position(page_row, slice + own, position);
      const bool exists = own >= first && own < last;
      position = !exists ? kNone : id < 0 ? id : key;
    }
  }
};

}  // namespace jitattn
