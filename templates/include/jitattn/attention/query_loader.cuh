// Copies of Q, and sources of K and V, of all warpgroup loaders.
#pragma once

#include "jitattn/attention/barriers.cuh"
#include "jitattn/attention/output.cuh"
#include "jitattn/attention/wgmma_tiles.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

template <bool kIsKey>
struct Source {
  static constexpr int kDim = kIsKey ? kKeyDim : kValueDim;
  static constexpr int kParts = kIsKey ? kKeyParts : 1;             // of a tile
  static constexpr int kVectors = kDim * kItemBytes / 16 / kParts;  // of a row of a part

  static __device__ __forceinline__ int32_t id(const KernelParams& params, PageTable::Row row,
                                               int32_t token) {
    return kIsKey ? params.pages.k_id(row, token) : params.pages.v_id(row, token);
  }
  static __device__ __forceinline__ int first_column(const HeadBlock& block, int part) {
    if (kIsKey) return part * kKeyDim / kKeyParts;
    return kNumValueBlocks > 1 ? block.value_block * kValueDim : 0;
  }
  static __device__ __forceinline__ uint32_t row(uint32_t smem, int segment, int row) {
    return kIsKey ? KeyLayout::row(smem, segment, row) : ValueLayout::row(smem, segment, row);
  }
};

template <bool kIsFP8>
struct QueryStorage {
  using Type = uint16_t;
};
template <>
struct QueryStorage<true> {
  using Type = uint8_t;
};

// Copies rows of Q of a query tile, zeros past its last row: warp `warp` of `num_warps` takes kRows at
// a time. Scores are multiplied with the scale's amount only, so Q takes its sign; but for that of
// row_scale_of().
template <int kRows>
__device__ __forceinline__ void copy_query(const AttentionParams& params, const QueryRows& rows,
                                           uint32_t smem, int warp, int num_warps) {
  using Storage = QueryStorage<kHasFP8Products>::Type;
  constexpr int kVectors = kKeyDim * kItemBytes / 16, kVectorItems = 16 / kItemBytes;
  const bool is_negative = !kHasFP8Products && score_scale_of(params, rows.kv_head).rest < 0.f;
  const uint32_t sign = is_negative ? 0x80008000u : 0u;
  const bool is_plain = !params.q_is_aligned || is_negative;
  // Found again for each Q: these producers' registers are few.
  const int lane = kDequantisesRegisters ? forget(lane_idx()) : lane_idx();
  static_assert(kRowTile % kRows == 0 && kRows <= kWarpSize, "a lane finds one row");
#pragma unroll 1
  for (int first = warp * kRows; first < kRowTile; first += num_warps * kRows) {
    // Source row of each lane; past the end, the last row again.
    const int lane_row = min(first + lane % kRows, max(rows.num_rows - 1, 0));
    const Storage* lane_source = reinterpret_cast<const Storage*>(params.q) +
                                 rows.token(lane_row) * params.q_token_stride +
                                 rows.head(lane_row) * params.q_head_stride;
    const auto lane_address = reinterpret_cast<uint64_t>(lane_source);
    if (is_plain) {
#pragma unroll 1
      for (int i = 0; i < kVectors * kRows / kWarpSize; ++i) {
        const int index = i * kWarpSize + lane, vector = index % kVectors;
        const int row = first + index / kVectors;
        const uint64_t source = __shfl_sync(0xffffffff, lane_address, index / kVectors);
        uint4 words = {};
        if (row < rows.num_rows) {
          words = load_16(reinterpret_cast<const Storage*>(source) + vector * kVectorItems);
        }
        words = {words.x ^ sign, words.y ^ sign, words.z ^ sign, words.w ^ sign};
        st_shared_16(QueryLayout::row(smem, vector / 8, row) + (vector % 8 ^ row % 8) * 16, words);
      }
    } else {
      // Four lanes a row, eight rows at a time: one exchange of an address for all its vectors.
      const int part = lane % 4, group_row = lane / 4;
      const int addresses[2] = {group_row * kSegmentBytes + (part ^ group_row) * 16,
                                group_row * kSegmentBytes + (part ^ group_row ^ 4) * 16};
      // A variant leaves producers few registers, and so do those that dequantise.
#pragma unroll(kHasVariant || kDequantisesRegisters ? 1 : kRows / 8)
      for (int group = 0; group < kRows / 8; ++group) {
        const uint64_t source = __shfl_sync(0xffffffff, lane_address, group * 8 + group_row);
        const auto* vectors = reinterpret_cast<const Storage*>(source) + part * kVectorItems;
        const int group_begin = first + group * 8;
        for_each<(kVectors + 3) / 4>([&](int i) {
          if (i * 4 + 4 > kVectors && i * 4 + part >= kVectors) return;
          cp_async_16<128>(QueryLayout::row(smem, i / 2, group_begin) + addresses[i % 2],
                           vectors + i * 4 * kVectorItems, group_begin + group_row < rows.num_rows);
        });
      }
    }
  }
}

// What copy_query() copied is there, for products too.
__device__ __forceinline__ void wait_for_copies() {
  cp_async_wait_all();
  fence_before_tma();
}

// Two numbers in a word as floats.
__device__ __forceinline__ float2 query_pair(uint32_t word) {
  uint16_t low, high;
  split(word, low, high);
  return {QType::to_float(low), QType::to_float(high)};
}

