// The launch argument of the kernel that copies pages. Twin: jitattn/kernels/pages/params.py.
#pragma once

#include "jitattn/operands.cuh"

namespace jitattn {

constexpr int kMaxPools = 128;
constexpr int kPageDims = 4;

// Base addresses of a source and a destination.
struct CopyPool {
  const void* src;
  void* dst;
};

// A dimension of a page, in words.
struct CopyDim {
  int64_t src_stride;
  int64_t dst_stride;
  Divisor size;
};

struct CopyParams {
  const void* pairs;  // [num_pairs, 2], int32 or int64
  int64_t pair_stride;
  int64_t side_stride;
  int64_t num_parts;  // of all pairs in all pools
  int64_t src_page_stride;
  int64_t dst_page_stride;
  int64_t num_src_pages;
  int64_t num_dst_pages;
  CopyDim dims[kPageDims];  // the innermost one last
  int32_t pairs_are_int64;
  int32_t num_pools;
  int32_t page_parts;  // of a page, kPartWords each
  int32_t page_words;
  int32_t word_bytes;  // 1, 2, 4, 8 or 16
  CopyPool pools[kMaxPools];
};

}  // namespace jitattn
