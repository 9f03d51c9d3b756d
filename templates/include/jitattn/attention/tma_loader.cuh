// Loads K and V to shared memory ahead of their use, in TMA tiles of tensor maps: one instruction
// of one lane copies the rows that a slice has in a page.
#pragma once

#include "jitattn/attention/smem_layout.cuh"
#include "jitattn/attention/tile_iterator.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Fetches the slices that this warp reads of the tile kNumStages ahead of the one that is consumed.
struct KvLoader {
  TileIterator iterator;
  uint32_t ring;      // in shared memory: this warp's
  uint32_t barriers;  // likewise, of K and V of each stage
  uint32_t stage;
  uint32_t parity;  // of the phase that ends when the copy that is waited for has landed

  // Source of issue_v(): the step of the last issue_k().
  int32_t v_issue_work;
  int32_t v_issue_id;
  int32_t v_issue_slice;
  int32_t v_issue_tokens;  // first and last, in one register

  StepPositions<PageTable::kIsList> positions;

  static constexpr int kTmaTiles = kSliceTokens / kTmaTokens;
  static constexpr int kBarrierBytes = 8;

  __device__ __forceinline__ KvLoader(const KernelParams& params, const Queue& queue, uint32_t smem)
      : iterator(params, queue) {
    __shared__ uint64_t smem_barriers[kNumWarps][kNumStages][2];
    ring = smem + warp_idx() * kNumStages * kStageBytes;
    barriers = smem_address(smem_barriers[warp_idx()]);
    // The first kNumStages steps only fill the ring: the phase before a barrier's first is over.
    stage = 0, parity = 1;
    positions.clear();
    if (lane_idx() < 2 * kNumStages) mbarrier_init(barriers + lane_idx() * kBarrierBytes, 1);
    fence_mbarrier_init();
    __syncwarp();
  }

  // Ends the barriers after the last step, for sanitizers that count them.
  __device__ __forceinline__ void finish() {
    __syncwarp();
    if (lane_idx() < 2 * kNumStages) mbarrier_inval(barriers + lane_idx() * kBarrierBytes);
  }

  __device__ __forceinline__ uint32_t k_smem() const { return ring + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t v_smem() const {
    return k_smem() + kSliceTokens * KeyLayout::kRowBytes;
  }
  // Caches whose blocks have scales have no TMA tiles.
  __device__ __forceinline__ uint32_t k_scales_smem() const { return 0; }
  __device__ __forceinline__ uint32_t v_scales_smem() const { return 0; }

  // Waits for K of the oldest step.
  __device__ __forceinline__ void wait_k() { mbarrier_wait(k_barrier(), parity); }

  // The same for V.
  __device__ __forceinline__ void wait_v() { mbarrier_wait(v_barrier(), parity); }

  // Position of this lane's token of the oldest step, of lists.
  __device__ __forceinline__ int32_t position() const { return positions.oldest(); }

  // The K just consumed makes room for the next; every lane has read it.
  __device__ __forceinline__ void issue_k() {
    __syncwarp();
    iterator.wait_for_tokens();
    iterator.check_entries();
    const HeadBlock block(iterator.params.attention, iterator.work);
    fetch<KeyLayout>(iterator.params.k_map, k_smem(), k_barrier(), block.kv_head, 0,
                     iterator.k.ids[0], iterator.slice, iterator.first, iterator.last);
    v_issue_work = iterator.work;
    v_issue_id = iterator.v.ids[0];
    v_issue_slice = iterator.slice;
    v_issue_tokens = min(iterator.first, kSliceTokens) | max(iterator.last, 0) << 16;
    positions.push(iterator.position);
    iterator.next_step();
  }

  // The same for V, which ends the step.
  __device__ __forceinline__ void issue_v() {
    __syncwarp();
    const HeadBlock block(iterator.params.attention, v_issue_work);
    fetch<ValueLayout>(iterator.params.v_map, v_smem(), v_barrier(), block.kv_head,
                       block.value_block * ValueLayout::kSegments, v_issue_id, v_issue_slice,
                       v_issue_tokens & 0xffff, v_issue_tokens >> 16);
    if (++stage == kNumStages) stage = 0, parity ^= 1;
  }

 private:
  __device__ __forceinline__ uint32_t k_barrier() const {
    return barriers + stage * 2 * kBarrierBytes;
  }
  __device__ __forceinline__ uint32_t v_barrier() const { return k_barrier() + kBarrierBytes; }

  // The tokens [first, last) of a slice, and what else their TMA tiles hold. TMA tiles without any
  // are left out, for their pages need not exist.
  template <typename Layout>
  __device__ __forceinline__ void fetch(const TensorMap& map, uint32_t smem, uint32_t barrier,
                                        int32_t kv_head, int32_t segment, int32_t id, int32_t slice,
                                        int32_t first, int32_t last) {
    const int32_t begin = first / kTmaTokens, end = (last + kTmaTokens - 1) / kTmaTokens;
    const int32_t num_tma_tiles = first < last ? end - begin : 0;
    int32_t pages[kTmaTiles];
    for_each<kTmaTiles>([&](int i) {
      // Lanes of tokens before the first hold no entry.
      const int lane = max(i * kTmaTokens, first) % kWarpSize;
      pages[i] = kIsContiguousSlice ? id : __shfl_sync(0xffffffff, id, lane);
    });
    if (!elect_one()) return;
    mbarrier_expect(barrier, num_tma_tiles * Layout::kTmaBytes);
    for_each<kTmaTiles>([&](int i) {
      if (i < begin || i >= begin + num_tma_tiles) return;
      copy_tma(smem + i * Layout::kTmaBytes, &map, barrier, (slice + i * kTmaTokens) % kPageSize,
               segment, kv_head, pages[i]);
    });
  }
};

}  // namespace jitattn
