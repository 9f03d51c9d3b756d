// Producers of Q, and of K and V of quantised caches, with dequantisation: half of the warps load
// K, the others V. Vectors of 16 elements land in shared memory some tiles ahead, and the lane that
// issued the copy dequantises them. With NVFP4 a vector is a block, whose scale lands beside the
// scale of its row's first block in the segment, four together. With int4 a block's scale and zero
// land beside its first vector in the segment.
#pragma once

#include "jitattn/wide_dequant_kernel.cuh"

#include "jitattn/attention/barriers.cuh"
#include "jitattn/attention/query_loader.cuh"
#include "jitattn/attention/wgmma_tiles.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/int4.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/nvfp4.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kOperandWarps = kProducerThreads / kWarpSize / 2;
constexpr int kOperandThreads = kOperandWarps * kWarpSize;
constexpr int kVectorElements = 16;
constexpr int kVectorSize = stored_bytes(kVectorElements) / sizeof(KVType::Storage);
// A warp has eight rows of a tile at a time, four lanes a row: their writes meet no bank twice.
constexpr int kRowGroups = kTileTokens / 8;
constexpr int kWarpGroups = (kRowGroups + kOperandWarps - 1) / kOperandWarps;

static_assert(8 * kWarpGroups <= kWarpSize, "each lane finds one row");
static_assert(kLandingOffset + kNumLandings * kWarpGroups * (kKeySegments + kValueSegments) *
                                   kOperandThreads * 16 ==
                  kSmemBytes,
              "the host asks for exactly the shared memory that is used");

// KV tile of a work item.
struct ItemTile {
  int32_t item;  // kNoWork before the first
  int32_t tile;

  __device__ __forceinline__ bool exists(const Shared& shared) const {
    return item != kNoWork && shared.work_items[item].work != kNoWork;
  }
  // Of its work item, which may be the one after the last.
  __device__ __forceinline__ bool is_first(const Shared& shared) const {
    return item != kNoWork && tile == shared.work_items[item].begin;
  }
};

// Dequantising loader of K or V, tile by tile.
template <bool kIsKey>
struct TileDequantiser {
  const KernelParams& params;
  Shared& shared;
  uint32_t smem;

  static constexpr int kSegments = kIsKey ? kKeySegments : kValueSegments;

  // Dequantises a tile, if there is one, and issues the copies of a later one to its landing.
  __device__ __forceinline__ void load(const ItemTile& now, const ItemTile& next,
                                       PageTable::Row page_row, int landing, Ring& ring) const {
    const int32_t page = find_page(next, page_row);  // before it is needed
    if (now.exists(shared)) {
      mbarrier_wait(kIsKey ? shared.k_empty(ring.stage) : shared.v_empty(ring.stage), ring.parity);
      cp_async_wait<kNumLandings - 1>();
      if constexpr (kHasBlocks) __syncwarp();  // another lane copied the scales of a row
      const uint32_t stage = smem + (kIsKey ? kKeyOffset + ring.stage * kKeyStageBytes
                                            : kValueOffset + ring.stage * kValueStageBytes);
#pragma unroll 1
      for (int group = 0; group < kWarpGroups; ++group) convert(stage, landing, group);
      __syncwarp();
      if (lane_idx() == 0) {
        mbarrier_arrive(kIsKey ? shared.k_full(ring.stage) : shared.v_full(ring.stage));
      }
      ring.next(kNumStages);
    }
    if (next.exists(shared)) ask(next, page, landing);
    cp_async_commit();  // one group a tile, also where there is none
  }

 private:
  static __device__ __forceinline__ bool has(int segment) {
    return (segment * 4 + lane_idx() % 4) * kVectorElements < Source<kIsKey>::kDim;
  }

  // Row of the tile that is row `row` of the warp's group `group`.
  static __device__ __forceinline__ int tile_row(int group, int row) {
    return ((warp_idx() - kNumWarps) % kOperandWarps + group * kOperandWarps) * 8 + row;
  }

