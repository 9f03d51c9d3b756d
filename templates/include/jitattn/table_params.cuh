// The launch arguments of the kernels that make tables of a batch.
// Twin: jitattn/kernels/pages/params.py.
#pragma once

#include "jitattn/page_list.cuh"
#include "jitattn/request_rows.cuh"

namespace jitattn {

struct BlockTableParams {
  int32_t* table;  // [batch_size, width]
  PageList slots;  // the slot of every token
  Lengths seq_lens;
  Lengths kv_start;      // `values` may be null: 0
  const void* slot_map;  // [num_slots], int32 or int64: another slot for each; may be null
  int64_t row_stride;
  int64_t column_stride;
  int64_t slot_map_stride;
  int64_t num_slots;
  int32_t slot_map_is_int64;
  int32_t width;
  int32_t lanes_log2;  // threads that check the tokens of a page
};

struct BatchInfoParams {
  Lengths seq_lens;
  Lengths q_lens;
  PageList pages;      // `entries` is null where there are none
  int32_t* qo_indptr;  // [batch_size + 1]
  int32_t* kv_indptr;  // [batch_size + 1]
  int32_t* requests;   // [num_tokens]
  int32_t* positions;  // [num_tokens]
  int64_t* slots;      // [num_tokens], null without pages
  int64_t num_tokens;
};

}  // namespace jitattn
