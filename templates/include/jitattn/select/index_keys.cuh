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
constexpr int64_t kNoOffset = -16;  // negative, and aligned as copies need it

__device__ __forceinline__ uint32_t index_vector(uint32_t smem, uint32_t row, uint32_t vector) {
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
    const PageRow row = pages.row(request, false);
    const auto token = [&](int j) { return first + min(j * kNumThreads + thread, count - 1); };
    PageEntry found[kFinds];
    for_each<kFinds>([&](int j) { found[j] = pages.load_for(row, token(j)); });
    for_each<kFinds>([&](int j) {
      const int32_t i = j * kNumThreads + thread;
      if (i < end) put(cache, i, pages.place(found[j]), i < count);
    });
  }

  // Keeps the place of a token, where it exists.
  __device__ __forceinline__ void put(const IndexCache& cache, int32_t i, const PagePlace& found,
                                      bool exists) {
    const bool is_known = exists && found.page >= 0 && found.page < cache.num_pages;
    const int64_t offset = found.page * cache.page_stride + found.place * cache.key_stride;
    offsets[i] = is_known ? offset : kNoOffset;
    places[i] = found.place;
  }
};

// The keys of a chunk, of which kNumThreads neighbouring threads load kTileTokens at a time, whose
// offsets are among `places`.
template <int kHeadDim, int kTileTokens, int kNumThreads, typename Places>
struct IndexKeys {
  static constexpr int kVectors = kHeadDim / kIndexVector;
  static constexpr int kCopies = (kTileTokens * kVectors + kNumThreads - 1) / kNumThreads;

  const IndexCache& cache;
  const Places& places;

  __device__ __forceinline__ bool is_known(int32_t token) const {
    return places.offsets[token] >= 0;
  }

  // Begins the copies of a tile that begins at token `first` of the chunk. What lies nowhere is 0.
  __device__ __forceinline__ void load(uint32_t keys_smem, uint32_t scales_smem,
                                       int32_t first) const {
    load_keys(keys_smem, first);
    load_scales(scales_smem, first);
  }

  // Offsets are read before the first copy, which orders reads of shared memory.
  __device__ __forceinline__ void load_keys(uint32_t keys_smem, int32_t first) const {
    if (cache.is_aligned) {
      const auto row_of = [](int j) {
        // Apart, so that the rows of a thread are immediates of one address.
        return kNumThreads % kVectors == 0 ? loader() / kVectors + j * (kNumThreads / kVectors)
                                           : (j * kNumThreads + loader()) / kVectors;
      };
      int64_t offsets[kCopies];
      for_each<kCopies>([&](int j) {
        if (exists(j)) offsets[j] = places.offsets[first + row_of(j)];
      });
      for_each<kCopies>([&](int j) {
        if (!exists(j)) return;
        const int vector = (j * kNumThreads + loader()) % kVectors;
        cp_async_unless<16>(index_vector(keys_smem, row_of(j), vector),
                            cache.keys + vector * kIndexVector + offsets[j], offsets[j] < 0);
      });
    } else {
#pragma unroll 1
      for (uint32_t i = loader(); i < kTileTokens * kHeadDim / 4; i += kNumThreads) {
        const int row = i / (kHeadDim / 4), word = i % (kHeadDim / 4);
        const int64_t offset = places.offsets[first + row];
        cp_async_unless<4>(index_vector(keys_smem, row, word / 4) + word % 4 * 4,
                           cache.keys + word * 4 + offset, offset < 0);
      }
    }
  }

  __device__ __forceinline__ void load_scales(uint32_t scales_smem, int32_t first) const {
    for_each_of<kTileTokens>([&](int row) {
      const int64_t offset = places.offsets[first + row];
      const int64_t shift = places.places[first + row] * cache.scale_shift;
      cp_async_unless<4>(scales_smem + 4 * row, cache.scales + offset + shift, offset < 0);
    });
  }

 private:
  static __device__ __forceinline__ bool exists(int copy) {
    return kTileTokens * kVectors % kNumThreads == 0 ||
           copy * kNumThreads + loader() < kTileTokens * kVectors;
  }
  static __device__ __forceinline__ uint32_t loader() { return threadIdx.x % kNumThreads; }

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