  // Landing place of a vector of this lane.
  __device__ __forceinline__ uint32_t place_of(int landing, int group, int segment) const {
    const int first = landing * kWarpGroups * (kKeySegments + kValueSegments) +
                      (kIsKey ? 0 : kWarpGroups * kKeySegments);
    const int thread = (threadIdx.x - kNumThreads) % kOperandThreads;
    return smem + kLandingOffset +
           ((first + group * kSegments + segment) * kOperandThreads + thread) * 16;
  }

  // Tile row of this lane, one of the warp's rows.
  static __device__ __forceinline__ int lane_row() {
    return tile_row(lane_idx() / 8, lane_idx() % 8);
  }
  __device__ __forceinline__ int32_t find_page(const ItemTile& place,
                                               PageTable::Row page_row) const {
    if (!place.exists(shared)) return 0;
    const TileTokens tokens(shared.work_items[place.item], place.tile);
    const int row = lane_row();
    if (row < tokens.first || row >= tokens.last) return 0;
    return Source<kIsKey>::id(params, page_row, tokens.begin + row);
  }

  // Issues the copies of a tile, zeros where it has no tokens: a NaN left in a slot that the
  // request does not own must not meet a probability of zero.
  __device__ __forceinline__ void ask(const ItemTile& place, int32_t page, int landing) const {
    const AttentionParams& attention = params.attention;
    const WorkItem& item = shared.work_items[place.item];
    const TileTokens tokens(item, place.tile);
    const auto* base = static_cast<const KVType::Storage*>(kIsKey ? attention.k : attention.v);
    base += item.block(attention).kv_head *
            (kIsKey ? attention.k_head_stride : attention.v_head_stride);
    const int32_t column = Source<kIsKey>::first_column(item.block(attention), 0);
    base += stored_bytes(column) / static_cast<int>(sizeof(KVType::Storage));
    const int row = lane_row();
    const bool exists = row >= tokens.first && row < tokens.last;
    const Location at = PageTable::locate(page, tokens.begin + row);
    const KVType::Storage* source =
        base + at.page * (kIsKey ? attention.k_page_stride : attention.v_page_stride) +
        at.token * (kIsKey ? attention.k_token_stride : attention.v_token_stride);
    const auto address = exists ? reinterpret_cast<uint64_t>(source) : 0;
    if constexpr (kHasBlocks) ask_scales(item.block(attention), at, exists, landing);
#pragma unroll 1
    for (int group = 0; group < kWarpGroups; ++group) {
      const uint64_t row_address = __shfl_sync(0xffffffff, address, group * 8 + lane_idx() / 4);
      const auto* vectors =
          reinterpret_cast<const KVType::Storage*>(row_address) + lane_idx() % 4 * kVectorSize;
      for_each<kSegments>([&](int segment) {
        copy(place_of(landing, group, segment), vectors + segment * 4 * kVectorSize,
             row_address != 0 && has(segment));
      });
    }
  }

  // Vectors of a segment's row that share a scale and a zero.
  static constexpr int kShared = BlocksOf<KVType>::kDims == 32 ? 2 : 4;

  // Landing place of the scales of a lane's row in a segment, one for each of its four lanes; or of
  // the scale and the zero of a lane's block.
  __device__ __forceinline__ uint32_t scale_place(int landing, int group, int segment) const {
    return place_of(landing, group, segment) - lane_idx() % (kHasZeros ? kShared : 4) * 16 + 8;
  }

