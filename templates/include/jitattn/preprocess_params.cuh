// The launch argument of the kernel that puts Q, K and V where attention reads them, but for its
// page table. Twin: jitattn/kernels/preprocess/params.py.
#pragma once

#include "jitattn/attention_params.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// In elements; of four bits in bytes.
struct RowStrides {
  int64_t token;
  int64_t head;
};
struct CacheStrides {
  int64_t page;
  int64_t token;
  int64_t head;
};

struct PreprocessParams {
  const void* q;            // [num_tokens, num_qo_heads, head_dim]
  const void* k;            // [num_tokens, num_kv_heads, head_dim]
  const void* v;            // [num_tokens, num_kv_heads, head_dim_vo]
  void* q_out;              // like q; may be q
  void* k_cache;            // [num_k_pages, page_size, num_kv_heads, head_dim]
  void* v_cache;            // likewise
  uint8_t* k_block_scales;  // [num_k_pages, page_size, num_kv_heads, bytes of a row]
  uint8_t* v_block_scales;
  const void* seq_lens;        // [batch_size], this step's tokens included; null with slots alone
  const int32_t* qo_indptr;    // [batch_size + 1]; null: a token a request, or all tokens
  const void* slots;           // [num_tokens], page * page_size + place; negative: none
  const void* positions;       // [num_tokens] or [3, num_tokens]; null: where the token is written
  const void* position_delta;  // [batch_size], added to positions that are not given; may be null
  const void* q_bias;          // [num_qo_heads, head_dim] and so on, in the type of q
  const void* k_bias;
  const void* v_bias;
  const void* q_norm;     // [head_dim], or null
  const void* k_norm;     // likewise
  const uint64_t* turns;  // [rotary_dim / 2], 2**-64 turns a token
  const int32_t* axes;    // [rotary_dim / 2], which of three positions; null: the only one
  Scale q_scale;
  Scale k_scale;
  Scale v_scale;
  RowStrides q_strides;
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides out_strides;
  CacheStrides k_cache_strides;
  CacheStrides v_cache_strides;
  CacheStrides k_block_strides;
  CacheStrides v_block_strides;
  int64_t seq_lens_stride;
  int64_t qo_indptr_stride;
  int64_t slots_stride;
  int64_t axis_stride;  // of positions: 0 where they have one dimension
  int64_t position_stride;
  int64_t delta_stride;
  int32_t seq_lens_are_int64;
  int32_t slots_are_int64;
  int32_t positions_are_int64;
  int32_t deltas_are_int64;
  int32_t num_tokens;
  int32_t batch_size;
  int32_t num_qo_heads;  // 0: there is no q
  int32_t num_kv_heads;
  int32_t num_k_pages;
  int32_t num_v_pages;
  int32_t max_kv_len;  // that the table has room for
  int32_t rotary_dim;
  int32_t zero_tail;  // whether the rest of a request's last page becomes 0
  int32_t q_norm_code;
  int32_t k_norm_code;
  Divisor groups_per_token;  // stride of a token group's rows
  float norm_eps;
  float attention_factor;  // of cos and sin
};

}  // namespace jitattn
