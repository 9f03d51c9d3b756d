// Loads K and V to shared memory ahead of their use, in copies of 16 bytes or less.
#pragma once

#include "jitattn/attention/tile_iterator.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Copies the slices that this warp loads of the tile kNumStages ahead of the one that is consumed.
struct KvLoader {
  TileIterator iterator;
  uint32_t ring;   // in shared memory: this warp's, or everyone's
  uint32_t stage;  // byte offset into the ring

  // Source of issue_v(): the step of the last issue_k().
  int32_t v_issue_work;
  LaneIds v_issue;
  int32_t v_issue_slice;
  int32_t v_issue_tokens;  // first and last, in one register
  Listed v_issue_listed;

  StepPositions<PageTable::kIsList> positions;

  static constexpr int kVectorSize = kVectorBytes / sizeof(KVType::Storage);

  __device__ __forceinline__ KvLoader(const KernelParams& params, const Queue& queue, uint32_t smem)
      : iterator(params, queue) {
    ring = smem + (kSharesTiles ? 0 : warp_idx() * kNumStages * kStageBytes);
    stage = 0;
    positions.clear();
  }

  __device__ __forceinline__ void finish() const {}

  __device__ __forceinline__ uint32_t k_smem() const { return ring + stage; }
  __device__ __forceinline__ uint32_t v_smem() const {
    return ring + stage + kStageTokens * kKeyRowBytes;
  }
  // The scales of blocks, behind both.
  __device__ __forceinline__ uint32_t k_scales_smem() const {
    return v_smem() + kStageTokens * kValueRowBytes;
  }
  __device__ __forceinline__ uint32_t v_scales_smem() const {
    return k_scales_smem() + kStageTokens * block_bytes(kKeyDim);
  }

  // Waits for the oldest copy, K and V in turn. Every copy is a group, and groups that load
  // nothing are committed too, so the count never changes. The first kNumStages steps only fill the
  // ring: there is nothing to wait for yet.
  __device__ __forceinline__ void wait_k() { wait(); }
  __device__ __forceinline__ void wait_v() { wait(); }

  // Position of this lane's token of the oldest step, of lists.
  __device__ __forceinline__ int32_t position() const { return positions.oldest(); }

  // The K just consumed makes room for the next; every thread has read it.
  __device__ __forceinline__ void issue_k() {
    synchronize();
    copy_next_k();
  }

