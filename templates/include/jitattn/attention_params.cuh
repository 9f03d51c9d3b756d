// The launch argument of an attention kernel, but for its page table.
// Twin: jitattn/kernels/common/params.py.
#pragma once

#include "jitattn/operands.cuh"
#include "jitattn/schedule.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// Custom masks, by how a row of the mask is found. Twin: jitattn/kernels/common/params.py.
enum class MaskKind : int32_t {
  kBool = 0,    // one byte a key, over the last `mask_width` keys of a request
  kPacked = 1,  // one bit a key, likewise
  kRagged = 2,  // one bit a key, over all keys; rows of whole bytes from mask_indptr[request] on
};

// Tensor map of K or V, as the driver encodes it, with dimensions {elements of a segment, tokens,
// segments of a row, heads, pages}.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// The scales of the blocks of K or V, in bytes: [num_pages, page_size, num_kv_heads, bytes of a
// row], any strides. In the place of a map, since caches with scales have none.
// Twin: jitattn/kernels/common/params.py.
struct alignas(64) BlockScales {
  const uint8_t* scales;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  uint64_t unused[12];
};
static_assert(sizeof(BlockScales) == sizeof(TensorMap), "either has the same room");

struct AttentionParams {
  const uint16_t* q;           // [num_tokens, num_qo_heads, head_dim]
  const void* k;               // [num_pages, page_size, num_kv_heads, head_dim], any strides
  const void* v;               // likewise, head_dim_vo
  void* out;                   // [num_tokens, num_qo_heads, head_dim_vo]
  float* lse;                  // [num_tokens, num_qo_heads], may be null
  const void* sinks;           // [num_qo_heads], may be null
  float* partials;             // [rows, kValueDim], see PartialRows
  float2* partial_sums;        // [rows]: maximum (log2), sum
  int32_t* counters;           // [max_slots, num_head_blocks], zero between launches
  int32_t* num_claimed;        // work tiles that CTAs claimed; likewise
  const uint8_t* mask;         // by mask_kind
  const int32_t* mask_indptr;  // [batch_size + 1], in bytes
  Schedule schedule;
  Scale k_scale;  // of quantised caches
  Scale v_scale;

  // Strides in elements, of four bits in bytes; the last dimension is contiguous.
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
  int64_t mask_row_stride;  // in bytes
  int64_t mask_indptr_stride;
  int64_t mask_bytes;  // kRagged: of all rows

  int32_t num_tokens;  // rows of q and out
  int32_t num_qo_heads;
  Divisor group_size;
  Divisor num_row_blocks;     // decode: row tiles that the group of a KV head takes
  Divisor num_head_blocks;    // num_kv_heads * num_row_blocks * kNumValueBlocks
  int32_t claims_work_tiles;  // whether CTAs claim work tiles, or take them a grid apart
  int32_t max_splits;         // batch-invariant: most splits of a query tile; else 0
  int32_t max_slots;          // of the schedule
  int32_t is_causal;
  int32_t window_left;  // -1: all
  int32_t has_padding;  // q may have rows past the last request's
  MaskKind mask_kind;
  int32_t mask_width;
  FloatCode sink_code;
  int32_t q_is_aligned;  // eight elements of q can be loaded at once
  int32_t
      early_kv;  // keys and values before this step's may be read while the previous kernel runs
  int32_t out_is_aligned;  // four elements of out can be stored at once
  int32_t is_second;       // of a run's kernels: the first has waited for what came before
  // Without a soft cap: scores in log2 units are q.k * score_scale. With one they are
  // cap_log2 * tanh(q.k * score_scale).
  float score_scale;
  float cap_log2;
};

}  // namespace jitattn
