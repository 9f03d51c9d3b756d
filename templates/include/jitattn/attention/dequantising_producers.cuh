// Roles of producers of quantised caches: one warpgroup loads Q, the others dequantise K and V. A
// lane has vectors of 16 elements on their way to registers; it dequantises each to shared memory
// and asks for a later one in its place: those of V follow those of K, and then come the next
// tile's. With NVFP4 a vector is a block; with int4 it comes with the scale and zero of its block.
#pragma once

#include "jitattn/dequant_kernel.cuh"

#include "jitattn/attention/barriers.cuh"
#include "jitattn/attention/tile_loader.cuh"
#include "jitattn/attention/wgmma_tiles.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/int4.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/nvfp4.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kVectorElements = 16;
constexpr int kVectorSize = stored_bytes(kVectorElements);
// A warp has eight rows of a tile at a time, four lanes a row: their writes meet no bank twice.
constexpr int kGroupStep = 8 * kDequantWarps;  // rows from one group of a warp to its next
constexpr int kRowGroups = kTileTokens / 8;
constexpr int kWarpGroups = (kRowGroups + kDequantWarps - 1) / kDequantWarps;
// Registers of a lane's vectors that are on their way.
constexpr int kFlightWords = kUseVectorLoads ? 32 : 8;

// Work items between the last that all have done with and the one that is looked for.
constexpr uint32_t kItemsAhead = kNumWorkItems / 2;

static_assert(kNumQueryStages > 1, "work items are found ahead of the last tile of one before");
static_assert(8 * kWarpGroups <= kWarpSize, "each lane finds one row");
static_assert(kGroupStep % kTmaTokens == 0, "whole TMA tiles lie between a warp's groups");

// The largest divisor of `number` that is at most `most`.
__device__ constexpr int largest_divisor(int number, int most) {
  return most >= number ? number : number % most == 0 ? most : largest_divisor(number, most - 1);
}

// Sixteen elements of a row as they are stored.
template <bool kAreOfBlock>
struct StoredVector {
  static constexpr int kWords = 4;
  uint4 words;
};
template <>
struct StoredVector<true> {
  static constexpr int kWords = 3;
  uint2 words;
  uint32_t scale;  // with int4 and the zero
};

// A row of V of zeros, and of their blocks' scales: of tokens that there are not, since a NaN there must
// not meet a probability of zero.
alignas(16)
    __device__ const uint8_t kZeroRow[stored_bytes(kValueDim) + block_bytes(kValueDim)] = {};

// Addresses of a row of K or V, and of the scales of its blocks.
struct RowSource {
  uint64_t row;
  uint64_t scales;
};

// What these producers keep of a work item.
struct ItemRows {
  PageTable::Row page_row;
  RowSource keys;  // what lies before the first page of its head
  RowSource values;
  int32_t kv_begin;
  int32_t kv_last;

  // The token of the item that is next to one.
  __device__ __forceinline__ int32_t nearest(int32_t token) const {
    return max(min(token, kv_last), kv_begin);
  }
};

// A tile's K or V: its place among the vectors that a lane has of the tile, and in memory.
template <bool kIsKey>
struct Operand {
  static constexpr int kSegments = kIsKey ? kKeySegments : kValueSegments;
  static constexpr int kFirst = kIsKey ? 0 : kWarpGroups * kKeySegments;

  static __device__ __forceinline__ const BlockScales& blocks(const KernelParams& params) {
    return kIsKey ? params.k_blocks : params.v_blocks;
  }

  static __device__ __forceinline__ RowSource of_head(const KernelParams& params,
                                                      const HeadBlock& block) {
    const AttentionParams& attention = params.attention;
    const int32_t column = Source<kIsKey>::first_column(block, 0);
    RowSource source = {};
    source.row = reinterpret_cast<uint64_t>(kIsKey ? attention.k : attention.v) +
                 block.kv_head * (kIsKey ? attention.k_head_stride : attention.v_head_stride) +
                 stored_bytes(column);
    if constexpr (kHasBlocks) {
      source.scales = reinterpret_cast<uint64_t>(blocks(params).scales) +
                      block.kv_head * blocks(params).head_stride + BlocksOf<KVType>::place(column);
    }
    return source;
  }

