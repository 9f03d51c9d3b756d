// Roles of producers where products have 8 bits: one warp loads K to its stages and V to landings,
// one loads Q, and the others transpose V from its landings to its stages.
#pragma once

#include "jitattn/fp8_kernel.cuh"

#include "jitattn/attention/tile_loader.cuh"

namespace jitattn {

// Loads K and V of all work items.
__device__ __forceinline__ void load_keys_and_values(const KernelParams& params, Shared& shared,
                                                     uint32_t smem) {
  Ring work_items = {0, 0};
  Ring keys = {0, 1}, landings = {0, 1};  // empty: the phase before their first is over
  // The first without a wait for who finds the others.
  WorkItemFacts& first_item = shared.first_items[0];
  bool is_first = copy_first_item(params, first_item);
#pragma unroll 1
  while (true) {
    if (!is_first) mbarrier_wait(shared.item_full(work_items.stage), work_items.parity);
    const WorkItemFacts& item = is_first ? first_item : shared.work_items[work_items.stage];
    if (item.work == kNoWork) break;
    const HeadBlock block(params.attention, item.work);
    const int32_t begin = item.begin, end = item.end;
    const PageTable::Row page_row = params.pages.row(item.query_tile.request);
    // Looked up before the stages are empty, but where one warp gathers both: registers are few.
    constexpr bool kLooksAhead = kTileLoader != TileLoader::kGather;
    const auto keys_of = [&](int32_t tile) {
      return TileAddresses<true>(params, page_row, item, tile);
    };
    const auto values_of = [&](int32_t tile) {
      return TileAddresses<false>(params, page_row, item, tile);
    };
    TileAddresses<true> next_keys;
    TileAddresses<false> next_values;
    if (kLooksAhead) next_keys = keys_of(begin), next_values = values_of(begin);
#pragma unroll 1
    for (int32_t tile = begin; tile < end; ++tile) {
      const TileAddresses<true> now_keys = kLooksAhead ? next_keys : keys_of(tile);
      const TileAddresses<false> now_values = next_values;
      if (kLooksAhead && tile + 1 < end) {
        next_keys = keys_of(tile + 1), next_values = values_of(tile + 1);
      }
      mbarrier_wait(shared.k_empty(keys.stage), keys.parity);
      now_keys.load(params, block, smem + kKeyOffset + keys.stage * kKeyStageBytes,
                    shared.k_full(keys.stage), 0);
      keys.next(kNumStages);
      mbarrier_wait(shared.landing_empty(landings.stage), landings.parity);
      (kLooksAhead ? now_values : values_of(tile))
          .load(params, block, smem + kLandingOffset + landings.stage * kLandingBytes,
                shared.landing_full(landings.stage), 0);
      landings.next(kNumLandings);
    }
    if (is_first) mbarrier_wait(shared.item_full(work_items.stage), work_items.parity);
    is_first = false;
    work_items.next(kNumWorkItems);
  }
}

// A warp's part of the transposition of V: of all tokens every kTransposeWarps-th 16 columns.
struct Transposer {
  static constexpr int kBlockTokens = 32;
  static constexpr int kVectors = kValueDim / 16 / kTransposeWarps;  // of 16 columns, of a warp
  static_assert(kValueDim % (16 * kTransposeWarps) == 0, "warps have equal parts");
  static_assert(8 % kTransposeWarps == 0, "vectors of a warp differ in some bits of their places");
  // Of them, those whose loads overlap: registers are few.
  static constexpr int kAtOnce = kVectors == 4       ? 4
                                 : kVectors % 4 == 0 ? 2
                                 : kVectors % 3 == 0 ? 3
                                                     : 2 - kVectors % 2;

  int warp;  // of those that transpose
  // Matrices of 8 x 16 bytes: the tokens that this lane names, and the columns.
  int token;
  int column;
  uint32_t first_bytes;  // of the first columns that a lane stores
  uint32_t last_bytes;

  __device__ __forceinline__ explicit Transposer(int warp) : warp(warp) {
    const int lane = lane_idx(), matrix = lane / 8, row = lane % 8;
    token = lane;
    // Neighbouring columns change places in the lower half, so that the eight rows of a matrix lie
    // in different banks.
    column = 2 * row + (row / 4 ^ matrix % 2);
    const bool is_high = lane / 16;
    first_bytes = is_high ? 0x7531 : 0x6420;
    last_bytes = is_high ? 0x6420 : 0x7531;
  }

