// The warpgroup that brings Q and tiles of tokens to shared memory: two warps copy boxes, where a tile
// has several, and two bring Q.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/work_items.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/barriers.cuh"
#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/wgmma_tiles.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// What a tile's boxes are read by, looked up ahead: lane i has the pages of box i. Boxes without
// tokens are left out, for their pages need not exist.
struct TilePlaces {
  TileTokens tokens;
  int32_t latent_page;
  int32_t rope_page;

  static_assert(kNumBoxes <= kWarpSize, "each lane finds the pages of one");

  __device__ __forceinline__ TilePlaces(const KernelParams& params, PageTable::Row page_row,
                                        const Job& job, int32_t tile)
      : tokens(job, tile) {
    latent_page = rope_page = 0;
    if (static_cast<int32_t>(lane_idx()) < num_boxes()) {
      const int32_t token = tokens.begin + lane_idx() * kTmaTokens;
      latent_page = params.pages.k_id(page_row, token);
      rope_page = PageTable::kSharesPages ? latent_page : params.pages.v_id(page_row, token);
    }
  }

  // Copies a half of the latents, and with the second the rope parts: a box a page, for each that is
  // asked for takes time.
  __device__ __forceinline__ void bring(const KernelParams& params, int half, uint32_t smem,
                                        uint32_t barrier) const {
    constexpr int kLineBytes = kTmaTokens * kSegmentBytes;
    const int warp = warp_idx() % kTileWarps, count = num_boxes();
    const int own_boxes = (count - warp + kTileWarps - 1) / kTileWarps;
    if (lane_idx() == 0) mbarrier_expect(barrier, own_boxes * (kHalfSegments + half) * kLineBytes);
    __syncwarp();
    // Unrolled, so that what boxes are asked for with is found at once.
    for_each<kNumBoxes / kTileWarps>([&](int i) {
      const int box = i * kTileWarps + warp, segment = half * kHalfSegments;
      const int32_t latent = __shfl_sync(0xffffffff, latent_page, box);
      const int32_t rope = __shfl_sync(0xffffffff, rope_page, box);
      if (box >= count || !elect_one()) return;
      const int32_t group = group_in_page(box);
      copy_tma(TileImage::row(smem, segment, box * kTmaTokens), &params.k_map, barrier, 0, segment,
               group, latent);
      if (half == 0) return;
      copy_tma(RopeImage::row(smem, box * kTmaTokens), &params.v_map, barrier, 0, 0, group, rope);
    });
  }

 private:
  __device__ __forceinline__ int32_t num_boxes() const {
    return (tokens.last + kTmaTokens - 1) / kTmaTokens;
  }
  // Of eight tokens.
  __device__ __forceinline__ int32_t group_in_page(int box) const {
    constexpr uint32_t kPageBoxes = kPageSize / kTmaTokens;
    return (tokens.begin / uint32_t(kTmaTokens) + box) % kPageBoxes * (kTmaTokens / 8);
  }
};

// Brings the tiles of all jobs.
__device__ __forceinline__ void load_tiles(const KernelParams& params, Shared& shared,
                                            uint32_t smem) {
  Ring jobs = {0, 0};
  uint32_t parities = 3;  // a bit a stage: they are empty, the phases before their first are over
#pragma unroll 1
  while (true) {
    mbarrier_wait(shared.job_full(jobs.stage), jobs.parity);
    const Job& job = shared.jobs[jobs.stage];
    if (job.work == kNoPiece) break;
    const PageTable::Row page_row = params.pages.row(job.unit.request);
    const int32_t end = job.end;
    int32_t tile = job.begin, run_begin = tile;
    TilePlaces places(params, page_row, job, tile);
#pragma unroll 1
    while (true) {
      const TilePlaces now = places;
      const int stage = (tile - run_begin) % 2;
      // Looked up before the room is there.
      if (tile + 1 < end) places = TilePlaces(params, page_row, job, tile + 1);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        mbarrier_wait(shared.empty(stage, half), parities >> stage & 1);
        now.bring(params, half, smem + stage * kTileBytes, shared.full(stage, half));
      }
      parities ^= 1 << stage;
      if (++tile == end) break;
      if (tile == job.split_end(run_begin)) run_begin = tile;
    }
    jobs.next(kNumJobs);
  }
}

// Finds the jobs and brings their Q. Empty ones are answered for on the way.
__device__ __forceinline__ void load_queries(const KernelParams& params, Shared& shared,
                                              uint32_t smem) {
  const int thread = threadIdx.x % kQueryThreads;
  prefetch_schedule(params.attention.schedule, thread);
  JobSource source(params);
  uint32_t parity = 1;
  int32_t index = 0;
  bool is_first = true;
#pragma unroll 1
  while (true) {
    // Who computes is past the job before the last, so that the oldest can be overwritten.
    mbarrier_wait(shared.q_empty(), parity);
    Job& job = shared.jobs[index];
    if (thread == 0) source.next(job);
    sync_threads<kQueryThreads>(kQueryBarrier);  // the job is written
    const bool is_end = job.work == kNoPiece;
    if (!is_end && (job.is_empty() || job.rows(params.attention).num_rows == 0)) {
      write_empty(params.attention, job, thread, kQueryThreads);
      sync_threads<kQueryThreads>(kQueryBarrier);  // and read
      continue;
    }
    if (thread == 0 && !is_first) mbarrier_arrive(shared.job_full(index));
    if (!is_end) bring_query(params, job, smem);
    // The first job's Q is asked for before its tokens, behind which it would come late.
    if (thread == 0 && is_first) mbarrier_arrive(shared.job_full(index));
    is_first = false;
    cp_async_wait_all();
    fence_before_tma();
    mbarrier_arrive(shared.q_full());
    if (is_end) break;
    parity ^= 1;
    index = (index + 1) % kNumJobs;
  }
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
