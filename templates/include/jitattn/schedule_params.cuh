// The launch argument of the schedule kernel. Twin: jitattn/params.py.
#pragma once

#include "jitattn/schedule.cuh"

namespace jitattn {

struct ScheduleParams {
  const void* seq_lens;  // [batch_size], int32 or int64
  Schedule schedule;
  int64_t seq_lens_stride;
  int64_t max_kv_len;  // what the table can hold, in tokens
  int32_t seq_lens_are_int64;
  int32_t batch_size;
  int32_t max_slots;
  int32_t window_left;  // -1: all
  int32_t tile_tokens;
  int32_t request_cost;   // cost of visiting a request, in tiles
  int32_t min_slot_cost;  // no slot gets less, in tiles
};

}  // namespace jitattn