  static __device__ __forceinline__ RowSource of_token(const KernelParams& params,
                                                       const RowSource& head, const Location& at) {
    const AttentionParams& attention = params.attention;
    RowSource source = {};
    source.row = head.row + at.page * (kIsKey ? attention.k_page_stride : attention.v_page_stride) +
                 at.token * (kIsKey ? attention.k_token_stride : attention.v_token_stride);
    if constexpr (kHasBlocks) {
      source.scales = head.scales + at.page * blocks(params).page_stride +
                      at.token * blocks(params).token_stride;
    }
    return source;
  }

  // Whether rows have a vector of this lane in a segment.
  static __device__ __forceinline__ bool has(int segment) {
    constexpr int kDim = Source<kIsKey>::kDim;
    if ((segment + 1) * 4 * kVectorElements <= kDim) return true;
    return (segment * 4 + lane_idx() % 4) * kVectorElements < kDim;
  }

  // Place of this lane's first vector in a stage.
  static __device__ __forceinline__ uint32_t target(uint32_t smem, int stage) {
    const int lane = forget(lane_idx());  // found again for each tile: registers are few
    const int row = (warp_idx() - kNumWarps) * 8 + lane / 4;
    const uint32_t begin = smem + (kIsKey ? kKeyOffset + stage * kKeyStageBytes
                                          : kValueOffset + stage * kValueStageBytes);
    return Source<kIsKey>::row(begin, 0, row) + (lane % 4 * 2 ^ row % 8) * 16;
  }
};

// Dequantising loader, tile by tile.
struct TileDequantiser {
  using Vector = StoredVector<kHasBlocks>;
  using Keys = Operand<true>;
  using Values = Operand<false>;
  static constexpr int kVectors = kWarpGroups * (kKeySegments + kValueSegments);
  static constexpr int kFlight = largest_divisor(kVectors, kFlightWords / Vector::kWords);

  const KernelParams& params;
  Shared& shared;
  uint32_t smem;
  // Of one of the warp's rows of the tile under way. Rows without a token are those of the nearest
  // one in K, whose scores are masked, and zeros in V: loads that always are there need no condition,
  // whose outcome the compiler would wait for.
  RowSource keys;
  RowSource values;
  RowSource row;            // of the vector that was asked for last
  Vector vectors[kFlight];  // vector i of a tile is in place i % kFlight

  __device__ __forceinline__ TileDequantiser(const KernelParams& params, Shared& shared,
                                             uint32_t smem)
      : params(params), shared(shared), smem(smem) {}

  __device__ __forceinline__ ItemRows rows_of(const WorkItemFacts& item) const {
    const HeadBlock block(params.attention, item.work);
    ItemRows rows;
    rows.page_row = params.pages.row(item.query_tile.request);
    rows.keys = Keys::of_head(params, block);
    rows.values = Values::of_head(params, block);
    rows.kv_begin = item.query_tile.kv_begin;
    // Not the query tile's end: what lies between is the request's own.
    rows.kv_last = item.request.kv_len - 1;
    return rows;
  }

  // Asks for the first vectors of a tile of a work item.
  __device__ __forceinline__ void begin(const ItemRows& rows, int32_t tile) {
    const int32_t token = rows.nearest(token_of(tile));
    find_sources(rows, tile, Source<true>::id(params, rows.page_row, token),
                 Source<false>::id(params, rows.page_row, token));
    for_each<kFlight>([&](int i) {
      ask(i);
      // Or the compiler finds all addresses first: registers are few.
      if (!kUseVectorLoads || i % 2) __syncwarp();
    });
  }