  // Of a tile: a landing has the tokens of a TMA tile after those of another.
  __device__ __forceinline__ void transpose(uint32_t landing, uint32_t stage) const {
#pragma unroll 1
    for (int block = 0; block < kTileTokens / kBlockTokens; ++block) {
      const int row = block * kBlockTokens + token;
      const uint32_t source = ValueLayout::row(landing, 0, row) + (warp ^ row % 8) * 16;
      // Vectors of 16 tokens: two of this block, one a pair of matrices.
      const int segment = block / 4, vector = block % 4 * 2 + lane_idx() / 16;
      const uint32_t target =
          ColumnLayout::row(stage, segment, warp * 16 + column) + (vector ^ column % 8) * 16;
      for_each<kVectors / kAtOnce>([&](int part) {
        uint4 words[kAtOnce];
        for_each<kAtOnce>([&](int i) {
          const int from = (part * kAtOnce + i) * kTransposeWarps;
          words[i] = ldmatrix_x4_trans((source ^ from % 8 * 16) + ValueLayout::row(0, from / 8, 0));
        });
        for_each<kAtOnce>([&](int i) {
          const int to = (part * kAtOnce + i) * kTransposeWarps;
          const uint4& from = words[i];
          stmatrix_x4(
              target + ColumnLayout::row(0, 0, to * 16),
              {__byte_perm(from.x, from.y, first_bytes), __byte_perm(from.x, from.y, last_bytes),
               __byte_perm(from.z, from.w, first_bytes), __byte_perm(from.z, from.w, last_bytes)});
        });
      });
    }
  }

  // Zeros in the rows that no request owns, or that no TMA tile loaded: a NaN there must not meet a
  // probability of zero.
  __device__ __forceinline__ void clear_outside(uint32_t landing, const TileTokens& tokens) const {
    if constexpr (!kUsesTma) return;
    if (tokens.first == 0 && tokens.last == kTileTokens) return;
#pragma unroll 1
    for (int i = warp * kWarpSize + lane_idx(); i < kTileTokens * kValueSegments * 8;
         i += kTransposeWarps * kWarpSize) {
      const int row = i / 8 % kTileTokens, segment = i / 8 / kTileTokens;
      if (row >= tokens.first && row < tokens.last) continue;
      st_shared_16(ValueLayout::row(landing, segment, row) + i % 8 * 16, {});
    }
    sync_threads<kTransposeWarps * kWarpSize>(kTransposeBarrier);
  }
};

// Transposes V of all work items.
__device__ __forceinline__ void transpose_values(Shared& shared, uint32_t smem, int warp) {
  const Transposer transposer(warp);
  Ring work_items = {0, 0}, landings = {0, 0};
  Ring values = {0, 1};  // the stages are empty
#pragma unroll 1
  while (true) {
    mbarrier_wait(shared.item_full(work_items.stage), work_items.parity);
    const WorkItem& item = shared.work_items[work_items.stage];
    if (item.work == kNoWork) break;
    const int32_t end = item.end;
#pragma unroll 1
    for (int32_t tile = item.begin; tile < end; ++tile) {
      const uint32_t landing = smem + kLandingOffset + landings.stage * kLandingBytes;
      mbarrier_wait(shared.landing_full(landings.stage), landings.parity);
      transposer.clear_outside(landing, TileTokens(item, tile));
      mbarrier_wait(shared.v_empty(values.stage), values.parity);
      transposer.transpose(landing, smem + kValueOffset + values.stage * kValueStageBytes);
      fence_before_tma();  // products read it, and TMA tiles may overwrite zeros
      __syncwarp();
      if (lane_idx() == 0) {
        mbarrier_arrive(shared.v_full(values.stage));
        mbarrier_arrive(shared.landing_empty(landings.stage));
      }
      landings.next(kNumLandings);
      values.next(kNumStages);
    }
    work_items.next(kNumWorkItems);
  }
}

__device__ __forceinline__ void produce(const KernelParams& params, Shared& shared, uint32_t smem) {
  const int warp = warp_idx() - kNumWarps;
  if (warp == 0) {
    load_keys_and_values(params, shared, smem);
  } else if (warp == 1) {
    load_queries(params, shared, smem + kQueryOffset);
  } else {
    transpose_values(shared, smem, warp - 2);
  }
}

}  // namespace jitattn
