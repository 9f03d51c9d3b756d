// In which order a CTA does pieces of the work: head block x % num_head_blocks of slot
// x / num_head_blocks (schedule.cuh) is piece x.
#pragma once

#include "jitattn/attention/work_tile.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// The first piece of a CTA is that of its index. The others lie a grid apart, or are claimed one by
// one, so that CTAs that memory serves better do more of them. What a piece is does not depend on
// who does it.
struct WorkQueue {
  static constexpr bool kIsOnePiece = false;
  static constexpr int kMaxPieces = 1024;  // of launches whose CTAs claim them
  static constexpr int32_t kFree = -2, kBusy = -3;

  const AttentionParams& params;
  int32_t* claims;  // in shared memory: the pieces of this CTA
  int32_t num_pieces;
  bool has_claims;

  // The caller synchronises.
  __device__ __forceinline__ explicit WorkQueue(const AttentionParams& params) : params(params) {
    __shared__ int32_t smem_claims[kMaxPieces + 1];
    claims = smem_claims;
    num_pieces = params.schedule.header->num_slots * params.num_head_blocks;
    has_claims = params.claims_pieces;
    if (threadIdx.x == 0) claims[1] = kFree;
  }

  // Piece `index` of this CTA, or kNoPiece past its last. For whole warps, at any time.
  __device__ __forceinline__ int32_t piece(int32_t index) const {
    if (!is_claimed(index)) return unclaimed_piece(index);
    int32_t next = 0;
    if (lane_idx() == 0) {
      next = atomicCAS(claims + index, kFree, kBusy);
      if (next == kFree) next = claim(index);
      while (next == kBusy) next = noted(index);
    }
    return __shfl_sync(0xffffffff, next, 0);
  }

  // The same of a piece that this warp has asked for before.
  __device__ __forceinline__ int32_t known_piece(int32_t index) const {
    return is_claimed(index) ? noted(index) : unclaimed_piece(index);
  }

 private:
  __device__ __forceinline__ bool is_claimed(int32_t index) const {
    return has_claims && index > 0 && num_pieces > static_cast<int32_t>(gridDim.x);
  }

  __device__ __forceinline__ int32_t unclaimed_piece(int32_t index) const {
    // Slots past the last are empty, so that the first piece needs no look at their number.
    const int32_t next = blockIdx.x + index * gridDim.x;
    return index == 0 || next < num_pieces ? next : kNoPiece;
  }

  __device__ __forceinline__ int32_t noted(int32_t index) const {
    return *static_cast<volatile int32_t*>(claims + index);
  }

  __device__ __forceinline__ int32_t claim(int32_t index) const {
    wait_for_previous_kernel();  // which may use the same counter
    const int32_t claimed = atomicAdd(params.num_claimed, 1);
    // Every CTA asks once in vain: the last of them leaves the counter ready for the next launch.
    if (claimed == num_pieces - 1) *params.num_claimed = 0;
    const int32_t next = claimed + gridDim.x;
    const int32_t piece = next < num_pieces ? next : kNoPiece;
    claims[index + 1] = kFree;
    __threadfence_block();
    *static_cast<volatile int32_t*>(claims + index) = piece;
    return piece;
  }
};

// The queue of a CTA that has one piece.
struct OnePiece {
  static constexpr bool kIsOnePiece = true;
  int32_t work;

  __device__ __forceinline__ int32_t piece(int32_t index) const {
    return index == 0 ? work : kNoPiece;
  }
};

template <bool kIsOnePiece>
struct QueueOf {
  using Type = OnePiece;
};
template <>
struct QueueOf<false> {
  using Type = WorkQueue;
};
// Kernels whose slots may be whole units are launched with a CTA a piece.
using Queue = QueueOf<kHasWholeUnits>::Type;

}  // namespace jitattn
