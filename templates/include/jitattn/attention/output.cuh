// Merge of softmax states of warps and splits into out and lse.
#pragma once

#include "jitattn/attention/work_tile.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/nvfp4.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// -inf stands for "no token yet"; differences from it must not become NaN.
__device__ __forceinline__ float finite_maximum(float m) { return m == neg_inf() ? 0.f : m; }

// factor * tanh(scale * x) where |scale * x| <= kLimit: a polynomial, since exponentials are rare.
// Its relative error is 3e-6.
struct TanhNear {
  static constexpr float kLimit = 0.6f;
  float c[4];

  __device__ __forceinline__ TanhNear(float scale, float factor) {
    const float square = scale * scale;
    c[0] = factor * scale;
    c[1] = -0.33319074f * c[0] * square;
    c[2] = 0.13086418f * c[0] * square * square;
    c[3] = -0.04138778f * c[0] * square * square * square;
  }
  __device__ __forceinline__ float at(float x) const {
    const float z = x * x;
    return x * (c[0] + z * (c[1] + z * (c[2] + z * c[3])));
  }
};

// The same of bounded scores, whose maximum is fixed: two operations shorter. Its error is 6e-6 of `factor`,
// 3e-4 of a logit at the largest cap.
struct TanhNearBounded {
  static constexpr float kLimit = 0.5f;
  float c[3];

  __device__ __forceinline__ TanhNearBounded(float scale, float factor) {
    const float square = scale * scale;
    c[0] = 0.99992483f * factor * scale;
    c[1] = -0.33085505f * factor * scale * square;
    c[2] = 0.11254138f * factor * scale * square * square;
  }
  __device__ __forceinline__ float at(float x) const {
    const float z = x * x;
    return x * (c[0] + z * (c[1] + z * c[2]));
  }
};

// cap * tanh(scale * x), in log2 units. exp2 saturates to 0 or inf, and the quotient with it.
template <typename Near>
__device__ __forceinline__ float soft_cap(float x, float scale, const Near& near, float cap_log2) {
  const float power = exp2_approx(2.f * kLog2e * (x * scale));
  const float far = cap_log2 * (1.f - 2.f * reciprocal_approx(power + 1.f));
  return fabsf(x) * scale <= Near::kLimit ? near.at(x) : far;
}

// Scale of scores: their product with `first`, which is 1 in all but a few calls, times `rest`. The
// scales of queries and keys may leave float32 together, though scaled scores do not.
struct ScoreScale {
  float first;
  float rest;

  template <int kCount>
  __device__ __forceinline__ void multiply_first(float (&scores)[kCount]) const {
    if constexpr (kHasScales) {
      if (first != 1.f) for_each<kCount>([&](int i) { scores[i] *= first; });
    }
  }
};

// Score scale of a KV head.
__device__ __forceinline__ ScoreScale score_scale_of(const AttentionParams& params,
                                                     int32_t kv_head) {
  if constexpr (!kHasScales) return {1.f, params.score_scale};
  const float k_scale = params.k_scale.of(kv_head);
  float product = params.score_scale * k_scale;
  if constexpr (kProductFactor != 1.f) product *= kProductFactor;
  if (fabsf(product) < -neg_inf()) return {1.f, product};
  const float rest =
      kProductFactor != 1.f ? params.score_scale * kProductFactor : params.score_scale;
  return {fabsf(k_scale), copysignf(rest, product)};
}

// A score in log2 units, the soft cap applied. Rounded here: an exponent takes the maximum of such
// numbers from them, and one of equal scores must be 0.
__device__ __forceinline__ float to_logit(float score, float score_scale,
                                          const AttentionParams& params) {
  const float scaled = __fmul_rn(score, score_scale), cap = params.cap_log2;
  return kUseLogitsSoftCap ? soft_cap(scaled, 1.f, TanhNear(1.f, cap), cap) : scaled;
}

// Final factor and lse of a row. A row without tokens has m = -inf and d = 0. The sink joins the
// sum here, once. Both are NaN where a length is invalid.
struct RowResult {
  float factor;
  float lse;

  __device__ __forceinline__ RowResult(const AttentionParams& params, const QueryTile& query_tile,
                                       int32_t head, float m, float d) {
    float sink = neg_inf();
    if (params.sinks)
      sink = kLog2e * load_float(params.sinks, head * params.sink_stride, params.sink_code);
    // The larger of both is the reference, so neither exponential overflows.
    const float top = fmaxf(m, sink);
    const float scale = exp2_approx(m - finite_maximum(top));
    const float sum = d * scale + exp2_approx(sink - finite_maximum(top));
    // The sum is at least 1 where the maximum is finite, and NaN where a score is.
    factor = scale * reciprocal_approx(sum);
    if constexpr (kHasScales) factor *= params.v_scale.of(params.group_size.divide(head));
    if constexpr (kProductFactor != 1.f) factor *= kProductFactor;
    if constexpr (kProbabilityBits > 0) factor *= 1.f / kProbabilityFactor;
    if (sum == 0.f) factor = 0.f;
    lse = sum == 0.f ? neg_inf() : kLn2 * (finite_maximum(top) + log2_approx(sum));
    if (query_tile.kv_end == kInvalidLength) factor = lse = quiet_nan();
  }
};

