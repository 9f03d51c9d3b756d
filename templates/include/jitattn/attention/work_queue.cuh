// Order of a CTA's work tiles: head block x % num_head_blocks of slot x / num_head_blocks
// (schedule.cuh) is work tile x.
#pragma once

#include "jitattn/attention/work_tile.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// The first work tile of a CTA is that of its index. The others are a grid apart, or are claimed
// one by one, so that CTAs with faster memory do more of them. Results do not depend on the CTA.
struct WorkQueue {
  static constexpr bool kHasOneWorkTile = false;
  static constexpr int kMaxWorkTiles = 1024;  // of launches whose CTAs claim them
  static constexpr int32_t kFree = -2, kBusy = -3;

  const AttentionParams& params;
  int32_t* claims;  // in shared memory: the work tiles of this CTA
  int32_t num_work_tiles;
  bool has_claims;

  // The caller synchronises.
  __device__ __forceinline__ explicit WorkQueue(const AttentionParams& params) : params(params) {
    __shared__ int32_t smem_claims[kMaxWorkTiles + 1];
    claims = smem_claims;
    num_work_tiles = params.schedule.header->num_slots * params.num_head_blocks;
    has_claims = params.claims_work_tiles;
    if (threadIdx.x == 0) claims[1] = kFree;
  }

  // Whether this CTA has a work tile at all.
  __device__ __forceinline__ bool has_work() const {
    return static_cast<int32_t>(blockIdx.x) < num_work_tiles;
  }

  // Work tile `index` of this CTA, or kNoWork past its last. For whole warps, at any time.
  __device__ __forceinline__ int32_t work_tile(int32_t index) const {
    if (!is_claimed(index)) return unclaimed_work_tile(index);
    int32_t next = 0;
    if (lane_idx() == 0) {
      next = atomicCAS(claims + index, kFree, kBusy);
      if (next == kFree) next = claim(index);
      while (next == kBusy) next = noted(index);
    }
    return __shfl_sync(0xffffffff, next, 0);
  }

  // The same for a work tile that this warp already knows.
  __device__ __forceinline__ int32_t known_work_tile(int32_t index) const {
    return is_claimed(index) ? noted(index) : unclaimed_work_tile(index);
  }

 private:
  __device__ __forceinline__ bool is_claimed(int32_t index) const {
    return has_claims && index > 0 && num_work_tiles > static_cast<int32_t>(gridDim.x);
  }

  __device__ __forceinline__ int32_t unclaimed_work_tile(int32_t index) const {
    // Slots past the last are empty, so that the first work tile needs no look at their number.
    const int32_t next = blockIdx.x + index * gridDim.x;
    return index == 0 || next < num_work_tiles ? next : kNoWork;
  }

  __device__ __forceinline__ int32_t noted(int32_t index) const {
    return *static_cast<volatile int32_t*>(claims + index);
  }

  __device__ __forceinline__ int32_t claim(int32_t index) const {
    wait_for_inputs(params);  // the previous run may use the same counter
    const int32_t claimed = atomicAdd(params.num_claimed, 1);
    // Every CTA claims once in vain, and the last of them resets the counter for the next launch.
    if (claimed == num_work_tiles - 1) *params.num_claimed = 0;
    const int32_t next = claimed + gridDim.x;
    const int32_t work_tile = next < num_work_tiles ? next : kNoWork;
    claims[index + 1] = kFree;
    __threadfence_block();
    *static_cast<volatile int32_t*>(claims + index) = work_tile;
    return work_tile;
  }
};

// The queue of a CTA that has one work tile.
struct OneWorkTile {
  static constexpr bool kHasOneWorkTile = true;
  int32_t work;

  __device__ __forceinline__ int32_t work_tile(int32_t index) const {
    return index == 0 ? work : kNoWork;
  }
};

template <bool kHasOneWorkTile>
struct QueueOf {
  using Type = OneWorkTile;
};
template <>
struct QueueOf<false> {
  using Type = WorkQueue;
};
// Kernels whose slots may be whole query tiles are launched with a CTA a work tile.
using Queue = QueueOf<kHasWholeQueryTiles>::Type;

}  // namespace jitattn
