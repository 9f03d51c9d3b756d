// Schedule that attention kernels read. Written by attention/schedule.cu.jinja. Twin:
// jitattn/kernels/common/params.py.
//
// Query tiles are the query rows of a request for the decode kernel, a block of them for the
// prefill kernel, packed token by token, head by head of a KV head's group. The KV that a query
// tile sees is cut into tiles; the tiles of all query tiles, one query tile after the other, are
// dealt to `num_slots` slots as contiguous ranges. One CTA for each head block computes a slot, so
// neighbouring CTAs read the same tokens at the same time. A slot's KV tiles of a query tile are
// one split of it; the splits are merged in order.
//
// Slots come in waves; those of a wave have equal cost, and those of later waves less. Each CTA
// computes a slot of the first wave and claims others when it is done, so that all end together
// however unequal their memory speed.
//
// If that leaves few CTAs idle, slots of the prefill kernel are whole query tiles instead: slot s
// is query tile s, the long ones come first, and nothing is cut or merged.
//
// A batch-invariant schedule cuts each query tile into splits that begin at multiples of their
// length, which depends on the position of the query tile's rows alone, and deals whole splits to
// slots, or whole query tiles. Rows of one query tile have splits of one length.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

struct alignas(16) Request {
  int32_t q_begin;  // first row of q
  int32_t q_len;    // 0 when the other kernel computes the request
  int32_t kv_len;
  int32_t is_invalid;  // a length exceeds the plan
};

// A block of query rows. Tokens [kv_begin, kv_end) are visible to one of them at least; kv_end = 0
// means none are.
struct alignas(16) QueryTile {
  int32_t request;
  int32_t first_row;  // packed row of the request
  int32_t kv_begin;
  int32_t kv_end;      // kInvalidLength: a length exceeds the plan: rows become NaN
  int32_t first_slot;  // the slots of its first and last split
  int32_t last_slot;
  int32_t num_splits;
  // Batch-invariant: tiles of a split, and rows that the query tile may have, in the lowest bits.
  int32_t fixed_splits;

  __device__ __forceinline__ bool has_fixed_splits() const { return fixed_splits > 0; }
  __device__ __forceinline__ int32_t split_tiles() const { return fixed_splits / kMaxRows; }
  __device__ __forceinline__ int32_t most_rows() const { return fixed_splits % kMaxRows; }
  static constexpr int32_t kMaxRows = 256;
};
constexpr int32_t kInvalidLength = -1;

// Begin of a slot and end of its predecessor: at KV tile `tile` of query tile `query_tile`.
struct alignas(8) SlotBoundary {
  int32_t query_tile;
  int32_t tile;
};

struct alignas(16) ScheduleHeader {
  int32_t num_slots;  // of whole query tiles as many as query tiles, and maybe more than max_slots
  int32_t num_query_tiles;
  int32_t q_end;  // rows of q that requests own; the others are padding
  // Of slots that are query tiles, slot s tile s, whose boundaries are not written: how many heads are
  // computed one after the other. Else 0.
  int32_t section_heads;

  __device__ __forceinline__ bool is_whole() const { return section_heads > 0; }
};

// Head block x % num_heads of slot x / num_heads, as x, that is work tile `work_tile`: those of
// `section_heads` heads of all slots come before the next heads'.
__device__ __forceinline__ int32_t work_of(int32_t work_tile, int32_t num_slots, int32_t num_heads,
                                           int32_t section_heads) {
  if (section_heads == num_heads) return work_tile;
  const int32_t section_work_tiles = num_slots * section_heads;
  const int32_t section = work_tile / section_work_tiles, rest = work_tile % section_work_tiles;
  return rest / section_heads * num_heads + section * section_heads + rest % section_heads;
}

// Work item of a warpgroup kernel: tiles [begin, end) of a query tile, for one block of heads.
struct alignas(16) WorkItemFacts {
  int32_t work;  // a work tile, or what is below
  int32_t slot;
  int32_t index;       // of the query tile
  int32_t last_index;  // of the slot's last
  int32_t first;       // tile of the query tile
  int32_t begin;
  int32_t end;
  int32_t is_first;  // of a CTA, read from `first_items`
  QueryTile query_tile;
  Request request;
};
constexpr int32_t kNoWork = -1;       // there is no further work item
constexpr int32_t kUnknownWork = -2;  // there may be one

// Pointers into one allocation, in this order; each part is 16-byte aligned.
struct Schedule {
  ScheduleHeader* header;     // [1]
  Request* requests;          // [batch_size]
  QueryTile* query_tiles;     // [max_query_tiles]
  SlotBoundary* boundaries;   // [max_slots + 1]
  int32_t* query_tile_begin;  // [batch_size + 1]; this and the next only the schedule kernel reads
  int64_t* cost_begin;        // [max_query_tiles + 1]
  // The first work item of each CTA, so that it begins after one load; kUnknownWork where that has no
  // tiles. [num_ctas] of warpgroup kernels.
  WorkItemFacts* first_items;
};

}  // namespace jitattn
