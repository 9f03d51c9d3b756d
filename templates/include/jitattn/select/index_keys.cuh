// Keys of the indexer: their places, their way into shared memory, and what is written of a tile.
//
// A row of a tile has 128 bytes, with the hardware's 128-byte swizzle: vector v of row r lies at
// v ^ r % 8.
#pragma once

#include "jitattn/lanes.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/ptx.cuh"
#include "jitattn/select_params.cuh"

namespace jitattn {

constexpr int kIndexRowBytes = 128;
constexpr int kIndexVector = 16;

__device__ __forceinline__ uint32_t index_vector(uint32_t smem, int row, int vector) {
  return smem + row * kIndexRowBytes + (vector ^ row % 8) * kIndexVector;
}

// Where the keys of a chunk lie, in shared memory; the offset of one that lies nowhere is negative.
template <int kMaxTokens>
struct KeyPlaces {
  int64_t offsets[kMaxTokens];  // in bytes
  int32_t places[kMaxTokens];   // in their pages

  // Finds the places of `count` tokens of a request, one at least, and none for those up to `end`.
  template <int kNumThreads>
  __device__ __forceinline__ void find(const IndexCache& cache, const PageList& pages,
                                       int32_t request, int32_t first, int32_t count, int32_t end) {
    constexpr int kFinds = (kMaxTokens + kNumThreads - 1) / kNumThreads;
    const int32_t thread = threadIdx.x;
    int32_t tokens[kFinds];
    PagePlace found[kFinds];
    for_each<kFinds>([&](int j) { tokens[j] = first + min(j * kNumThreads + thread, count - 1); });
    pages.find_all(request, tokens, found);
    for_each<kFinds>([&](int j) {
      const int32_t i = j * kNumThreads + thread;
      if (i >= end) return;
      const bool is_known = i < count && found[j].page >= 0 && found[j].page < cache.num_pages;
      const int64_t offset = found[j].page * cache.page_stride + found[j].place * cache.key_stride;
      offsets[i] = is_known ? offset : -1;
      places[i] = found[j].place;
    });
  }
};

// The keys of a chunk, of which kNumThreads neighbouring threads load kTileTokens at a time.
template <int kHeadDim, int kTileTokens, int kNumThreads, int kMaxTokens>
struct IndexKeys {
  static constexpr int kVectors = kHeadDim / kIndexVector;

  const IndexCache& cache;
  const KeyPlaces<kMaxTokens>& places;

  __device__ __forceinline__ bool is_known(int32_t token) const {
    return places.offsets[token] >= 0;
  }

  // Begins the copies of a tile that begins at token `first` of the chunk. What lies nowhere is 0,
  // beside an address that is aligned as copies need it.
  __device__ __forceinline__ void load(uint32_t keys_smem, uint32_t scales_smem,
                                       int32_t first) const {
    if (cache.is_aligned) {
      for_each_of<kTileTokens * kVectors>([&](int i) {
        const int row = i / kVectors, vector = i % kVectors;
        const int64_t offset = places.offsets[first + row];
        cp_async_16<128>(index_vector(keys_smem, row, vector),
                         cache.keys + vector * kIndexVector + max(offset, int64_t(0)), offset >= 0);
      });
    } else {
#pragma unroll 1
      for (int i = loader(); i < kTileTokens * kHeadDim / 4; i += kNumThreads) {
        const int row = i / (kHeadDim / 4), word = i % (kHeadDim / 4);
        const int64_t offset = places.offsets[first + row];
        cp_async_few<4>(index_vector(keys_smem, row, word / 4) + word % 4 * 4,
                        cache.keys + word * 4 + max(offset, int64_t(0)), offset >= 0);
      }
    }
    for_each_of<kTileTokens>([&](int row) {
      const int64_t offset = places.offsets[first + row];
      const int64_t shift = places.places[first + row] * cache.scale_shift;
      const int64_t found = offset >= 0 ? offset + shift : 0;
      cp_async_few<4>(scales_smem + 4 * row, cache.scales + found, offset >= 0);
    });
  }

 private:
  static __device__ __forceinline__ int loader() { return threadIdx.x % kNumThreads; }

  // Calls body(i) for the numbers below kCount that are this thread's.
  template <int kCount, typename Body>
  __device__ __forceinline__ void for_each_of(Body body) const {
    for_each<(kCount + kNumThreads - 1) / kNumThreads>([&](int j) {
      const int i = j * kNumThreads + loader();
      if (kCount % kNumThreads == 0 || i < kCount) body(i);
    });
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

// Four bytes of a query, wherever they lie.
__device__ __forceinline__ uint32_t load_query_4(const uint8_t* source) {
  if (reinterpret_cast<uint64_t>(source) % 4 == 0) return ld_global_4(source, true);
  return source[0] | source[1] << 8 | source[2] << 16 | uint32_t(source[3]) << 24;
}

// Twice what of x is positive, NaN for NaN: one addition, where a maximum has half the throughput of
// one. The other factor is halved: both are exact.
__device__ __forceinline__ float twice_positive(float x) { return x + fabsf(x); }

// Loads half of the weights of a group's rows, kHeads each, 0 where there is no head.
template <int kHeads, int kRows, int kNumThreads>
__device__ __forceinline__ void load_weights(const IndexLogitsParams& params,
                                             const TokenGroup& group, float* weights) {
  for (int i = threadIdx.x; i < kRows * kHeads; i += kNumThreads) {
    const int row = i / kHeads, head = i % kHeads;
    const bool exists = row < group.num_rows && head < params.num_heads;
    weights[i] = exists ? 0.5f * params.weights[(group.first + row) * params.weights_token_stride +
                                                head * params.weights_head_stride]
                        : 0.f;
  }
}

}  // namespace jitattn