// Q in the type of products, in the place of Q: the rows that copy_query() copies, times kQueryFactor.
// Rows whose largest number is then below 2 or no float16 have another power of two as their
// factor, which puts that number between 2**14 and 2**15, and their scores what is missing. So
// numbers down to 2**-22 of the largest stay exact, and others lose no more than 2**-26 of it. A row
// with an infinity becomes NaN, as its scores do. Four lanes have a row.
template <int kRows, typename SharedMemory>
__device__ __forceinline__ void convert_query(SharedMemory& shared, const QueryRows& rows,
                                              uint32_t smem, int stage, int warp, int num_warps) {
  if constexpr (kConvertsQueries) {
    __syncwarp();  // other lanes have copied
    constexpr int kVectors = kKeyDim / 8;
    const int lane = forget(lane_idx()), part = lane % 4;
#pragma unroll 1
    for (int first = warp * kRows; first < kRowTile; first += num_warps * kRows) {
      if (first >= rows.num_rows) {  // zeros are the same in both types
        if (lane < kRows) shared.row_factors[stage][first + lane] = 1.f;
        continue;
      }
#pragma unroll 1
      for (int row = first + lane / 4; row < first + kRows; row += 8) {
        const auto place_of = [&](int vector) {
          return QueryLayout::row(smem, vector / 8, row) + (vector % 8 ^ row % 8) * 16;
        };
        // Amounts of bfloat16 are in the order of their bits, NaN last.
        uint32_t tops = 0;
#pragma unroll
        for (int i = 0; i < (kVectors + 3) / 4; ++i) {
          const int vector = i * 4 + part;
          if (i * 4 + 4 > kVectors && vector >= kVectors) continue;
          const uint4 words = ld_shared_16(place_of(vector));
          for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
            tops = __vmaxu2(tops, word & 0x7fff7fff);
          }
        }
        tops = __vmaxu2(tops, __shfl_xor_sync(0xffffffff, tops, 1));
        tops = __vmaxu2(tops, __shfl_xor_sync(0xffffffff, tops, 2));
        const float top = __uint_as_float(max(tops << 16, tops & 0xffff0000));
        const bool is_plain =
            top == 0.f || (top >= 2.f / kQueryFactor && top < 65536.f / kQueryFactor);
        const uint32_t exponent = max(__float_as_uint(top) >> 23, 15u);
        float factor = kQueryFactor;
        if (!is_plain)
          factor = exponent < 255 ? __uint_as_float(268 - exponent << 23) : quiet_nan();
#pragma unroll 2  // registers are few
        for (int vector = part; vector < kVectors; vector += 4) {
          const uint32_t place = place_of(vector);
          const uint4 words = ld_shared_16(place);  // again: they would take too many registers
          const auto times = [&](uint32_t word) {
            const float2 pair = query_pair(word);
            return PairType::pack(pair.x * factor, pair.y * factor);
          };
          st_shared_16(place, {times(words.x), times(words.y), times(words.z), times(words.w)});
        }
        if (part == 0) {
          // The inverse, but for kQueryFactor.
          const float rest = kQueryFactor * __uint_as_float(exponent - 14 << 23);
          shared.row_factors[stage][row] = is_plain ? 1.f : rest;
        }
      }
    }
    fence_before_tma();
  }
}

// Scale of the scores of a row of FP8 queries: `rest` is positive, and `first` is 1 but for scales
// that are negative, NaN, or beyond float32 together. Past the last row any will do.
template <typename Params>
__device__ __forceinline__ ScoreScale row_scale_of(const Params& params, const QueryRows& rows,
                                                   int row) {
  ScoreScale scale = score_scale_of(params.attention, rows.kv_head);
  if (row < rows.num_rows) {
    const float q_scale = params.queries.of(rows.token(row), rows.head(row));
    const float product = scale.rest * q_scale;
    const bool is_finite = fabsf(product) < -neg_inf();
    scale.first *= is_finite ? 1.f : q_scale;
    scale.rest = is_finite ? product : scale.rest;
  }
  if (scale.rest < 0.f) scale.first = -scale.first;
  scale.rest = fmaxf(fabsf(scale.rest), 1e-30f);  // not zero, so that -inf stays what it is
  return scale;
}

// Finds the scales of the rows that copy_query() copies.
template <int kRows, typename Params, typename SharedMemory>
__device__ __forceinline__ void write_row_scales(const Params& params, SharedMemory& shared,
                                                 const QueryRows& rows, int stage, int warp,
                                                 int num_warps) {
  if constexpr (kHasFP8Products) {
#pragma unroll 1
    for (int first = warp * kRows; first < kRowTile; first += num_warps * kRows) {
      if (lane_idx() >= kRows) continue;
      const int row = first + lane_idx();
      shared.row_scales[stage][row] = row_scale_of(params, rows, row);
    }
  }
}

// Whether consumers copy the first Q: those of 256 columns have no registers for it.
constexpr bool kCopiesFirstQuery = kValueDim < 256;

__device__ __forceinline__ bool is_copied_by_consumers(const WorkItem& item) {
  return kCopiesFirstQuery && item.is_first;
}

// Copies Q of the CTA's first work item, where the schedule has that: consumers have nothing else to
// do yet, and are more than the producers. A warpgroup copies its own rows.
__device__ __forceinline__ void copy_first_query(const KernelParams& params, Shared& shared,
                                                 uint32_t smem) {
  if constexpr (!kCopiesFirstQuery) return;
  const WorkItemFacts item = params.attention.schedule.first_items[blockIdx.x];
  if (!is_usable(params, item)) return;
  const HeadBlock block(params.attention, item.work);
  const QueryRows rows(params.attention, block, item.query_tile, item.request);
  copy_query<16>(params.attention, rows, smem, warp_idx(), kNumWarps);
  wait_for_copies();
  convert_query<16>(shared, rows, smem, 0, warp_idx(), kNumWarps);
  write_row_scales<16>(params, shared, rows, 0, warp_idx(), kNumWarps);
  sync_threads<kGroupThreads>(kFirstQueryBarrier + group_idx());
}

}  // namespace jitattn
