// Loaders of Q, K and V to shared memory.
#pragma once

#include "jitattn/attention/barriers.cuh"
#include "jitattn/attention/query_loader.cuh"
#include "jitattn/attention/wgmma_tiles.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Loaders of a tile of K or V.
enum class TileLoader { kTma, kGather, kElements };
constexpr TileLoader kTileLoader = kUsesTma          ? TileLoader::kTma
                                   : kUseVectorLoads ? TileLoader::kGather
                                                     : TileLoader::kElements;
template <bool kIsKey, TileLoader kLoader = kTileLoader>
struct TileAddresses;

// Pages of a KV tile's TMA tiles, looked up ahead: lane i has the page of TMA tile i. TMA tiles
// without tokens are skipped, since their pages need not exist.
template <bool kIsKey>
struct TileAddresses<kIsKey, TileLoader::kTma> {
  TileTokens tokens;
  int32_t page;

  static_assert(kNumTmaTiles <= kWarpSize, "each lane finds one page");

  TileAddresses() = default;

  __device__ __forceinline__ int32_t first_tma_tile() const { return tokens.first / kTmaTokens; }
  __device__ __forceinline__ int32_t end_tma_tile() const {
    return (tokens.last + kTmaTokens - 1) / kTmaTokens;
  }

  __device__ __forceinline__ TileAddresses(const KernelParams& params, PageTable::Row page_row,
                                           const WorkItemFacts& item, int32_t tile)
      : tokens(item, tile) {
    const int32_t lane = lane_idx();
    page = 0;
    if (lane >= first_tma_tile() && lane < end_tma_tile()) {
      page = Source<kIsKey>::id(params, page_row, tokens.begin + lane * kTmaTokens);
    }
  }

  // One lane issues the copies back to back, since the products wait for the last.
  __device__ __forceinline__ void load(const KernelParams& params, const HeadBlock& block,
                                       uint32_t smem, uint32_t barrier, int part) const {
    // TMA tiles of K have one segment each, so that a tile's rows follow each other; so have those
    // of V whose last segment is cut off by the end of a row, where the hardware fills in zeros.
    constexpr bool kIsClipped = Source<kIsKey>::kDim * kItemBytes % kSegmentBytes != 0;
    constexpr bool kHasOneSegment = kIsKey || kIsClipped;
    constexpr int kTmaTileSegments = kHasOneSegment ? 1 : kValueSegments;
    constexpr int kSteps = kIsKey ? kKeyPartSegments : kIsClipped ? kValueSegments : 1;
    static_assert(!kIsClipped || (kIsKey ? kKeyParts : kNumValueBlocks) == 1, "all segments");
    constexpr int kSegmentColumns = kSegmentBytes / kItemBytes;
    constexpr int kCopyBytes = kTmaTokens * kTmaTileSegments * kSegmentBytes;
    const int begin = first_tma_tile(), end = end_tma_tile();
    const int32_t head = block.kv_head;
    const int32_t segment = kIsKey ? part * kKeyPartSegments : block.value_block * kValueSegments;
    // Kept in registers, not recomputed.
    smem = forget(smem);
    barrier = forget(barrier);
    const auto copy = [&](int i, int32_t tile_page) {
      for_each<kSteps>([&](int s) {
        const int32_t token = PageTable::kHasPages ? token_in_page(i) : tile_page;
        copy_tma(Source<kIsKey>::row(smem, s, i * kTmaTokens),
                 kIsKey ? &params.k_map : &params.v_map, barrier, token,
                 kIsClipped ? 0 : segment + s, head, PageTable::kHasPages ? tile_page : 0,
                 kIsClipped ? s * kSegmentColumns : 0);
      });
    };
    if (lane_idx() == 0) mbarrier_expect(barrier, (end - begin) * kSteps * kCopyBytes);
    __syncwarp();
    if (begin == 0 && end == kNumTmaTiles) {
      int32_t pages[kNumTmaTiles];
      for_each<kNumTmaTiles>([&](int i) { pages[i] = __shfl_sync(0xffffffff, page, i); });
      if (!elect_one()) return;
      for_each<kNumTmaTiles>([&](int i) { copy(i, pages[i]); });
      return;
    }
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const int32_t tile_page = __shfl_sync(0xffffffff, page, i);
      if (elect_one()) copy(i, tile_page);
    }
  }

 private:
  __device__ __forceinline__ int32_t token_in_page(int tma_tile) const {
    constexpr uint32_t kPageTmaTiles = kPageSize / kTmaTokens;
    return (tokens.begin / uint32_t(kTmaTokens) + tma_tile) % kPageTmaTiles * kTmaTokens;
  }
};

// Gathers a tile by asynchronous copies of 16 bytes, zeros where it has no tokens: a NaN left in a
// slot that the request does not own must not meet a probability of zero. Warps take groups of
// eight rows in turn, four lanes a row. Row addresses are found a tile ahead, by one lane each.
template <bool kIsKey>
struct TileAddresses<kIsKey, TileLoader::kGather> {
  static constexpr int kGroups = (kTokenGroups + kTileWarps - 1) / kTileWarps;  // of a warp
  // Offsets of row lane / 4 of the warp's groups lane % 4 + 4 i, in bytes from the pool's begin;
  // negative without a token.
  int64_t offsets[(kGroups + 3) / 4];

