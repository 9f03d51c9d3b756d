// What the schedule kernel writes and the attention kernels read. Twin: jitattn/params.py.
//
// The KV of a batch is cut into tiles; the tiles of all requests, one request after the other, are
// dealt to `num_slots` slots as contiguous ranges of equal cost. A slot is served by one CTA for
// each head block, so neighbouring CTAs read the same tokens at the same time. What a slot holds
// of a request is one split of it; the splits are merged in order.
//
// A batch-invariant schedule cuts each request into splits whose length depends on that request
// alone, and deals whole splits to slots.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

// One request. Tokens [kv_begin, kv_end) are visible; kv_end = 0 means none are.
struct alignas(16) RequestWork {
  int32_t kv_begin;
  int32_t kv_end;      // kInvalidLength: longer than its table, to be answered with NaN
  int32_t first_slot;  // the slots of its first and last split
  int32_t last_slot;
  int32_t num_splits;
  int32_t split_tiles;  // batch-invariant: tiles of a split; else 0
  int32_t unused[2];
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
