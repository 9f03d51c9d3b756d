// The launch arguments of the schedule kernel. Twins: jitattn/kernels/common/params.py.
#pragma once

#include "jitattn/schedule.cuh"

namespace jitattn {

struct ScheduleParams {
  const void* seq_lens;      // [batch_size], int32 or int64; null: those of lists
  const int32_t* kv_indptr;  // [batch_size + 1], may be null: entries a request may read
  const int32_t* qo_indptr;  // [batch_size + 1], may be null: one query token a request
  Schedule schedule;
  int64_t seq_lens_stride;
  int64_t kv_indptr_stride;
  int64_t qo_indptr_stride;
  int64_t max_kv_len;    // of any request, in tokens
  int64_t num_entries;   // with kv_indptr: all there are
  int32_t entry_tokens;  // with kv_indptr or lists: tokens of an entry
  int32_t seq_lens_are_int64;
  int32_t batch_size;
  int32_t max_q_len;
  int32_t is_causal;
  int32_t window_left;  // -1: all
  int32_t group_size;
  // Requests of more rows, and of more than one query token, are the prefill kernel's. 0: all that
  // are valid; -1: all, and the decode kernel has none.
  int32_t decode_rows;
  int32_t
      prefill_rows;    // rows of a query tile of the prefill kernel; 0: the schedule is for decode
  int32_t wave_slots;  // the most slots of a wave
  int32_t max_waves;
  int32_t num_ctas;         // of the attention kernel's grid
  int32_t num_first_items;  // num_ctas or none
  int32_t
      section_tokens;  // of a head, whose K and V stay in the L2 cache while many CTAs read them
  int32_t num_head_blocks;  // CTAs of a slot
  int32_t tile_tokens;
  int32_t tile_visit_cost;  // cost of visiting a query tile, in tiles
  int32_t min_slot_cost;    // no slot gets less, in tiles
  int32_t merge_cost;       // cost of publishing and merging a query tile's splits, in tiles
  int32_t split_cost;       // cost of merging sixteen splits; 0: their number makes no difference
  int32_t max_splits;       // batch-invariant: most splits of a query tile; else 0
  int32_t min_split_tiles;  // batch-invariant: no split but the last is shorter
  // Batch-invariant: whether a row's splits go by its own position; else by its request's length.
  int32_t splits_go_by_rows;
  // Whether the kernel writes the rows of query tiles that see no token apart, and never visits them.
  int32_t skips_empty_tiles;
};

// The same of lists, which are read instead of all tokens.
struct ListScheduleParams : ScheduleParams {
  const int32_t* counts;  // [batch_size, num_count_heads], may be null: entries that count
  int64_t count_stride;
  int64_t count_head_stride;
  int32_t num_count_heads;
  int32_t width;  // entries of a list
};

// Those of the kernels of a plan, one or two: a CTA each.
template <typename Params>
struct PlanParams {
  static constexpr int kMaxKernels = 2;
  Params of[kMaxKernels];
};

}  // namespace jitattn
