// Loader of Q, in vectors: of the first work item by the consumers, who have nothing else to do yet,
// and else by two warps.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/wgmma_operands.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/empty_tiles.cuh"
#include "jitattn/mla/work_state.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Q in shared memory: segments of its latent part, and one of its k_pe part.
using QueryLayout = RowLayout<kRowTile>;
constexpr int kQuerySegments = 2 * kLatentDim / kSegmentBytes;
constexpr int kQueryBytesAll = kRowTile * (kQuerySegments + 1) * kSegmentBytes;

constexpr int kQueryThreads = 2 * kWarpSize;

// The least factor of the scores of a scaled row: not zero, so that -inf stays what it is.
constexpr float kLeastScale = 1e-37f;

// Row `index` of those of a warp that has kRows: each eighth group of eight, so that warps share few rows.
template <int kRows>
__device__ __forceinline__ int query_row(int warp, int index) {
  return (index / 8 * (kRowTile / kRows) + warp) * 8 + index % 8;
}

// Places of a warp's vectors of Q, kVectors for each of kRows rows: some vectors of a row, or some
// rows, at a time. The rows from `end_row` on are as they shall be.
template <int kVectors, int kRows>
struct QueryVectors {
  static constexpr int kNumRows = kRows;
  static constexpr int kPasses = kVectors > kWarpSize ? kVectors / kWarpSize : 1;
  static constexpr int kPassRows = kVectors < kWarpSize ? kWarpSize / kVectors : 1;

  uint32_t smem;  // of Q
  int segment;    // the first
  int warp;       // of those that load Q
  int end_row;

  // The lane's row of those from `first` on.
  static __device__ __forceinline__ int row(int first) { return first + lane_idx() / kVectors; }
  static __device__ __forceinline__ int vector(int pass) {
    return pass * kWarpSize + lane_idx() % kVectors;
  }
  __device__ __forceinline__ uint32_t place(int first, int pass) const {
    const int v = vector(pass), r = query_row<kRows>(warp, row(first));
    return QueryLayout::row(smem, segment + v / 8, r) + (v % 8 ^ r % 8) * 16;
  }
  __device__ __forceinline__ bool is_done(int first) const {
    return query_row<kRows>(warp, first) >= end_row;
  }
  // Source of a row whose address a lane holds; nullptr without a row.
  static __device__ __forceinline__ const uint16_t* source(const uint16_t* lane_source, int first) {
    const auto address = reinterpret_cast<uint64_t>(lane_source);
    return reinterpret_cast<const uint16_t*>(
        static_cast<uint64_t>(__shfl_sync(0xffffffff, address, row(first))));
  }
};

// Copies the vectors. Addresses of several rows are found before the first copy, which would wait
// for its own.
template <typename Q>
__device__ __forceinline__ void copy_part(const Q& q, const uint16_t* lane_source) {
  constexpr int kMost = Q::kNumRows / Q::kPassRows, kWanted = Q::kPassRows < 4 ? 8 : 4;
  constexpr int kBatch = kMost < kWanted ? kMost : kWanted;
#pragma unroll 1
  for (int first = 0; first < Q::kNumRows; first += kBatch * Q::kPassRows) {
    if (q.is_done(first)) return;
    const uint16_t* sources[kBatch];
    for_each<kBatch>([&](int i) { sources[i] = Q::source(lane_source, first + i * Q::kPassRows); });
    for_each<kBatch>([&](int i) {
      for_each<Q::kPasses>([&](int pass) {
        cp_async_16<128>(q.place(first + i * Q::kPassRows, pass), sources[i] + Q::vector(pass) * 8,
                         sources[i]);
      });
    });
  }
}

// The same for vectors at any address, with the sign of the scale.
template <typename Q>
__device__ __forceinline__ void copy_plain(const Q& q, const uint16_t* lane_source, uint32_t sign) {
#pragma unroll 1
  for (int i = 0; i < Q::kNumRows / Q::kPassRows * Q::kPasses; ++i) {
    const int first = i / Q::kPasses * Q::kPassRows, pass = i % Q::kPasses;
    if (q.is_done(first)) return;
    const uint16_t* source = Q::source(lane_source, first);
    uint4 words = {};
    if (source) words = load_16(source + Q::vector(pass) * 8);
    st_shared_16(q.place(first, pass),
                 {words.x ^ sign, words.y ^ sign, words.z ^ sign, words.w ^ sign});
  }
}

