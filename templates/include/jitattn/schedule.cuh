// What the schedule kernel writes and the attention kernels read. Twin: jitattn/params.py.
//
// The KV of a batch is cut into tiles; the tiles of all requests, one request after the other, are
// dealt to `num_slots` slots as contiguous ranges of equal cost. A slot is served by one CTA for
// each head block, so neighbouring CTAs read the same tokens at the same time. A request that lies
// in several slots has one split in each, merged in slot order.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

// One request. Tokens [kv_begin, kv_end) are visible; kv_end = 0 means none are.
struct alignas(16) RequestWork {
  int32_t kv_begin;
  int32_t kv_end;      // kInvalidLength: longer than its table, to be answered with NaN
  int32_t first_slot;  // the slot of its first tile
  int32_t num_splits;  // slots that hold a tile of it
};
constexpr int32_t kInvalidLength = -1;

// Where a slot begins, and where its predecessor ends: at tile `tile` of request `request`.
struct alignas(8) SlotBoundary {
  int32_t request;
  int32_t tile;
};

struct alignas(16) ScheduleHeader {
  int32_t num_slots;
  int32_t batch_size;
  int32_t unused[2];
};

// Pointers into one allocation, in this order; each part is 16-byte aligned.
struct Schedule {
  ScheduleHeader* header;    // [1]
  RequestWork* requests;     // [batch_size]
  SlotBoundary* boundaries;  // [max_slots + 1]
  int64_t* cost_begin;       // [batch_size + 1], read by the schedule kernel only
};

}  // namespace jitattn
