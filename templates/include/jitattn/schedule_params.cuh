// The launch argument of the schedule kernel. Twin: jitattn/params.py.
#pragma once

#include "jitattn/schedule.cuh"

namespace jitattn {

struct ScheduleParams {
  const void* seq_lens;  // [batch_size], int32 or int64
  Schedule schedule;
  const int32_t* kv_indptr;  // [batch_size + 1], may be null: entries a request may read
  int64_t seq_lens_stride;
  int64_t kv_indptr_stride;
  int64_t max_kv_len;    // of any request, in tokens
  int64_t num_entries;   // with kv_indptr: all there are
  int32_t entry_tokens;  // with kv_indptr: tokens of an entry
  int32_t seq_lens_are_int64;
  int32_t batch_size;
  int32_t max_slots;
  int32_t window_left;  // -1: all
  int32_t tile_tokens;
  int32_t request_cost;     // cost of visiting a request, in tiles
  int32_t min_slot_cost;    // no slot gets less, in tiles
  int32_t max_splits;       // batch-invariant: most splits of a request; else 0
  int32_t min_split_tiles;  // batch-invariant: no split but the last is shorter
};

}  // namespace jitattn