__device__ __forceinline__ void write_lse(const AttentionParams& params, int32_t token,
                                          int32_t head, float lse) {
  if (params.lse) params.lse[token * params.lse_token_stride + head * params.lse_head_stride] = lse;
}

// Four columns of a row of out.
__device__ __forceinline__ void store_four(const AttentionParams& params, OutType::Storage* out,
                                           float4 value) {
  using Storage = OutType::Storage;
  struct alignas(4 * sizeof(Storage)) Vector {
    Storage x, y, z, w;
  };
  const Vector v = {OutType::from_float(value.x), OutType::from_float(value.y),
                    OutType::from_float(value.z), OutType::from_float(value.w)};
  if (params.out_is_aligned) {
    *reinterpret_cast<Vector*>(out) = v;
  } else {
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  }
}

__device__ __forceinline__ void write_out(const AttentionParams& params, int32_t token,
                                          int32_t head, int32_t dim, float4 value) {
  OutType::Storage* row = static_cast<OutType::Storage*>(params.out) +
                          token * params.out_token_stride + head * params.out_head_stride;
  store_four(params, row + dim, value);
}

__device__ __forceinline__ float4 operator*(float4 v, float s) {
  return {v.x * s, v.y * s, v.z * s, v.w * s};
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ __forceinline__ float4 fma(float4 a, float b, float4 c) {
  return {fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w)};
}

// Power of two that puts `top`, the largest of some numbers, between 2**14 and 2**15 of float16, and its
// inverse. Numbers down to 2**-30 of that stay exact. NaN beside an infinity.
struct HalfPower {
  float factor;
  float inverse;

  __device__ __forceinline__ explicit HalfPower(float top) {
    const uint32_t exponent = max(__float_as_uint(top) >> 23, 15u);
    factor = exponent < 255 ? __uint_as_float(268 - exponent << 23) : quiet_nan();
    inverse = __uint_as_float(exponent - 14 << 23);
  }
};

// Four float16 numbers.
__device__ __forceinline__ float4 unpack_partial(uint2 words) {
  uint16_t x, y, z, w;
  split(words.x, x, y);
  split(words.y, z, w);
  return {Half::to_float(x), Half::to_float(y), Half::to_float(z), Half::to_float(w)};
}

// Rows of q that no request owns: out 0, lse -inf. Dealt to the CTAs of the grid.
__device__ __forceinline__ void write_padding(const AttentionParams& params) {
  constexpr int kVectors = kValueDim * kNumValueBlocks / 4;
#pragma unroll 1
  for (int32_t token = params.schedule.header->q_end + blockIdx.x; token < params.num_tokens;
       token += gridDim.x) {
#pragma unroll 1
    for (int i = threadIdx.x; i < params.num_qo_heads * kVectors; i += kNumThreads) {
      const int head = i / kVectors, vector = i % kVectors;
      write_out(params, token, head, vector * 4, {0.f, 0.f, 0.f, 0.f});
      if (vector == 0) write_lse(params, token, head, neg_inf());
    }
  }
}

// Rows of a query tile's splits in the partial buffers: [max_slots, 2, num_head_blocks, kRowTile];
// of fixed splits [max_slots, max_splits, num_head_blocks, kRowTile] where query tiles lie in
// several slots, and [gridDim.x, max_splits, kRowTile] for the others.
struct PartialRows {
  int64_t first;
  int64_t step;
  int64_t first_shift;  // extra offset of split 0

  __device__ __forceinline__ PartialRows(const AttentionParams& params, const HeadBlock& block,
                                         const QueryTile& query_tile) {
    const int64_t place_rows = static_cast<int64_t>(params.num_head_blocks) * kRowTile;
    if (!kMayFixSplits || params.max_splits == 0) {
      // A slot has at most two split query tiles: the one that began in an earlier slot, and the
      // one that goes on in the next.
      first = query_tile.first_slot * 2;
      step = 2 * place_rows;
      first_shift = place_rows;
    } else {
      // A query tile in several slots uses the rows of its first slot, in which no other such query
      // tile begins; one in a single slot is merged before its CTA begins the next.
      first_shift = 0;
      const int64_t place_splits = params.max_splits;
      if (query_tile.last_slot == query_tile.first_slot) {
        first = (params.max_slots * place_rows + blockIdx.x * kRowTile) * place_splits;
        step = kRowTile;
        return;
      }
      first = query_tile.first_slot * place_splits;
      step = place_rows;
    }
    first = first * place_rows + block.index * kRowTile;
  }

  __device__ __forceinline__ int64_t row(int32_t split) const {
    return first + split * step + (split == 0 ? first_shift : 0);
  }
};

// Four columns of a partial row as they lie: a packed one has its scales after its numbers. What is loaded
// is found where it is used, so that loads of several rows are under way together.
struct PartialColumns {
  float4 floats;
  uint2 halves;
  float scale;