  // Dequantises the tile under way, and asks for the first vectors of another unless `is_last`.
  __device__ __forceinline__ void advance(const ItemRows& rows, int32_t tile, bool is_last,
                                          const Ring& ring) {
    int32_t k_page = 0, v_page = 0;  // looked up before they are needed
    if (!is_last) {
      const int32_t token = rows.nearest(token_of(tile));
      k_page = Source<true>::id(params, rows.page_row, token);
      v_page = PageTable::kSharesPages ? k_page : Source<false>::id(params, rows.page_row, token);
    }
    const auto store_all = [&](auto operand, uint32_t target) {
      using Of = decltype(operand);
      for_each<kWarpGroups * Of::kSegments>([&](int i) {
        const int index = Of::kFirst + i;
        store(operand, i, target);
        if (index == kVectors - kFlight && !is_last) {
          find_sources(rows, tile, k_page, v_page);
        }
        ask((index + kFlight) % kVectors);
        // Or the compiler asks when it suits it, which is late.
        if (!kUseVectorLoads || i % 2) __syncwarp();
      });
      __syncwarp();
    };
    mbarrier_wait(shared.k_empty(ring.stage), ring.parity);
    store_all(Keys{}, Keys::target(smem, ring.stage));
    if (lane_idx() == 0) mbarrier_arrive(shared.k_full(ring.stage));
    mbarrier_wait(shared.v_empty(ring.stage), ring.parity);
    store_all(Values{}, Values::target(smem, ring.stage));
    if (lane_idx() == 0) mbarrier_arrive(shared.v_full(ring.stage));
  }

 private:
  // Token of this lane's row of a tile, one of the warp's rows.
  static __device__ __forceinline__ int32_t token_of(int32_t tile) {
    // Found again: registers are few.
    const uint32_t thread = forget(threadIdx.x) - kNumThreads, lane = thread % kWarpSize;
    const int row = lane / 8 * kGroupStep + thread / kWarpSize * 8 + lane % 8;
    return tile * kTileTokens + row;
  }

  __device__ __forceinline__ void find_sources(const ItemRows& rows, int32_t tile, int32_t k_page,
                                               int32_t v_page) {
    const int32_t own = token_of(tile), token = rows.nearest(own);
    keys = Keys::of_token(params, rows.keys, PageTable::locate(k_page, token));
    values = Values::of_token(params, rows.values, PageTable::locate(v_page, token));
    if (token != own) {
      values.row = reinterpret_cast<uint64_t>(kZeroRow);
      values.scales = values.row + stored_bytes(kValueDim);
    }
  }

  // Asks for vector `i` of a tile, after those before it.
  __device__ __forceinline__ void ask(int i) {
    if (i < Values::kFirst) {
      ask(Keys{}, i, keys);
    } else {
      ask(Values{}, i, values);
    }
  }
  template <typename Of>
  __device__ __forceinline__ void ask(Of, int i, const RowSource& source) {
    const int group = (i - Of::kFirst) / Of::kSegments, segment = (i - Of::kFirst) % Of::kSegments;
    const int part = lane_idx() % 4;
    if (segment == 0) {
      const int lane = group * 8 + lane_idx() / 4;
      row.row = __shfl_sync(0xffffffff, source.row, lane) + part * kVectorSize;
      if constexpr (kHasBlocks) row.scales = __shfl_sync(0xffffffff, source.scales, lane);
    }
    const int step = Of::has(segment) ? segment * 4 : -part;
    const int dim = (step + part) * kVectorElements;
    load(vectors[i % kFlight], row.row + step * kVectorSize,
         row.scales + BlocksOf<KVType>::place(dim));
  }

  static __device__ __forceinline__ void load(StoredVector<false>& vector, uint64_t address,
                                              uint64_t) {
    const auto* source = reinterpret_cast<const uint8_t*>(address);
    vector.words = kUseVectorLoads ? ld_past_l1_16(source) : load_16(source);
  }
  static __device__ __forceinline__ void load(StoredVector<true>& vector, uint64_t address,
                                              uint64_t scale_address) {
    const auto* source = reinterpret_cast<const uint8_t*>(address);
    vector.words = kUseVectorLoads ? ld_past_l1_8(source) : load_8(source);
    if constexpr (!kHasZeros) {
      vector.scale = *reinterpret_cast<const uint8_t*>(scale_address);
    } else if constexpr (kUseVectorLoads) {
      vector.scale = *reinterpret_cast<const uint32_t*>(scale_address);
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(scale_address);
      vector.scale = join(halves[0], halves[1]);
    }
  }

