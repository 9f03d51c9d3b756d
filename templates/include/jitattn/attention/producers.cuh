// Roles of producers: kTileWarps warps for K, as many for V, two for Q.
#pragma once

#include "jitattn/attention/tile_loader.cuh"

namespace jitattn {

__device__ __forceinline__ void produce(const KernelParams& params, Shared& shared, uint32_t smem) {
  if constexpr (kTileWarps > 1) {
    // In this order and by threads: the compiler then gives each role its registers.
    constexpr int kTileThreads = kTileWarps * kWarpSize;
    if (threadIdx.x >= kNumThreads + 2 * kTileThreads) {
      load_queries(params, shared, smem + kQueryOffset);
    } else if (threadIdx.x >= kNumThreads + kTileThreads) {
      load_tiles<false>(params, shared, smem + kValueOffset);
    } else {
      load_tiles<true>(params, shared, smem + kKeyOffset);
    }
    return;
  }
  const int warp = warp_idx() - kNumWarps;
  if (warp == 0) {
    load_tiles<true>(params, shared, smem + kKeyOffset);
  } else if (warp == 1) {
    load_tiles<false>(params, shared, smem + kValueOffset);
  } else {
    load_queries(params, shared, smem + kQueryOffset);
  }
}

}  // namespace jitattn
