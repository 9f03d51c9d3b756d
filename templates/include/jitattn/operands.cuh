// Numbers that launch arguments hold: divisors and scales. Twin: jitattn/spec/params.py.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

// A number to divide by, and what makes that one multiplication.
struct Divisor {
  int32_t value;
  uint32_t magic;
  int32_t shift;

  __device__ __forceinline__ operator int32_t() const { return value; }
  // x / value, for x from 0 to 2**31 - 1.
  __device__ __forceinline__ int32_t divide(int32_t x) const {
    return __umulhi(2u * x, magic) >> shift;
  }
};

// Scale of a stored value of a KV head.
struct Scale {
  const float* values;  // [num_kv_heads], or one with a stride of 0; null: `value`
  int64_t stride;
  float value;

  __device__ __forceinline__ float of(int32_t kv_head) const {
    return values ? values[kv_head * stride] : value;
  }
};

// Scales of stored queries, of a token and a head.
struct QueryScales {
  const float* values;  // [num_tokens, num_qo_heads], strides of 0 where one serves several; null:
  int64_t token_stride;
  int64_t head_stride;
  float value;  // for all

  // NaN instead of an infinity, which is no scale.
  __device__ __forceinline__ float of(int64_t token, int64_t head) const {
    const float scale = values ? values[token * token_stride + head * head_stride] : value;
    return scale - scale == 0.f ? scale : scale - scale;
  }
};

}  // namespace jitattn