  using S = Source<kIsKey>;

  TileAddresses() = default;

  __device__ __forceinline__ TileAddresses(const KernelParams& params, PageTable::Row page_row,
                                           const WorkItemFacts& item, int32_t tile) {
    const TileTokens tokens(item, tile);
    const AttentionParams& attention = params.attention;
    for_each<(kGroups + 3) / 4>([&](int i) {
      const int row = 8 * group(lane_idx() % 4 + 4 * i) + lane_idx() / 4;
      offsets[i] = -1;
      if (row < tokens.first || row >= tokens.last) return;
      const int32_t token = tokens.begin + row;
      const Location at = PageTable::locate(S::id(params, page_row, token), token);
      offsets[i] =
          kItemBytes * (at.page * (kIsKey ? attention.k_page_stride : attention.v_page_stride) +
                        at.token * (kIsKey ? attention.k_token_stride : attention.v_token_stride));
    });
  }

  // Issues the copies, which arrive at the barrier when they have landed. Consumers fence before
  // their products.
  __device__ __forceinline__ void load(const KernelParams& params, const HeadBlock& block,
                                       uint32_t smem, uint32_t barrier, int part) const {
    const AttentionParams& attention = params.attention;
    const int vector = lane_idx() % 4, lane_row = lane_idx() / 4;
    const auto* base = static_cast<const KVType::Storage*>(kIsKey ? attention.k : attention.v);
    base += block.kv_head * (kIsKey ? attention.k_head_stride : attention.v_head_stride);
    base += S::first_column(block, part);
    const auto* first = reinterpret_cast<const uint8_t*>(base) + vector * 16;
    // The two places of a lane's vectors in the swizzle of its rows.
    const uint32_t places[2] = {lane_row * kSegmentBytes + (vector ^ lane_row) * 16,
                                lane_row * kSegmentBytes + (vector ^ lane_row ^ 4) * 16};
    for_each<kGroups>([&](int i) {
      const int64_t offset = __shfl_sync(0xffffffff, offsets[i / 4], lane_row * 4 + i % 4);
      if (kTokenGroups % kTileWarps != 0 && group(i) >= kTokenGroups) return;
      const uint8_t* source = first + max(offset, 0ll);
      const uint32_t row = S::row(smem, 0, 8 * group(i));
      for_each<(S::kVectors + 3) / 4>([&](int quarter) {
        // Past the end of a row lies nothing that products read.
        if (quarter * 4 + 4 > S::kVectors && quarter * 4 + vector >= S::kVectors) return;
        cp_async_16<128>(row + S::row(0, quarter / 2, 0) + places[quarter % 2],
                         source + quarter * 64, offset >= 0);
      });
    });
    mbarrier_arrive_later(barrier);
  }

 private:
  // Row group of the tile that is group `i` of this warp.
  static __device__ __forceinline__ int group(int i) {
    return (warp_idx() - kNumWarps) % kTileWarps + i * kTileWarps;
  }
};

// Copies a tile element by element, zeros where it has no tokens: a NaN left in a slot that the
// request does not own must not meet a probability of zero.
template <bool kIsKey>
struct TileAddresses<kIsKey, TileLoader::kElements> {
  PageTable::Row page_row;
  TileTokens tokens;

  TileAddresses() = default;

  __device__ __forceinline__ TileAddresses(const KernelParams& params, PageTable::Row page_row,
                                           const WorkItemFacts& item, int32_t tile)
      : page_row(page_row), tokens(item, tile) {}

  __device__ __forceinline__ void load(const KernelParams& params, const HeadBlock& block,
                                       uint32_t smem, uint32_t barrier, int part) const {
    using S = Source<kIsKey>;
    const AttentionParams& attention = params.attention;
    const auto* base = static_cast<const KVType::Storage*>(kIsKey ? attention.k : attention.v);
    base += block.kv_head * (kIsKey ? attention.k_head_stride : attention.v_head_stride);
    base += S::first_column(block, part);
#pragma unroll 1
    for (int first_row = 0; first_row < kTileTokens; first_row += kWarpSize) {
      const int64_t offset = row_offset(params, first_row + lane_idx());
#pragma unroll 1
      for (int i = 0; i < S::kVectors; ++i) {
        const int index = i * kWarpSize + lane_idx();
        const int row = index / S::kVectors, vector = index % S::kVectors;
        const int64_t place = __shfl_sync(0xffffffff, offset, row);
        // A tile's rows need not be a multiple of a warp.
        if (first_row + row < kTileTokens) {
          copy(
              S::row(smem, vector / 8, first_row + row) + (vector % 8 ^ (first_row + row) % 8) * 16,
              base + max(place, 0ll) + vector * (16 / kItemBytes), place >= 0);
        }
      }
    }
    cp_async_wait_all();
    fence_before_tma();  // the products read by the same way as TMA tiles are written
    mbarrier_arrive(barrier);
  }