  // Dequantises vector `i` of K or V to its stage; `target` is the place of the lane's first one.
  template <typename Of>
  __device__ __forceinline__ void store(Of, int i, uint32_t target) const {
    constexpr bool kIsKey = Of::kFirst == 0;
    const int group = i / Of::kSegments, segment = i % Of::kSegments;
    if (!Of::has(segment)) return;
    if (kRowGroups % kDequantWarps != 0 &&
        group * kDequantWarps + warp_idx() - kNumWarps >= kRowGroups) {
      return;
    }
    const uint32_t offset = Source<kIsKey>::row(0, segment, group * kGroupStep);
    uint4 low, high;
    dequantise(vectors[(Of::kFirst + i) % kFlight], low, high);
    st_shared_16(target + offset, low);
    st_shared_16((target ^ 16) + offset, high);
  }

  static __device__ __forceinline__ void dequantise(const StoredVector<false>& vector, uint4& low,
                                                    uint4& high) {
    const uint2 a = unpack_pairs<ProductType, KVType>(vector.words.x);
    const uint2 b = unpack_pairs<ProductType, KVType>(vector.words.y);
    const uint2 c = unpack_pairs<ProductType, KVType>(vector.words.z);
    const uint2 d = unpack_pairs<ProductType, KVType>(vector.words.w);
    low = {a.x, a.y, b.x, b.y};
    high = {c.x, c.y, d.x, d.y};
  }
  static __device__ __forceinline__ void dequantise(const StoredVector<true>& vector, uint4& low,
                                                    uint4& high) {
    if constexpr (kHasZeros) {
      low = affine_eight<ProductType>(vector.words.x, vector.scale);
      high = affine_eight<ProductType>(vector.words.y, vector.scale);
    } else {
      const uint32_t scales = low_twice(block_scale_pair<ProductType>(vector.scale));
      low = block_eight<ProductType>(vector.words.x, scales);
      high = block_eight<ProductType>(vector.words.y, scales);
    }
  }
};

// Dequantises K and V of all work items, each tile while the next one is on its way.
__device__ __forceinline__ void load_keys_and_values(const KernelParams& params, Shared& shared,
                                                     uint32_t smem) {
  TileDequantiser tiles(params, shared, smem);
  // Those before; places in rings are found from them, for registers are few.
  uint32_t num_items = 0, num_tiles = 0;
  // The first without a wait for who finds the others.
  WorkItemFacts& first_item = shared.first_items[warp_idx() - kNumWarps];
  const bool is_known = copy_first_item(params, first_item);
  if (!is_known) mbarrier_wait(shared.item_full(0), 0);
  const WorkItemFacts& first = is_known ? first_item : shared.work_items[0];
  if (first.work == kNoWork) return;
  ItemRows rows = tiles.rows_of(first);
  int32_t tile = first.begin, end = first.end;
  tiles.begin(rows, tile);
  bool is_last = false;
#pragma unroll 1
  do {
    if (++tile == end) {
      mbarrier_arrive(shared.item_empty(num_items % kNumWorkItems));
      // Whoever finds work items is ahead: no tile that is not there yet is waited for.
      const uint32_t index = ++num_items % kNumWorkItems;
      mbarrier_wait(shared.item_full(index), num_items / kNumWorkItems % 2);
      const WorkItem& item = shared.work_items[index];
      is_last = item.work == kNoWork;
      if (!is_last) {
        rows = tiles.rows_of(item);
        tile = item.begin, end = item.end;
      }
    }
    // The stages are empty in the beginning: the phase before their first is over.
    const int32_t stage = num_tiles % kNumStages;
    tiles.advance(rows, tile, is_last, {stage, num_tiles / kNumStages % 2 ^ 1});
    ++num_tiles;
  } while (!is_last);
}

