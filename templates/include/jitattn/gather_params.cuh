// The launch argument of the kernel that gathers K and V. Twin: jitattn/kernels/pages/params.py.
#pragma once

#include "jitattn/page_list.cuh"
#include "jitattn/request_rows.cuh"

namespace jitattn {

// K or V, and where its tokens go.
struct GatherSide {
  const void* cache;            // [num_pages, page_size, num_kv_heads, head_dim], any strides
  void* out;                    // [num_tokens, num_kv_heads, head_dim], contiguous
  const uint8_t* block_scales;  // [num_pages, page_size, num_kv_heads, bytes of a row]
  // In elements; of four bits in bytes.
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t block_page_stride;
  int64_t block_token_stride;
  int64_t block_head_stride;
  int64_t num_pages;
  Scale scale;  // 1 where the cache is not quantised
  // In vectors, or in elements where not everything is aligned.
  Divisor row_vectors;
  Divisor head_vectors;
};

struct GatherParams {
  GatherSide k;
  GatherSide v;
  PageList pages;
  Lengths seq_lens;
  int32_t* kv_indptr;  // [batch_size + 1]
  int64_t num_tokens;  // rows of out
  int32_t tile_rows;   // rows of a CTA, at most kMaxTileRows
  int32_t is_aligned;  // rows begin at multiples of a vector, in the caches and in out
};

}  // namespace jitattn