// Issues the copies of Q of a work item, for warp `warp` of those that have kRows rows each: parts of
// two tensors, zeros past the last row and before `end_row`. Scores are multiplied with the scale's
// amount only, so Q takes its sign.
template <int kRows>
__device__ __forceinline__ void copy_query(const KernelParams& params, const QueryRows& rows,
                                           uint32_t smem, int warp, int end_row) {
  const AttentionParams& attention = params.attention;
  const MLAParams& mla = params.mla;
  const uint32_t sign = attention.score_scale < 0.f ? 0x80008000u : 0u;
  static_assert(kRows <= kWarpSize, "a lane finds one row");
  const int row = query_row<kRows>(warp, lane_idx() % kRows);
  const uint16_t *nope = nullptr, *pe = nullptr;
  if (row < rows.num_rows) {
    const int64_t token = rows.token(row), head = rows.head(row);
    nope = attention.q + token * attention.q_token_stride + head * attention.q_head_stride;
    pe = mla.q_pe + token * mla.q_pe_token_stride + head * mla.q_pe_head_stride;
  }
  const QueryVectors<kLatentDim / 8, kRows> nope_vectors = {smem, 0, warp, end_row};
  const QueryVectors<kKpeDim / 8, kRows> pe_vectors = {smem, kQuerySegments, warp, end_row};
  if (attention.q_is_aligned && mla.q_pe_is_aligned && !sign) {
    copy_part(nope_vectors, nope);
    copy_part(pe_vectors, pe);
  } else {
    copy_plain(nope_vectors, nope, sign);
    copy_plain(pe_vectors, pe, sign);
  }
}

// Where the first work item is known early, its Q is asked for before most of its tokens, behind which it
// would come late: kWaiting threads that load tokens wait until consumers have asked for it.
template <int kWaiting>
__device__ __forceinline__ void release_first_tokens() {
  arrive_threads<kNumThreads + kWaiting>(kFirstQueryBarrier);
}
template <int kWaiting>
__device__ __forceinline__ void wait_for_first_query() {
  sync_threads<kNumThreads + kWaiting>(kFirstQueryBarrier);
}

// Asks for Q of a CTA's first work item, for the consumers: four threads have a row.
__device__ __forceinline__ void prefetch_query(const KernelParams& params,
                                               const WorkItemFacts& item) {
  static_assert(kNumThreads >= 4 * kRowTile, "they have all rows");
  constexpr int kLine = 64, kPart = kLatentDim / 4;  // elements of a line of L2, and of a thread
  const AttentionParams& attention = params.attention;
  const HeadBlock block(attention, item.work);
  const QueryRows rows(attention, block, item.query_tile, item.request);
  const int row = threadIdx.x / 4, part = threadIdx.x % 4;
  if (row >= rows.num_rows) return;
  const int64_t token = rows.token(row), head = rows.head(row);
  const uint16_t* nope = attention.q + token * attention.q_token_stride +
                         head * attention.q_head_stride + part * kPart;
  for_each<kPart / kLine>([&](int i) { prefetch_to_l2(nope + i * kLine); });
  if (part > 0) return;
  prefetch_to_l2(params.mla.q_pe + token * params.mla.q_pe_token_stride +
                 head * params.mla.q_pe_head_stride);
}

// Whether Q is converted to another product type, with a scale for each row.
constexpr bool kScalesRows = QType::kMantissaBits != ProductType::kMantissaBits;

// Issues those of ring place `index` that consumers don't, for the threads that load Q. Rows that the
// work item before it did not have are zeros already.
__device__ __forceinline__ void copy_next_query(const KernelParams& params,
                                                const WorkItem (&work_items)[kNumWorkItems],
                                                int32_t index, uint32_t smem) {
  const WorkItem& item = work_items[index];
  if (item.is_first) return;
  const int warp = threadIdx.x % kQueryThreads / kWarpSize;
  const QueryRows rows = item.rows(params.attention);
  const WorkItem& last = work_items[(index + kNumWorkItems - 1) % kNumWorkItems];
  int end_row = kRowTile;
  if (last.work != kNoWork) end_row = max(rows.num_rows, last.rows(params.attention).num_rows);
  copy_query<kRowTile * kWarpSize / kQueryThreads>(params, rows, smem, warp, end_row);
}

// Finds the work items and loads their Q; then writes the rows of empty ones. A work item is found before
// the Q of the last one is done with, so that its first tiles come early.
__device__ __forceinline__ void load_queries(const KernelParams& params, WorkState& shared,
                                             uint32_t smem) {
  const int thread = threadIdx.x % kQueryThreads;
  prefetch_schedule(params.attention.schedule, thread);
  WorkItemIterator source(params);
  uint32_t parity = 1;
  int32_t index = 0;
#pragma unroll 1
  while (true) {
    WorkItem& item = shared.work_items[index];
    // Consumers have begun the last work item, and are done with the one that was here.
    if (thread == 0) shared.find_item(source, index);
    sync_threads<kQueryThreads>(kQueryBarrier);  // the work item is written
    const bool is_end = item.work == kNoWork;
    if (thread == 0) mbarrier_arrive(shared.item_full(index));
    mbarrier_wait(shared.q_empty(), parity);
    if (!is_end) copy_next_query(params, shared.work_items, index, smem);
    cp_async_wait_all();
    fence_before_tma();
    mbarrier_arrive(shared.q_full());
    if (is_end) break;
    parity ^= 1;
    index = (index + 1) % kNumWorkItems;
  }
  write_empty_tiles(params, thread / kWarpSize, kQueryThreads / kWarpSize);
}

}  // namespace jitattn
