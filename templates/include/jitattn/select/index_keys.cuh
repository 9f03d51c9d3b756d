// Keys of the indexer: their places, their way into shared memory, and what is written of a tile.
//
// A row of a tile has 128 bytes, with the hardware's 128-byte swizzle: vector v of row r lies at
// v ^ r % 8.
#pragma once

#include "jitattn/prelude.cuh"
#include "jitattn/ptx.cuh"
#include "jitattn/select_params.cuh"

namespace jitattn {

constexpr int kIndexRowBytes = 128;
constexpr int kIndexVector = 16;

__device__ __forceinline__ uint32_t index_vector(uint32_t smem, int row, int vector) {
  return smem + row * kIndexRowBytes + (vector ^ row % 8) * kIndexVector;
}

// Where a key lies; `page` is -1 where it lies nowhere.
struct KeyPlace {
  int32_t page, place;
};

// The keys of a chunk that a CTA looks at.
template <int kHeadDim, int kTileTokens, int kNumThreads>
struct IndexKeys {
  static constexpr int kVectors = kHeadDim / kIndexVector;

  const IndexCache& cache;
  KeyPlace* places;  // in shared memory

  // Finds the places of `count` tokens of a request.
  __device__ __forceinline__ void find(const PageList& pages, int32_t request, int32_t first,
                                       int32_t count) {
#pragma unroll 2
    for (int32_t i = threadIdx.x; i < count; i += kNumThreads) {
      const PagePlace found = pages.find(request, first + i, false);
      const bool is_known = found.page >= 0 && found.page < cache.num_pages;
      places[i] = {is_known ? static_cast<int32_t>(found.page) : -1, found.place};
    }
  }

  // Begins the copies of a tile, whose first token is `first` of the chunk's `count`. What is
  // nowhere is 0.
  __device__ __forceinline__ void load(uint32_t keys_smem, uint32_t scales_smem, int32_t first,
                                       int32_t count) const {
    if (cache.is_aligned) {
#pragma unroll 4
      for (int i = threadIdx.x; i < kTileTokens * kVectors; i += kNumThreads) {
        const int row = i / kVectors, vector = i % kVectors;
        const KeyPlace key = place(first + row, count);
        cp_async_16<128>(index_vector(keys_smem, row, vector), source(key) + vector * kIndexVector,
                         key.page >= 0);
      }
    } else {
#pragma unroll 2
      for (int i = threadIdx.x; i < kTileTokens * kHeadDim / 4; i += kNumThreads) {
        const int row = i / (kHeadDim / 4), word = i % (kHeadDim / 4);
        const KeyPlace key = place(first + row, count);
        cp_async_few<4>(index_vector(keys_smem, row, word / 4) + word % 4 * 4,
                        source(key) + word * 4, key.page >= 0);
      }
    }
    for (int row = threadIdx.x; row < kTileTokens; row += kNumThreads) {
      const KeyPlace key = place(first + row, count);
      const uint8_t* source =
          cache.scales + key.page * cache.page_stride + key.place * cache.scale_stride;
      cp_async_few<4>(scales_smem + 4 * row, source, key.page >= 0);
    }
  }

  __device__ __forceinline__ const uint8_t* source(KeyPlace key) const {
    return cache.keys + key.page * cache.page_stride + key.place * cache.key_stride;
  }

  __device__ __forceinline__ KeyPlace place(int32_t token, int32_t count) const {
    return token < count ? places[token] : KeyPlace{-1, 0};
  }
};

// The part of a group's logits that a CTA computes: positions begin to end, of which the rows see
// those before `visible`.
struct LogitsChunk {
  TokenGroup group;
  int32_t begin, end, visible;

  __device__ __forceinline__ LogitsChunk(const IndexLogitsParams& params, const TokenGroup& group,
                                         int32_t chunk)
      : group(group) {
    begin = min(int64_t(chunk) * params.chunk_tokens, int64_t(params.rows.max_kv_len));
    end = min(int64_t(begin) + params.chunk_tokens, int64_t(params.rows.max_kv_len));
    const int32_t seen = group.is_valid ? group.position + group.num_rows : 0;
    visible = seen < begin ? begin : seen < end ? seen : end;
  }

  __device__ __forceinline__ int32_t count() const { return visible - begin; }

  // Writes the logit of a row of the group for token `token` of the chunk.
  __device__ __forceinline__ void write(const IndexLogitsParams& params, int row, int32_t token,
                                        float value) const {
    const int32_t position = begin + token;
    if (position >= visible) return;
    const bool is_seen = position <= group.position + row;
    params.out[(group.first + row) * params.out_stride + position] = is_seen ? value : neg_inf();
  }

  // Writes what no row sees.
  __device__ __forceinline__ void fill(const IndexLogitsParams& params, int num_threads) const {
    const float value = group.is_valid ? neg_inf() : quiet_nan();
    for (int row = 0; row < group.num_rows; ++row) {
      float* out = params.out + (group.first + row) * params.out_stride;
      for (int32_t i = visible + threadIdx.x; i < end; i += num_threads) out[i] = value;
    }
  }
};

// Sixteen bytes or four of a query, wherever they lie.
__device__ __forceinline__ uint4 load_query_16(const uint8_t* source) {
  return reinterpret_cast<uint64_t>(source) % 16 ? load_16(source) : ld_global_16(source, true);
}
__device__ __forceinline__ uint32_t load_query_4(const uint8_t* source) {
  if (reinterpret_cast<uint64_t>(source) % 4 == 0) return ld_global_4(source, true);
  return source[0] | source[1] << 8 | source[2] << 16 | uint32_t(source[3]) << 24;
}

// Loads the weights of a group's rows, kHeads each, 0 where there is no head.
template <int kHeads, int kRows, int kNumThreads>
__device__ __forceinline__ void load_weights(const IndexLogitsParams& params,
                                             const TokenGroup& group, float* weights) {
  for (int i = threadIdx.x; i < kRows * kHeads; i += kNumThreads) {
    const int row = i / kHeads, head = i % kHeads;
    const bool exists = row < group.num_rows && head < params.num_heads;
    weights[i] = exists ? params.weights[(group.first + row) * params.weights_token_stride +
                                         head * params.weights_head_stride]
                        : 0.f;
  }
}

}  // namespace jitattn