 private:
  // Offset of a row of the tile, in elements; -1 without a token.
  __device__ __forceinline__ int64_t row_offset(const KernelParams& params, int row) const {
    if (row < tokens.first || row >= tokens.last) return -1;
    const AttentionParams& attention = params.attention;
    const int32_t token = tokens.begin + row;
    const Location place = PageTable::locate(Source<kIsKey>::id(params, page_row, token), token);
    return place.page * (kIsKey ? attention.k_page_stride : attention.v_page_stride) +
           place.token * (kIsKey ? attention.k_token_stride : attention.v_token_stride);
  }

  static __device__ __forceinline__ void copy(uint32_t smem, const KVType::Storage* source,
                                              bool exists) {
    uint4 words = {};
    if (exists) words = load_16(source);
    st_shared_16(smem, words);
  }
};

// Loads K or V of all work items.
template <bool kIsKey>
__device__ __forceinline__ void load_tiles(const KernelParams& params, Shared& shared,
                                           uint32_t smem) {
  Ring work_items = {0, 0};
  Ring ring = {0, 1};  // the stages are empty: the phase before their first is over
  // The first without a wait for who finds the others.
  WorkItemFacts& first_item = shared.first_items[warp_idx() - kNumWarps];
  bool is_first = copy_first_item(params, first_item);
#pragma unroll 1
  while (true) {
    if (!is_first) mbarrier_wait(shared.item_full(work_items.stage), work_items.parity);
    const WorkItemFacts& item = is_first ? first_item : shared.work_items[work_items.stage];
    if (item.work == kNoWork) break;
    const HeadBlock block(params.attention, item.work);
    const int32_t begin = item.begin, end = item.end;
    const PageTable::Row page_row = params.pages.row(item.query_tile.request);
    TileAddresses<kIsKey> next;
#pragma unroll 1
    for (int32_t tile = begin; tile <= end; ++tile) {
      const TileAddresses<kIsKey> now = next;
      // Looked up before the stage is empty.
      if (tile < end) next = TileAddresses<kIsKey>(params, page_row, item, tile);
      if (tile == begin) continue;
#pragma unroll 1
      for (int part = 0; part < Source<kIsKey>::kParts; ++part) {
        mbarrier_wait(kIsKey ? shared.k_empty(ring.stage) : shared.v_empty(ring.stage),
                      ring.parity);
        const int bytes = kIsKey ? kKeyPartBytes : kValueStageBytes;
        now.load(params, block, smem + ring.stage * bytes,
                 kIsKey ? shared.k_full(ring.stage) : shared.v_full(ring.stage), part);
        ring.next(kIsKey ? kNumKeyParts : kNumStages);
      }
    }
    if (is_first) mbarrier_wait(shared.item_full(work_items.stage), work_items.parity);
    is_first = false;
    work_items.next(kNumWorkItems);
  }
}

// Finds the work items, loads their Q and writes the rows of empty ones.
__device__ __forceinline__ void load_queries(const KernelParams& params, Shared& shared,
                                             uint32_t smem) {
  const bool is_first = threadIdx.x % kQueryThreads == 0;
  // Of the first work item.
  bool is_known =
      threadIdx.x % kQueryThreads < kWarpSize && copy_first_item(params, shared.work_items[0]);
  prefetch_schedule(params.attention.schedule, threadIdx.x % kQueryThreads);
  WorkItemIterator source(params);
  Ring queries = {0, 1};
  int32_t index = 0;
#pragma unroll 1
  while (true) {
    // The consumer is past the work item before the last, so that the oldest can be overwritten.
    mbarrier_wait(shared.q_empty(queries.stage), queries.parity);
    WorkItem& item = shared.work_items[index];
    if (is_first) {
      source.next(item, is_known);
      is_known = false;
      item.query_stage = queries.stage;
    }
    sync_threads<kQueryThreads>(kQueryBarrier);  // the work item is written
    const bool is_end = item.work == kNoWork;
    if (!is_end && item.is_empty()) {
      write_empty(params.attention, item, threadIdx.x % kQueryThreads, kQueryThreads);
      sync_threads<kQueryThreads>(kQueryBarrier);  // and read
      continue;
    }
    if (is_first) mbarrier_arrive(shared.item_full(index));
    if (!is_end && !is_copied_by_consumers(item)) {
      const int warp = threadIdx.x % kQueryThreads / kWarpSize;
      const QueryRows rows = item.rows(params.attention);
      copy_query<kWarpSize>(params.attention, rows, smem + queries.stage * kQueryStageBytes, warp,
                            kNumQueryWarps);
      wait_for_copies();
      write_row_scales<kWarpSize>(params, shared, rows, queries.stage, warp, kNumQueryWarps);
    }
    mbarrier_arrive(shared.q_full(queries.stage));
    if (is_end) break;
    queries.next(kNumQueryStages);
    index = (index + 1) % kNumWorkItems;
  }
}

}  // namespace jitattn
