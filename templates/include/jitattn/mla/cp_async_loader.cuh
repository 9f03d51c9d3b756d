// Loader of latents, k_pe and scales into a ring in shared memory, in copies of 16 bytes or less.
// Each warp loads kSliceTokens tokens of a tile.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/tile_iterator.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kLatentRowBytes = padded_row(sizeof(KVType::Storage) * kLatentDim);
constexpr int kKpeRowBytes = padded_row(sizeof(KpeType::Storage) * kKpeDim);
constexpr int kKpeOffset = kTileTokens * kLatentRowBytes;
constexpr int kScaleOffset = kKpeOffset + kTileTokens * kKpeRowBytes;
constexpr int kTileBytes = kScaleOffset + kTileTokens * kNumScales * 4;

struct MLAKvLoader {
  TileIterator iterator;
  uint32_t ring;
  int32_t next_stage;  // that is filled next
  int32_t stage;       // that is read

  // Calls of advance() that only fill the ring.
  static constexpr int kLead = kNumStages - 1;

  __device__ __forceinline__ MLAKvLoader(const KernelParams& params, const Queue& queue,
                                         uint32_t smem)
      : iterator(params, queue), ring(smem), next_stage(0), stage(0) {}

  __device__ __forceinline__ uint32_t tile() const { return ring + stage * kTileBytes; }

  // Moves to the next tile, which is complete then. Every thread is done with the last one, whose
  // stage is refilled. Every tile is a group of copies, and those past the last are too, so that
  // the count never changes.
  __device__ __forceinline__ void advance() {
    cp_async_wait<kNumStages - 2>();
    __syncthreads();
    stage = following(stage);
    copy_next();
  }

 private:
  static __device__ __forceinline__ int32_t following(int32_t stage) {
    return stage + 1 == kNumStages ? 0 : stage + 1;
  }

  __device__ __forceinline__ void copy_next() {
    const AttentionParams& attention = iterator.params.attention;
    const uint32_t smem = ring + next_stage * kTileBytes;
    iterator.check_entries();
    const Listed listed = Listed::of(iterator.position);
    copy_rows<KVType, kLatentDim>(smem, attention.k, attention.k_page_stride,
                                  attention.k_token_stride, iterator.k.ids[0], listed);
    copy_rows<KpeType, kKpeDim>(smem + kKpeOffset, attention.v, attention.v_page_stride,
                                attention.v_token_stride, iterator.v.ids[0], listed);
    if constexpr (kNumScales > 0) copy_scales(smem + kScaleOffset, listed);
    cp_async_commit();
    next_stage = following(next_stage);
    iterator.next_step();
  }

  // Offset of this lane's token, lane % kSliceTokens of the slice, by its table entry and two
  // strides.
  __device__ __forceinline__ int64_t lane_offset(int64_t page_stride, int64_t token_stride,
                                                 int32_t id) const {
    const int row = lane_idx() % kSliceTokens;
    const int first = kIsContiguousSlice ? iterator.first : row;
    const Location place = PageTable::locate(id, iterator.slice + first);
    return place.page * page_stride + place.token * token_stride + (row - first) * token_stride;
  }

  __device__ __forceinline__ bool exists(int row, Listed listed) const {
    if constexpr (PageTable::kIsList) return listed.has(row);
    return row >= iterator.first && row < iterator.last;
  }

  // Zeros for tokens that don't exist: a NaN left in a slot that the request does not own must not
  // meet a probability of zero.
  template <typename Type, int kDim>
  __device__ __forceinline__ void copy_rows(uint32_t smem, const void* base, int64_t page_stride,
                                            int64_t token_stride, int32_t id, Listed listed) {
    using Storage = typename Type::Storage;
    constexpr int kVectorSize = 16 / sizeof(Storage), kVectors = kDim / kVectorSize;
    const auto* source = static_cast<const Storage*>(base);
    const int64_t offset = lane_offset(page_stride, token_stride, id);
#pragma unroll(kUseVectorLoads ? 4 : 1)
    for (int i = 0; i < (kSliceTokens * kVectors + kWarpSize - 1) / kWarpSize; ++i) {
      const int index = i * kWarpSize + lane_idx();
      const int row = index / kVectors % kSliceTokens, vector = index % kVectors;
      const int64_t row_offset = __shfl_sync(0xffffffff, offset, row);
      if (index >= kSliceTokens * kVectors) continue;
      const int tile_row = warp_idx() * kSliceTokens + row;
      copy_vector(smem + tile_row * padded_row(sizeof(Storage) * kDim) + vector * 16,
                  source + row_offset + vector * kVectorSize, exists(row, listed));
    }
  }

  template <typename Storage>
  static __device__ __forceinline__ void copy_vector(uint32_t smem, const Storage* source,
                                                     bool exists) {
    if constexpr (kUseVectorLoads) {
      cp_async_16<128>(smem, source, exists);
    } else {
      uint4 words = {};
      if (exists) words = load_vector(source);
      st_shared_16(smem, words);
    }
  }

  template <typename Storage>
  static __device__ __forceinline__ uint4 load_vector(const Storage* source) {
    if constexpr (kNumScales == 0) return load_16(source);
    // Rows that hold float32 scales begin at multiples of their size.
    const auto* words = reinterpret_cast<const uint32_t*>(source);
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ __forceinline__ void copy_scales(uint32_t smem, Listed listed) {
    const MLAParams& mla = iterator.params.mla;
    const int64_t offset =
        lane_offset(mla.scale_page_stride, mla.scale_token_stride, iterator.k.ids[0]);
    static_assert(kSliceTokens * kNumScales <= kWarpSize, "a lane has a scale at most");
    const int row = lane_idx() % kSliceTokens, scale = lane_idx() / kSliceTokens;
    if (scale >= kNumScales) return;
    const int tile_row = warp_idx() * kSliceTokens + row;
    cp_async_few<4>(smem + (tile_row * kNumScales + scale) * 4, mla.latent_scales + offset + scale,
                    exists(row, listed));
  }
};

}  // namespace jitattn
