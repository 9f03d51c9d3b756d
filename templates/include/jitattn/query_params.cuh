// The launch argument of the kernel that dequantises queries.
// Twin: jitattn/kernels/attention/params.py.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

struct QueryParams {
  const uint8_t* q;     // e4m3 [num_tokens, num_heads, head_dim]
  const float* scales;  // [num_tokens, num_heads], of strides that may be 0; null: `scale` is all
  uint16_t* out;        // float16 like q, contiguous
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t scale_token_stride;
  int64_t scale_head_stride;
  int64_t num_tokens;
  int32_t num_heads;
  int32_t row_vectors;  // of 16 elements
  float scale;
  int32_t q_is_aligned;  // rows begin at multiples of a vector
};

}  // namespace jitattn