  // Issues the copies of a tile's block scales; `at` and `exists` are of the row of each lane.
  __device__ __forceinline__ void ask_scales(const HeadBlock& block, const Location& at,
                                             bool exists, int landing) const {
    constexpr bool kAreFours = kUseVectorLoads && block_bytes(Source<kIsKey>::kDim) % 4 == 0;
    const BlockScales& blocks = kIsKey ? params.k_blocks : params.v_blocks;
    const uint8_t* source = blocks.scales + block.kv_head * blocks.head_stride +
                            at.page * blocks.page_stride + at.token * blocks.token_stride;
    source += BlocksOf<KVType>::place(Source<kIsKey>::first_column(block, 0));
    const auto address = exists ? reinterpret_cast<uint64_t>(source) : 0;
    const int part = lane_idx() % 4;
#pragma unroll 1
    for (int group = 0; group < kWarpGroups; ++group) {
      const uint64_t row_address = __shfl_sync(0xffffffff, address, group * 8 + lane_idx() / 4);
      const auto* scales = reinterpret_cast<const uint8_t*>(row_address);
      if constexpr (kHasZeros) {
        for_each<kSegments>([&](int segment) {
          if (part % kShared != 0) return;
          const int dim = (segment * 4 + part) * kVectorElements;
          copy_pair(scale_place(landing, group, segment), scales + BlocksOf<KVType>::place(dim),
                    row_address != 0 && has(segment));
        });
      } else if constexpr (kAreFours) {
        for_each<kSegments>([&](int segment) {
          if (part != 0) return;
          cp_async_few<4>(scale_place(landing, group, segment), scales + segment * 4,
                          row_address != 0);
        });
      } else {
        uint32_t bytes[kSegments];  // all on their way before the first is stored
        for_each<kSegments>([&](int segment) {
          const bool is_there = row_address != 0 && has(segment);
          bytes[segment] = is_there ? scales[segment * 4 + part] : 0;
        });
        for_each<kSegments>([&](int segment) {
          st_shared_byte(scale_place(landing, group, segment) + part, bytes[segment]);
        });
      }
    }
  }

  // Copies a scale and a zero.
  static __device__ __forceinline__ void copy_pair(uint32_t place, const uint8_t* source,
                                                   bool exists) {
    if constexpr (kUseVectorLoads) {
      cp_async_few<4>(place, source, exists);
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(source);
      st_shared_4(place, exists ? join(halves[0], halves[1]) : 0);
    }
  }

  static __device__ __forceinline__ void copy(uint32_t place, const KVType::Storage* source,
                                              bool exists) {
    if constexpr (kHasBlocks) {
      if constexpr (kUseVectorLoads) {
        cp_async_few<8>(place, source, exists);
      } else {
        uint2 words = {};
        if (exists) words = load_8(source);
        st_shared_8(place, words);
      }
    } else if constexpr (kUseVectorLoads) {
      cp_async_16<128>(place, source, exists);
    } else {
      uint4 words = {};
      if (exists) words = load_16(source);
      st_shared_16(place, words);
    }
  }

  __device__ __forceinline__ void convert(uint32_t stage, int landing, int group) const {
    const int row = tile_row(group, lane_idx() / 4);
    if (kRowGroups % kOperandWarps != 0 && row >= kTileTokens) return;
    for_each<kSegments>([&](int segment) {
      if (!has(segment)) return;
      const uint32_t place =
          Source<kIsKey>::row(stage, segment, row) + (lane_idx() % 4 * 2 ^ row % 8) * 16;
      if constexpr (kHasZeros) {
        const uint2 elements = ld_shared_8(place_of(landing, group, segment));
        const uint32_t scale = ld_shared_4(scale_place(landing, group, segment));
        st_shared_16(place, affine_eight<QType>(elements.x, scale));
        st_shared_16(place ^ 16, affine_eight<QType>(elements.y, scale));
      } else if constexpr (kHasBlocks) {
        const uint2 elements = ld_shared_8(place_of(landing, group, segment));
        const uint32_t byte = ld_shared_byte(scale_place(landing, group, segment) + lane_idx() % 4);
        const uint32_t scales = low_twice(block_scale_pair<QType>(byte));
        st_shared_16(place, block_eight<QType>(elements.x, scales));
        st_shared_16(place ^ 16, block_eight<QType>(elements.y, scales));
      } else {
        const uint4 words = ld_shared_16(place_of(landing, group, segment));
        const uint2 a = unpack_pairs<QType, KVType>(words.x);
        const uint2 b = unpack_pairs<QType, KVType>(words.y);
        const uint2 c = unpack_pairs<QType, KVType>(words.z);
        const uint2 d = unpack_pairs<QType, KVType>(words.w);
        st_shared_16(place, {a.x, a.y, b.x, b.y});
        st_shared_16(place ^ 16, {c.x, c.y, d.x, d.y});
      }
    });
  }
};

