// The launch argument of the kernel that merges attention states.
// Twin: jitattn/kernels/merge/params.py.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

struct MergeParams {
  const void* outs;   // [num_states, num_tokens, num_heads, head_dim]
  const float* lses;  // [num_states, num_tokens, num_heads], natural logarithm
  void* out;          // [num_tokens, num_heads, head_dim], contiguous
  float* lse;         // [num_tokens, num_heads], contiguous
  int64_t outs_state_stride;
  int64_t outs_token_stride;
  int64_t outs_head_stride;
  int64_t lses_state_stride;
  int64_t lses_token_stride;
  int64_t lses_head_stride;
  int64_t num_tokens;
  int64_t num_heads;
  int32_t num_states;
  int32_t head_dim;
};

}  // namespace jitattn