// The warp that finds work items, some ahead of the last that all have done with, and writes the rows
// of empty ones.
__device__ __forceinline__ void find_work_items(const KernelParams& params, Shared& shared) {
  FinderState& state = shared.finder;  // kept there: registers are few
  const bool is_known = copy_first_item(params, shared.work_items[0]);
  if (lane_idx() == 0) {
    static_cast<WorkPlace&>(state) = WorkItemIterator(params);
    state.num_items = 0;
    state.is_known = is_known;
  }
#pragma unroll 1
  while (true) {
    __syncwarp();
    if (state.num_items >= kItemsAhead) {
      const uint32_t earlier = state.num_items - kItemsAhead;
      mbarrier_wait(shared.item_empty(earlier % kNumWorkItems), earlier / kNumWorkItems % 2);
    }
    if (lane_idx() == 0) {
      WorkItem& item = shared.work_items[state.num_items % kNumWorkItems];
      WorkItemIterator source(params, state);
      source.next(item, state.is_known);
      item.query_stage = state.num_items % kNumQueryStages;
      static_cast<WorkPlace&>(state) = source;
      state.is_known = false;
    }
    __syncwarp();  // the work item is written
    const uint32_t index = state.num_items % kNumWorkItems;
    const WorkItem& item = shared.work_items[index];
    const bool is_end = item.work == kNoWork;
    if (!is_end && item.is_empty()) {
      write_empty(params.attention, item, lane_idx(), kWarpSize);
      continue;
    }
    mbarrier_arrive(shared.item_full(index));  // each lane: some of them wrote the first
    if (is_end) break;
    __syncwarp();  // all lanes have found it
    if (lane_idx() == 0) ++state.num_items;
  }
}

// The other warps of their warpgroup: load Q of all work items, in the type of products.
__device__ __forceinline__ void load_converted_queries(const KernelParams& params, Shared& shared,
                                                       uint32_t smem) {
  constexpr int kRows = 16;  // of a warp at a time
  const int warp = threadIdx.x % kQueryThreads / kWarpSize - 1;
  uint32_t num_items = 0;
#pragma unroll 1
  while (true) {
    const uint32_t index = num_items % kNumWorkItems, stage = num_items % kNumQueryStages;
    mbarrier_wait(shared.item_full(index), num_items / kNumWorkItems % 2);
    const WorkItem& item = shared.work_items[index];
    const bool is_end = item.work == kNoWork;
    mbarrier_wait(shared.q_empty(stage), (num_items / kNumQueryStages + 1) % 2);
    if (!is_end && !is_copied_by_consumers(item)) {
      const uint32_t target = smem + stage * kQueryStageBytes;
      const QueryRows rows = item.rows(params.attention);
      copy_query<kRows>(params.attention, rows, target, warp, kNumQueryWarps - 1);
      wait_for_copies();
      convert_query<kRows>(shared, rows, target, stage, warp, kNumQueryWarps - 1);
    }
    mbarrier_arrive(shared.q_full(stage));
    mbarrier_arrive(shared.item_empty(index));
    if (is_end) break;
    ++num_items;
  }
}

__device__ __forceinline__ void produce(const KernelParams& params, Shared& shared, uint32_t smem) {
  if (threadIdx.x >= kNumThreads + kDequantWarps * kWarpSize) {
    if constexpr (kQueryRegisters > 0) cutlass::arch::warpgroup_reg_dealloc<kQueryRegisters>();
    prefetch_schedule(params.attention.schedule, threadIdx.x % kQueryThreads);
    if (threadIdx.x % kQueryThreads < kWarpSize) {
      find_work_items(params, shared);
    } else {
      load_converted_queries(params, shared, smem + kQueryOffset);
    }
  } else {
    if constexpr (kQueryRegisters > 0) cutlass::arch::warpgroup_reg_dealloc<kDequantRegisters>();
    load_keys_and_values(params, shared, smem);
  }
}

}  // namespace jitattn
