// The launch argument of a decode kernel, but for its page table. Twin: jitattn/params.py.
#pragma once

#include "jitattn/schedule.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

struct DecodeParams {
  const uint16_t* q;     // [batch_size, num_qo_heads, head_dim]
  const uint16_t* k;     // [num_pages, page_size, num_kv_heads, head_dim], any strides
  const uint16_t* v;     // like k
  void* out;             // [batch_size, num_qo_heads, head_dim_vo]
  float* lse;            // [batch_size, num_qo_heads], may be null
  const void* sinks;     // [num_qo_heads], may be null
  float* partials;       // [max_slots, 2, splits, num_head_blocks, kRowTile, kValueDim]
  float2* partial_sums;  // [max_slots, 2, splits, num_head_blocks, kRowTile]: maximum (log2), sum
  int32_t* counters;     // [max_slots, num_head_blocks], zero between launches
  Schedule schedule;

  // Strides in elements; the last dimension is contiguous.
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t k_page_stride;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int64_t v_page_stride;
  int64_t v_token_stride;
  int64_t v_head_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  int64_t sink_stride;

  int32_t group_size;
  int32_t num_row_blocks;   // row tiles that the group of a KV head takes
  int32_t num_head_blocks;  // num_kv_heads * num_row_blocks
  int32_t max_splits;       // batch-invariant: partial rows of a request; else 0
  FloatCode sink_code;
  int32_t q_is_aligned;    // two elements of q can be loaded at once
  int32_t out_is_aligned;  // four elements of out can be stored at once
  // Without a soft cap: scores in log2 units are q.k * score_scale. With one they are
  // cap_log2 * tanh(q.k * score_scale).
  float score_scale;
  float cap_log2;
};

}  // namespace jitattn
