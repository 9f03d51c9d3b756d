// Producer warpgroup of Q and of stages of tokens: up to two warps copy TMA tiles, and two load Q.
#pragma once

#include "jitattn/mla/narrow_kernel.cuh"

#include "jitattn/attention/work_items.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/stages.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Pages of the TMA tiles of a stage, looked up ahead: lane i has the pages of TMA tile i. TMA tiles
// without tokens are skipped, since their pages need not exist.
struct StageAddresses {
  int32_t begin;  // token of the request
  int32_t count;  // of TMA tiles
  int32_t latent_page;
  int32_t k_pe_page;

  // `stage` counts those of the request.
  __device__ __forceinline__ StageAddresses(const KernelParams& params, PageTable::Row page_row,
                                            const WorkItemFacts& item, int32_t stage)
      : StageAddresses(item, stage) {
    if (has_tma_tile()) {
      latent_page = params.pages.k_id(page_row, own_token());
      k_pe_page = PageTable::kSharesPages ? latent_page : params.pages.v_id(page_row, own_token());
    }
  }
  // Before the wait for the previous kernel: pages may be any numbers.
  static __device__ __forceinline__ StageAddresses early(const KernelParams& params,
                                                         const WorkItemFacts& item, int32_t stage) {
    StageAddresses found(item, stage);
    const int32_t request = item.query_tile.request, token = found.own_token();
    if (found.has_tma_tile()) {
      found.latent_page = params.pages.early_k_page(request, token);
      found.k_pe_page =
          PageTable::kSharesPages ? found.latent_page : params.pages.early_v_page(request, token);
    }
    return found;
  }

  // Copies what this warp copies of the stage.
  __device__ __forceinline__ void load(const KernelParams& params, uint32_t smem,
                                       uint32_t barrier) const {
    constexpr int kTokenTmaBytes = (kRowSegments + 1) * kSegmentBytes;
    const int warp = warp_idx() % kStageWarps;
    const int own = (count - warp + kStageWarps - 1) / kStageWarps;
    if (lane_idx() == 0) mbarrier_expect(barrier, own * kTmaTokens * kTokenTmaBytes);
    __syncwarp();
    for_each<kStageTmaTiles / kStageWarps>([&](int i) {
      const int tma_tile = i * kStageWarps + warp;
      const int32_t latent = __shfl_sync(0xffffffff, latent_page, tma_tile);
      const int32_t k_pe = __shfl_sync(0xffffffff, k_pe_page, tma_tile);
      if (tma_tile >= count || !elect_one()) return;
      const int32_t group = group_in_page(tma_tile), token = tma_tile * kTmaTokens;
      copy_tma(smem + token / 8 * kGroupBytes, &params.k_map, barrier, 0, 0, group, latent);
      copy_tma(smem + kKpeOffset + token * kSegmentBytes, &params.v_map, barrier, 0, 0, group,
               k_pe);
    });
  }

  // Asks for the stage, so that it is in L2.
  __device__ __forceinline__ void prefetch(const KernelParams& params) const {
    for_each<kStageTmaTiles / kStageWarps>([&](int i) {
      const int tma_tile = i * kStageWarps + warp_idx() % kStageWarps;
      const int32_t latent = __shfl_sync(0xffffffff, latent_page, tma_tile);
      const int32_t k_pe = __shfl_sync(0xffffffff, k_pe_page, tma_tile);
      if (tma_tile >= count || !elect_one()) return;
      const int32_t group = group_in_page(tma_tile);
      prefetch_tma(&params.k_map, 0, 0, group, latent);
      prefetch_tma(&params.v_map, 0, 0, group, k_pe);
    });
  }

 private:
  __device__ __forceinline__ StageAddresses(const WorkItemFacts& item, int32_t stage)
      : begin(stage * kRingTokens), latent_page(0), k_pe_page(0) {
    // Not the query tile's end: what lies between is the request's own, and saves clearing V.
    const int32_t last = min(max(item.request.kv_len - begin, 0), kRingTokens);
    count = (last + kTmaTokens - 1) / kTmaTokens;
  }

  __device__ __forceinline__ bool has_tma_tile() const {
    return static_cast<int32_t>(lane_idx()) < count;
  }
  __device__ __forceinline__ int32_t own_token() const { return begin + lane_idx() * kTmaTokens; }
  // Group of eight tokens in its page.
  __device__ __forceinline__ int32_t group_in_page(int tma_tile) const {
    constexpr uint32_t kPageTmaTiles = kPageSize / kTmaTokens;
    return (begin / uint32_t(kTmaTokens) + tma_tile) % kPageTmaTiles * (kTmaTokens / 8);
  }
};

// Asks for the first stages of a CTA's first work item while the previous kernel ends, and leaves
// memory idle: nothing is kept of them, as they may be written yet. For one of the warps that copy.
__device__ __forceinline__ void prefetch_tiles(const KernelParams& params,
                                               const WorkItemFacts& first) {
  const int32_t begin = first.begin * kTileStages, end = first.end * kTileStages;
#pragma unroll 1
  for (int32_t stage = begin; stage < min(begin + kEarlyStages, end); ++stage) {
    StageAddresses::early(params, first, stage).prefetch(params);
  }
}

// Loads the stages of a work item. `is_first`: of a CTA, and known early.
__device__ __forceinline__ void load_item(const KernelParams& params, Shared& shared,
                                          const WorkItemFacts& item, bool is_first, uint32_t smem,
                                          Ring& ring) {
  const PageTable::Row page_row = params.pages.row(item.query_tile.request);
  const int32_t end = item.end * kTileStages;
  int32_t stage = item.begin * kTileStages;
  StageAddresses addresses(params, page_row, item, stage);
#pragma unroll 1
  for (; stage < end; ++stage) {
    const StageAddresses now = addresses;
    // Looked up before the stage is empty.
    if (stage + 1 < end) addresses = StageAddresses(params, page_row, item, stage + 1);
    mbarrier_wait(shared.empty(ring.stage), ring.parity);
    now.load(params, smem + ring.stage * kRingStageBytes, shared.full(ring.stage));
    ring.next(kNumStages);
    if (is_first && stage + 1 == item.begin * kTileStages + kEarlyStages) {
      wait_for_first_query<kTokenThreads>();
      // Whoever asks for all stages at once is ahead of CTAs that begin later, and ends sooner: memory is
      // as busy with some.
      mbarrier_wait(shared.full(0), 0);
    }
  }
}

// Loads the stages of all work items.
__device__ __forceinline__ void load_stages(const KernelParams& params, Shared& shared,
                                            uint32_t smem) {
  Ring ring = {0, 1};  // stages are empty: the phases before their first are over
  shared.for_each_item(params, [&](const WorkItemFacts& item, bool is_first) {
    load_item(params, shared, item, is_first, smem, ring);
  });
}

__device__ __forceinline__ void produce(const KernelParams& params, Shared& shared, uint32_t smem) {
  const int warp = warp_idx() - kNumWarps;
  if (warp >= 2) {
    load_queries(params, shared, smem + kStageQueryOffset);
  } else if (warp < kStageWarps) {
    load_stages(params, shared, smem);
  }
}

}  // namespace jitattn