  // From L2, since other SMs write partial rows during this launch.
  __device__ __forceinline__ void load(const AttentionParams& params, int64_t index, int dim) {
    const float* row = params.partials + index * kValueDim;
    if constexpr (kPacksPartials) {
      halves = __ldcg(reinterpret_cast<const uint2*>(row) + dim / 4);
      scale = __ldcg(row + kValueDim / 2 + dim / (kValueDim / 2));
    } else {
      floats = __ldcg(reinterpret_cast<const float4*>(row + dim));
    }
  }
  __device__ __forceinline__ void clear() {
    floats = {};
    halves = {};
    scale = 0.f;
  }
  __device__ __forceinline__ float4 unpacked() const {
    return kPacksPartials ? unpack_partial(halves) * scale : floats;
  }
};

// Adds `count` to a counter that CTAs complete together; true for the one that makes it `all`. Not
// `is_shared`: this CTA completes it alone, and it is left as it is.
__device__ __forceinline__ bool complete(int32_t* counter, int32_t count, int32_t all,
                                         bool is_shared) {
  bool is_last = !is_shared;
  __syncthreads();  // every thread's part is written
  if (threadIdx.x == 0 && is_shared) {
    is_last = atomic_add_acq_rel(counter, count) == all - count;
    if (is_last) *counter = 0;  // ready for the next launch
  }
  return __syncthreads_or(is_last);
}

// The counter of a query tile, and that of its slot `number` places on.
__device__ __forceinline__ int32_t* counter_of(const AttentionParams& params,
                                               const HeadBlock& block, const QueryTile& query_tile,
                                               int32_t number = 0) {
  return params.counters + (query_tile.first_slot + number) * params.num_head_blocks + block.index;
}

// Publishes `count` splits of this CTA; true if they are the query tile's last, so that all can be
// merged. A query tile in one slot needs no counter, and must not touch that of the slot's last
// query tile.
__device__ __forceinline__ bool publish_splits(const AttentionParams& params,
                                               const HeadBlock& block, const QueryTile& query_tile,
                                               int32_t count) {
  return complete(counter_of(params, block, query_tile), count, query_tile.num_splits,
                  query_tile.first_slot != query_tile.last_slot);
}

// Four columns of a row of a query tile, of splits [begin, end) merged in order, kMergeSplits at a
// time; and their maximum and sum. Past the last split of a block, the last one is loaded again
// with no weight, or none with kSkips. With kLeads `begin` may be negative: the first block has as
// many splits less, in whose place is the first.
template <bool kSkips = false, bool kLeads = false>
struct MergedSplits {
  float m;
  float d;
  float4 o;

  static constexpr int kBlock = kMergeSplits;
  // Splits whose loads overlap: nothing else hides their latency.
  static constexpr int kLoads = kMergeLoads;

  __device__ __forceinline__ MergedSplits(const AttentionParams& params,
                                          const PartialRows& partials, int32_t end, int row,
                                          int dim, int32_t begin = 0) {
    m = neg_inf();
    d = 0.f;
    o = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int32_t block = begin; block < end; block += kBlock) {
      float top = m;
      if constexpr (kLoads < kBlock) {
        for_each<kBlock>([&](int i) {
          const int64_t index = partials.row(clamp(block + i, end)) + row;
          top = fmaxf(top, __ldcg(&params.partial_sums[index].x));
        });
        rescale(top);
      }
#pragma unroll 1
      for (int32_t first = block; first < block + kBlock; first += kLoads) {
        float2 sums[kLoads];
        PartialColumns parts[kLoads];
        for_each<kLoads>([&](int i) {
          const int64_t index = partials.row(clamp(first + i, end)) + row;
          if (kSkips && first + i >= end) {
            parts[i].clear();
            return;
          }
          sums[i] = __ldcg(params.partial_sums + index);
          parts[i].load(params, index, dim);
        });
        for_each<kLoads>([&](int i) {
          if (first + i >= end || (kLeads && first + i < 0)) sums[i] = {neg_inf(), 0.f};
          if (kLoads == kBlock) top = fmaxf(top, sums[i].x);
        });
        if constexpr (kLoads == kBlock) rescale(top);
        for_each<kLoads>([&](int i) {
          const float scale = exp2_approx(sums[i].x - finite_maximum(top));
          o = fma(parts[i].unpacked(), scale, o);
          d = fmaf(sums[i].y, scale, d);
        });
      }
    }
  }

 private:
  static __device__ __forceinline__ int32_t clamp(int32_t split, int32_t end) {
    return kLeads ? max(min(split, end - 1), 0) : min(split, end - 1);
  }

  __device__ __forceinline__ void rescale(float top) {
    const float old_scale = exp2_approx(m - finite_maximum(top));
    // Rounded here: the compiler would add some kernels' next split without that, and their rows
    // have the same bits in all.
    o = {__fmul_rn(o.x, old_scale), __fmul_rn(o.y, old_scale), __fmul_rn(o.z, old_scale),
         __fmul_rn(o.w, old_scale)};
    d = __fmul_rn(d, old_scale);
    m = top;
  }
};

}  // namespace jitattn
