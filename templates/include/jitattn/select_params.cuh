// Arguments of the kernels that choose tokens and pages. Twin: jitattn/kernels/select/params.py.
#pragma once

#include "jitattn/lanes.cuh"
#include "jitattn/page_list.cuh"
#include "jitattn/request_rows.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// Neighbouring query tokens of one request.
struct TokenGroup {
  int32_t request;   // batch_size: rows of q behind the last request's
  int32_t kv_len;    // of the request; 0 behind the last
  int32_t num_rows;  // of q; 0: an empty group
  int32_t position;  // of the first row in its request; negative where it sees nothing
  int64_t first;     // row of q
  bool is_valid;     // whether lengths are what the caller said
};

// The query tokens of a batch, which are the last ones of their requests.
struct QueryRows {
  const int32_t* qo_indptr;  // [batch_size + 1]; null: one query token a request
  int64_t indptr_stride;
  Lengths seq_lens;
  int64_t num_tokens;  // rows of q
  int32_t max_q_len;
  int32_t max_kv_len;

  // First row of a request; of `batch_size`, the end of the last one's.
  __device__ __forceinline__ int64_t begin(int32_t request) const {
    const int64_t row = qo_indptr ? qo_indptr[request * indptr_stride] : request;
    return row < 0 ? 0 : row < num_tokens ? row : num_tokens;
  }

  // Group `index` of kRows rows at most, found by all lanes of a warp together. Those of request r
  // begin at begin(r) / kRows + r, which leaves each as many as it needs: no prefix sums.
  template <int kRows>
  __device__ __forceinline__ TokenGroup group(int64_t index) const {
    const auto group_of = [&](int32_t request) { return begin(request) / kRows + request; };
    const int32_t request = qo_indptr ? last_at(index, group_of) : static_cast<int32_t>(index);
    const int64_t part = qo_indptr ? max(index - group_of(request), int64_t(0)) : 0;
    return group_at(request, begin(request) + part * kRows, kRows);
  }

  // The group of one row of q, found by all lanes of a warp together.
  __device__ __forceinline__ TokenGroup token(int64_t row) const {
    const auto row_of = [&](int32_t request) { return begin(request); };
    const int32_t request = qo_indptr ? last_at(row, row_of) : static_cast<int32_t>(row);
    return group_at(request, row, 1);
  }

 private:
  // The last request whose number is `index` or less; numbers rise. Each lane of the warp
  // looks at the first request of a 32nd of what is left.
  template <typename Number>
  __device__ __forceinline__ int32_t last_at(int64_t index, Number number_of) const {
    int32_t request = 0;
#pragma unroll 1
    for (int32_t left = seq_lens.batch_size + 1; left > 1;) {
      const int32_t step = (left + kWarpSize - 1) / kWarpSize, shift = lane_idx() * step;
      const bool is_reached = shift < left && number_of(request + shift) <= index;
      const int32_t reached = max(__popc(__ballot_sync(0xffffffffu, is_reached)) - 1, 0) * step;
      request += reached;
      left = min(step, left - reached);
    }
    return request;
  }

  __device__ __forceinline__ TokenGroup group_at(int32_t request, int64_t first,
                                                 int32_t max_rows) const {
    const bool is_last = request >= seq_lens.batch_size;
    const int64_t start = begin(request), end = is_last ? num_tokens : begin(request + 1);
    const int64_t left = end - first;
    TokenGroup group;
    group.request = request;
    group.kv_len = is_last ? 0 : static_cast<int32_t>(seq_lens.of(request));
    group.num_rows = left < 0 ? 0 : left < max_rows ? static_cast<int32_t>(left) : max_rows;
    group.position = group.kv_len - static_cast<int32_t>(left);
    group.first = first;
    group.is_valid = is_last || (end - start <= max_q_len && group.kv_len <= max_kv_len);
    return group;
  }
};

// A cache of 8-bit keys with a scale each; strides and offsets in bytes.
struct IndexCache {
  const uint8_t* keys;    // [num_pages, page_size, head_dim]
  const uint8_t* scales;  // [num_pages, page_size] of float32
  int64_t num_pages;
  int64_t page_stride;
  int64_t key_stride;
  int64_t scale_shift;  // between scales, less than between keys: mostly negative
  int32_t is_aligned;   // whether keys begin at multiples of 16 bytes, not of 4 only
};

struct IndexLogitsParams {
  const uint8_t* q;      // [num_tokens, num_heads, head_dim]
  const float* weights;  // [num_tokens, num_heads]
  float* out;            // [num_tokens, max_kv_len]
  IndexCache cache;
  PageList pages;
  QueryRows rows;
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t weights_token_stride;
  int64_t weights_head_stride;
  int64_t out_stride;
  int32_t num_heads;
  int32_t num_chunks;    // CTAs of a group, each with the next chunk of its keys
  int32_t chunk_tokens;  // a multiple of the tile
};

// Of the kernels that choose the largest of a row: tokens of a query token, or pages of a KV head.
struct ChoiceParams {
  const float* scores;  // [num_rows, max_kv_len], or [batch_size, num_kv_heads, number of pages]
  int32_t* entries;     // [num_tokens, k] slots, or [batch_size, num_kv_heads, k] pages
  int32_t* numbers;     // like `entries` of pages
  int32_t* counts;      // [num_tokens], or [batch_size, num_kv_heads]
  PageList pages;
  QueryRows rows;
  int64_t scores_stride;
  int64_t entries_stride;       // of tokens, or of requests
  int64_t entries_head_stride;  // of pages, as what follows
  int64_t numbers_stride;
  int64_t numbers_head_stride;
  int64_t counts_stride;
  int64_t counts_head_stride;
  int32_t num_kv_heads;
  int32_t k;
  int32_t is_aligned;  // whether rows of scores begin at multiples of 16 bytes
};

// Least and largest values of the keys of a page; strides of bounds in elements.
struct PageBoundsParams {
  const void* keys;  // [num_pages, page_size, num_kv_heads, head_dim]
  uint16_t* bounds;  // [num_pages, 2, num_kv_heads, head_dim]
  PageList pages;
  QueryRows rows;
  int64_t num_pages;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t bounds_stride;
  int64_t bounds_side_stride;
  int64_t bounds_head_stride;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t num_parts;  // pages of a request that may have changed, the last ones
  int32_t is_update;  // whether pages without query tokens are left as they are
};

struct PageScoresParams {
  const void* q;           // [batch_size, num_qo_heads, head_dim]
  const uint16_t* bounds;  // [num_pages, 2, num_kv_heads, head_dim]
  float* scores;           // [batch_size, num_kv_heads, max_pages]
  PageList pages;
  Lengths seq_lens;
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t num_pages;
  int64_t bounds_stride;
  int64_t bounds_side_stride;
  int64_t bounds_head_stride;
  FloatCode q_code;
  int32_t group_size;
  int32_t num_kv_heads;
  int32_t max_pages;
  int32_t num_chunks;  // CTAs of a KV head, each with the next chunk of its pages
  int32_t chunk_pages;
};

}  // namespace jitattn
