// Arguments of MLA kernels besides AttentionParams, whose q is q_nope, k the latents and v the
// k_pe. Twin: jitattn/kernels/mla/params.py.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

struct MLAParams {
  const uint16_t* q_pe;        // [num_tokens, num_heads, qk_rope_head_dim]
  const float* latent_scales;  // [num_pages, page_size, kv_lora_rank / 128], of rows that hold them

  // Strides in elements; the last dimension is contiguous.
  int64_t q_pe_token_stride;
  int64_t q_pe_head_stride;
  int64_t scale_page_stride;
  int64_t scale_token_stride;

  int32_t q_pe_is_aligned;  // eight elements of q_pe can be loaded at once
  // Whether CTAs merge the splits of query tiles in several slots; else a second kernel does.
  int32_t merges_splits;
};

}  // namespace jitattn