  // The same for V, which ends the step.
  __device__ __forceinline__ void issue_v() {
    synchronize();
    copy_next_v();
    stage = stage == (kNumStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }

 private:
  static __device__ __forceinline__ void synchronize() {
    if constexpr (kSharesTiles) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // The first row of a stage that this warp fills.
  static __device__ __forceinline__ int first_row() {
    return kSharesTiles ? warp_idx() * kSliceTokens : 0;
  }

  __device__ __forceinline__ void wait() {
    cp_async_wait<2 * kNumStages - 1>();
    synchronize();  // the other threads' copies have landed as well
  }

  __device__ __forceinline__ void copy_next_k() {
    const AttentionParams& params = iterator.params.attention;
    iterator.wait_for_tokens();
    iterator.check_entries();
    const HeadBlock block(params, iterator.work);
    const auto* k = static_cast<const KVType::Storage*>(params.k);
    const Listed listed = Listed::of(iterator.position);
    copy_rows<kKeyDim>(k_smem() + first_row() * kKeyRowBytes,
                       k + block.kv_head * params.k_head_stride, params.k_page_stride,
                       params.k_token_stride, iterator.k, iterator.slice, iterator.first,
                       iterator.last, listed);
    if constexpr (kHasBlocks) {
      copy_scales<kKeyDim>(k_scales_smem(), iterator.params.k_blocks, block.kv_head, 0, iterator.k,
                           iterator.slice, iterator.first, iterator.last, listed);
    }
    cp_async_commit();
    v_issue_work = iterator.work;
    v_issue = iterator.v;
    v_issue_slice = iterator.slice;
    v_issue_tokens = min(iterator.first, kSliceTokens) | iterator.last << 16;
    v_issue_listed = listed;
    positions.push(iterator.position);
    iterator.next_step();
  }

  __device__ __forceinline__ void copy_next_v() {
    const AttentionParams& params = iterator.params.attention;
    const HeadBlock block(params, Queue::kHasOneWorkTile ? iterator.work : v_issue_work);
    const auto* v = static_cast<const KVType::Storage*>(params.v);
    constexpr int kBlockSize = stored_bytes(kValueDim) / sizeof(KVType::Storage);
    copy_rows<kValueDim>(v_smem() + first_row() * kValueRowBytes,
                         v + block.kv_head * params.v_head_stride + block.value_block * kBlockSize,
                         params.v_page_stride, params.v_token_stride, v_issue, v_issue_slice,
                         v_issue_tokens & 0xffff, v_issue_tokens >> 16, v_issue_listed);
    if constexpr (kHasBlocks) {
      constexpr int kBlockStride = BlocksOf<KVType>::place(kValueDim);
      copy_scales<kValueDim>(v_scales_smem(), iterator.params.v_blocks, block.kv_head,
                             block.value_block * kBlockStride, v_issue, v_issue_slice,
                             v_issue_tokens & 0xffff, v_issue_tokens >> 16, v_issue_listed);
    }
    cp_async_commit();
  }

  // Copies the tokens [first, last) of a slice, zeros for the others: a NaN left in a slot that
  // the request does not own must not meet a probability of zero.
  template <int kDim>
  __device__ __forceinline__ void copy_rows(uint32_t smem, const KVType::Storage* base,
                                            int64_t page_stride, int64_t token_stride,
                                            const LaneIds& entries, int32_t slice, int32_t first,
                                            int32_t last, Listed listed) {
    constexpr int kVectors = stored_bytes(kDim) / kVectorBytes;
    // A tile that all warps read must not keep what it held before.
    if (!kSharesTiles && first >= last) return;
    SliceRows rows = {smem, base, {}, token_stride, first, last, listed};
    for_each<kLaneEntries>([&](int i) {
      // The token whose entry this lane holds.
      const int32_t token =
          slice + (kIsContiguousSlice ? first : lane_idx() % kSliceTokens + i * kWarpSize);
      const Location place = PageTable::locate(entries.ids[i], token);
      rows.offsets[i] = place.page * page_stride + place.token * token_stride;
      if (kIsContiguousSlice) rows.offsets[i] -= first * token_stride;  // to row 0 of the slice
    });
    // A row is copied in parts of 32, 16, ... vectors, so that every lane's place is a shift away.
    for_each<kVectors / 32>([&](int i) { copy_columns<kVectors, 32>(rows, i * 32); });
    if constexpr (kVectors & 16) copy_columns<kVectors, 16>(rows, kVectors & ~31);
    if constexpr (kVectors & 8) copy_columns<kVectors, 8>(rows, kVectors & ~15);
    if constexpr (kVectors & 4) copy_columns<kVectors, 4>(rows, kVectors & ~7);
    if constexpr (kVectors & 2) copy_columns<kVectors, 2>(rows, kVectors & ~3);
    if constexpr (kVectors & 1) copy_columns<kVectors, 1>(rows, kVectors & ~1);
  }

  struct SliceRows {
    uint32_t smem;
    const KVType::Storage* base;
    int64_t offsets[kLaneEntries];  // of row 0, or of this lane's tokens
    int64_t token_stride;
    int32_t first;
    int32_t last;
    Listed listed;
  };

  // Copies kWidth columns of vectors from `column` on.
  template <int kVectors, int kWidth>
  __device__ __forceinline__ void copy_columns(const SliceRows& rows, int column) {
    constexpr int kRows = kWarpSize / kWidth;
    constexpr int kSteps = (kSliceTokens + kRows - 1) / kRows;
    const int vector = column + lane_idx() % kWidth;
    // Unrolled as far as copies overlap, where the accumulator leaves registers for it.
    constexpr bool kIsWide = kSharesTiles || kRowTile * kValueDim > 1024;
#pragma unroll(!kUseVectorLoads ? 1 : kIsWide ? 2 : 8)
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * kRows + lane_idx() / kWidth;
      // No index, which would put them into local memory.
      const int64_t offset =
          i * kRows < kWarpSize ? rows.offsets[0] : rows.offsets[kLaneEntries - 1];
      const int64_t row_offset = kIsContiguousSlice
                                     ? offset + row * rows.token_stride
                                     : __shfl_sync(0xffffffff, offset, row % kSliceTokens);
      if (kRows > kSliceTokens && row >= kSliceTokens) continue;
      copy_vector<kVectors>(
          rows.smem + row * padded_row(kVectorBytes * kVectors) + vector * kVectorBytes,
          rows.base + row_offset + vector * kVectorSize,
          row >= rows.first && row < rows.last && rows.listed.has(row));
    }
  }

  template <int kVectors>
  __device__ __forceinline__ void copy_vector(uint32_t smem, const KVType::Storage* source,
                                              bool exists) {
    if constexpr (kVectorBytes == 8) {
      copy_8(smem, source, exists);
    } else if constexpr (kUseVectorLoads) {
      // Beside a row of half a line lies one that another CTA wants at the same time.
      cp_async_16<kVectors == 8 ? 256 : 128>(smem, source, exists);
    } else {
      uint4 words = {};
      if (exists) words = load_16(source);
      st_shared_16(smem, words);
    }
  }

  static __device__ __forceinline__ void copy_8(uint32_t smem, const void* source, bool exists) {
    if constexpr (kUseVectorLoads) {
      cp_async_few<8>(smem, source, exists);
    } else {
      uint2 words = {};
      if (exists) words = load_8(source);
      st_shared_8(smem, words);
    }
  }

  // Copies the scales of the same tokens, from byte `begin` of a row on; zeros for the others, as
  // of rows. A lane has its tokens, and with others their vectors in turn.
  template <int kDim>
  __device__ __forceinline__ void copy_scales(uint32_t smem, const BlockScales& blocks,
                                              int32_t kv_head, int32_t begin,
                                              const LaneIds& entries, int32_t slice, int32_t first,
                                              int32_t last, Listed listed) {
    constexpr int kBytes = block_bytes(kDim), kVector = kUseVectorLoads ? block_vector(kDim) : 1;
    constexpr int kLanes = kWarpSize * kLaneTokens / kSliceTokens;
    if (!kSharesTiles && first >= last) return;
    for_each<kLaneTokens>([&](int own) {
      const int row = lane_idx() % kSliceTokens + own * kWarpSize;
      const int32_t id = entries.ids[kIsContiguousSlice ? 0 : own];
      const Location place = PageTable::locate(id, slice + (kIsContiguousSlice ? first : row));
      int64_t offset = place.page * blocks.page_stride + place.token * blocks.token_stride;
      if (kIsContiguousSlice) offset += (row - first) * blocks.token_stride;
      const uint8_t* source = blocks.scales + kv_head * blocks.head_stride + offset + begin;
      const uint32_t target = smem + (first_row() + row) * kBytes;
      bool exists = row >= first && row < last;
      if constexpr (PageTable::kIsList) exists = exists && listed.has(row);
#pragma unroll(kVector == 1 ? 4 : 2)
      for (int i = lane_idx() / kSliceTokens * kVector; i < kBytes; i += kLanes * kVector) {
        if constexpr (kVector == 16) {
          cp_async_16<128>(target + i, source + i, exists);
        } else if constexpr (kVector > 1) {
          cp_async_few<kVector>(target + i, source + i, exists);
        } else {
          st_shared_byte(target + i, exists ? source[i] : 0);
        }
      }
    });
  }
};

}  // namespace jitattn