// Producer loop: finds the work items, loads their Q, K and V, and writes the rows of empty ones. A
// tile is dequantised when the copies of kNumLandings others after it are under way, across work
// items.
__device__ __forceinline__ void produce(const KernelParams& params, Shared& shared, uint32_t smem) {
  // Of the first work item.
  bool is_known =
      threadIdx.x % kQueryThreads < kWarpSize && copy_first_item(params, shared.work_items[0]);
  prefetch_schedule(params.attention.schedule, threadIdx.x % kQueryThreads);
  WorkItemIterator source(params);
  const TileDequantiser<true> keys = {params, shared, smem};
  const TileDequantiser<false> values = {params, shared, smem};
  const bool is_key = warp_idx() - kNumWarps < kOperandWarps;
  Ring ring = {0, 1};  // the stages are empty: the phase before their first is over
  Ring queries = {0, 1};
  const bool is_first = threadIdx.x % kQueryThreads == 0;
  int32_t index = 0;
  int landing = 0;
  ItemTile under_way[kNumLandings];
  for_each<kNumLandings>([&](int i) { under_way[i].item = kNoWork; });
  const auto deliver_query = [&](const WorkItem& item) {
    mbarrier_wait(shared.q_empty(queries.stage), queries.parity);
    const uint32_t stage = smem + kQueryOffset + queries.stage * kQueryStageBytes;
    if (item.work != kNoWork && !is_copied_by_consumers(item)) {
      copy_query<kWarpSize>(params.attention, item.rows(params.attention), stage,
                            threadIdx.x % kQueryThreads / kWarpSize, kNumQueryWarps);
      wait_for_copies();
    }
    mbarrier_arrive(shared.q_full(queries.stage));
    queries.next(kNumQueryStages);
  };
#pragma unroll 1
  while (true) {
    WorkItem& item = shared.work_items[index];
    if (is_first) {
      source.next(item, is_known);
      is_known = false;
      item.query_stage = index % kNumQueryStages;
      // After the last, as many steps without a tile as dequantise what is under way.
      if (item.work == kNoWork) item.begin = 0, item.end = kNumLandings + 1;
    }
    sync_threads<kQueryThreads>(kQueryBarrier);  // the work item is written
    const bool is_end = item.work == kNoWork;
    if (!is_end && item.is_empty()) {
      write_empty(params.attention, item, threadIdx.x % kQueryThreads, kQueryThreads);
      sync_threads<kQueryThreads>(kQueryBarrier);  // and read
      continue;
    }
    ItemTile coming = {index, item.begin};
    PageTable::Row page_row = {};
    if (!is_end) page_row = params.pages.row(item.query_tile.request);
#pragma unroll 1
    while (true) {
      // Before the tiles of a work item, those of the one before are complete: Q is soon free.
      const ItemTile now = under_way[0];
      if (now.is_first(shared)) deliver_query(shared.work_items[now.item]);
      if (is_key) {
        keys.load(now, coming, page_row, landing, ring);
      } else {
        values.load(now, coming, page_row, landing, ring);
      }
      if (++landing == kNumLandings) landing = 0;
      for_each<kNumLandings - 1>([&](int i) { under_way[i] = under_way[i + 1]; });
      under_way[kNumLandings - 1] = coming;
      if (++coming.tile == item.end) break;
    }
    if (is_end) break;
    index = (index + 1) % kNumWorkItems;
  }
}

}  // namespace jitattn
