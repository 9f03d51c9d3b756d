// Producer warpgroup of Q and KV tiles: up to two warps copy TMA tiles, and two load Q.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/work_items.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/barriers.cuh"
#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/wgmma_tiles.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Pages of a KV tile's TMA tiles, looked up ahead: lane i has the pages of TMA tile i. TMA tiles
// without tokens are skipped, since their pages need not exist.
struct TileAddresses {
  TileTokens tokens;
  int32_t latent_page;
  int32_t k_pe_page;

  static_assert(kNumTmaTiles <= kWarpSize, "each lane finds the pages of one");

  __device__ __forceinline__ TileAddresses(const KernelParams& params, PageTable::Row page_row,
                                           const WorkItemFacts& item, int32_t tile)
      : TileAddresses(item, tile) {
    if (has_tma_tile()) {
      latent_page = params.pages.k_id(page_row, own_token());
      k_pe_page = PageTable::kSharesPages ? latent_page : params.pages.v_id(page_row, own_token());
    }
  }
  // Before the wait for the previous kernel: pages may be any numbers.
  static __device__ __forceinline__ TileAddresses early(const KernelParams& params,
                                                        const WorkItemFacts& item, int32_t tile) {
    TileAddresses found(item, tile);
    const int32_t request = item.query_tile.request, token = found.own_token();
    if (found.has_tma_tile()) {
      found.latent_page = params.pages.early_k_page(request, token);
      found.k_pe_page =
          PageTable::kSharesPages ? found.latent_page : params.pages.early_v_page(request, token);
    }
    return found;
  }

  // Copies a half of the latents, and k_pe with the second: one TMA tile for each page, since each
  // copy takes time to issue.
  __device__ __forceinline__ void load(const KernelParams& params, int half, uint32_t smem,
                                       uint32_t barrier) const {
    constexpr int kLineBytes = kTmaTokens * kSegmentBytes;
    const int warp = warp_idx() % kTileWarps, count = num_tma_tiles();
    const int own_tma_tiles = (count - warp + kTileWarps - 1) / kTileWarps;
    if (lane_idx() == 0)
      mbarrier_expect(barrier, own_tma_tiles * (kHalfSegments + half) * kLineBytes);
    __syncwarp();
    // Unrolled, so that the operands of all copies are found at once.
    for_each<kNumTmaTiles / kTileWarps>([&](int i) {
      const int tma_tile = i * kTileWarps + warp, segment = half * kHalfSegments;
      const int32_t latent = __shfl_sync(0xffffffff, latent_page, tma_tile);
      const int32_t k_pe = __shfl_sync(0xffffffff, k_pe_page, tma_tile);
      if (tma_tile >= count || !elect_one()) return;
      const int32_t group = group_in_page(tma_tile);
      copy_tma(TileLayout::row(smem, segment, tma_tile * kTmaTokens), &params.k_map, barrier, 0,
               segment, group, latent);
      if (half == 0) return;
      copy_tma(KpeLayout::row(smem, tma_tile * kTmaTokens), &params.v_map, barrier, 0, 0, group,
               k_pe);
    });
  }

  // Asks for the tile, so that it is in L2.
  __device__ __forceinline__ void prefetch(const KernelParams& params) const {
    for_each<kNumTmaTiles / kTileWarps>([&](int i) {
      const int tma_tile = i * kTileWarps + warp_idx() % kTileWarps;
      const int32_t latent = __shfl_sync(0xffffffff, latent_page, tma_tile);
      const int32_t k_pe = __shfl_sync(0xffffffff, k_pe_page, tma_tile);
      if (tma_tile >= num_tma_tiles() || !elect_one()) return;
      const int32_t group = group_in_page(tma_tile);
      prefetch_tma(&params.k_map, 0, 0, group, latent);
      prefetch_tma(&params.k_map, 0, kHalfSegments, group, latent);
      prefetch_tma(&params.v_map, 0, 0, group, k_pe);
    });
  }

 private:
  __device__ __forceinline__ TileAddresses(const WorkItemFacts& item, int32_t tile)
      : tokens(item, tile), latent_page(0), k_pe_page(0) {}

  __device__ __forceinline__ bool has_tma_tile() const {
    return static_cast<int32_t>(lane_idx()) < num_tma_tiles();
  }
  __device__ __forceinline__ int32_t own_token() const {
    return tokens.begin + lane_idx() * kTmaTokens;
  }
  __device__ __forceinline__ int32_t num_tma_tiles() const {
    return (tokens.last + kTmaTokens - 1) / kTmaTokens;
  }
  // Group of eight tokens in its page.
  __device__ __forceinline__ int32_t group_in_page(int tma_tile) const {
    constexpr uint32_t kPageTmaTiles = kPageSize / kTmaTokens;
    return (tokens.begin / uint32_t(kTmaTokens) + tma_tile) % kPageTmaTiles * (kTmaTokens / 8);
  }
};

// Asks for the first tiles of a CTA's first work item while the previous kernel ends, and leaves memory
// idle: nothing is kept of them, as they may be written yet. For one of the warps that copy tiles.
__device__ __forceinline__ void prefetch_tiles(const KernelParams& params,
                                               const WorkItemFacts& first) {
  constexpr int kEarlyTiles = 2;
#pragma unroll 1
  for (int32_t tile = first.begin; tile < min(first.begin + kEarlyTiles, first.end); ++tile) {
    TileAddresses::early(params, first, tile).prefetch(params);
  }
}

// Loads the tiles of a work item. `is_first`: of a CTA, and known early.
__device__ __forceinline__ void load_item(const KernelParams& params, Shared& shared,
                                          const WorkItemFacts& item, bool is_first, uint32_t smem,
                                          uint32_t& parities) {
  const PageTable::Row page_row = params.pages.row(item.query_tile.request);
  const int32_t end = item.end;
  int32_t tile = item.begin, stage = 0;
  int32_t split_end = end_of_split(item.query_tile, tile, end);
  TileAddresses addresses(params, page_row, item, tile);
  if (!is_first) addresses.prefetch(params);  // the stage is in use yet
#pragma unroll 1
  while (true) {
    const TileAddresses now = addresses;
    // Looked up before the stage is empty.
    if (tile + 1 < end) addresses = TileAddresses(params, page_row, item, tile + 1);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      mbarrier_wait(shared.empty(stage, half), parities >> stage & 1);
      now.load(params, half, smem + stage * kTileBytes, shared.full(stage, half));
    }
    if (is_first) wait_for_first_query<kTileWarps * kWarpSize>();
    is_first = false;
    parities ^= 1 << stage;
    stage ^= 1;
    if (++tile == end) break;
    if (tile == split_end) stage = 0, split_end = end_of_split(item.query_tile, tile, end);
  }
}

// Loads the tiles of all work items.
__device__ __forceinline__ void load_tiles(const KernelParams& params, Shared& shared,
                                           uint32_t smem) {
  uint32_t parities = 3;  // a bit a stage: they are empty, the phases before their first are over
  shared.for_each_item(params, [&](const WorkItemFacts& item, bool is_first) {
    load_item(params, shared, item, is_first, smem, parities);
  });
}

__device__ __forceinline__ void produce(const KernelParams& params, Shared& shared, uint32_t smem) {
  const int warp = warp_idx() - kNumWarps;
  if (warp >= 2) {
    load_queries(params, shared, smem + kQueryOffset);
  } else if (warp < kTileWarps) {
    load_tiles(params, shared, smem);
  }
}

}  // namespace jitattn
