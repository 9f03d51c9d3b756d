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
  const int lane = lane_idx();
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
      // A variant leaves producers few registers.
#pragma unroll(kHasVariant ? 1 : kRows / 8)
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
  cp_async_wait_all();
  fence_before_tma();
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
  write_row_scales<16>(params, shared, rows, 0, warp_idx(), kNumWarps);
  sync_threads<kGroupThreads>(kFirstQueryBarrier + group_idx());
}

}  // namespace jitattn
