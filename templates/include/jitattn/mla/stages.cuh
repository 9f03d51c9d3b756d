// Ring of stages of tokens as the cache has them, of kernels whose warps multiply 16 or 32 query rows: a KV
// tile is two stages. A token lies in segments of 128 bytes with the hardware's swizzle, its latent's
// and one of its k_pe; eight tokens have all segments of their latents before the next eight, as TMA
// tiles of many tokens and segments arrive.
#pragma once

#include "jitattn/mla/narrow_kernel.cuh"

#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/work_state.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kRowBlocks = kRowTile / 16;
constexpr int kTileStages = 2;
constexpr int kRingTokens = kTileTokens / kTileStages;  // of a stage
constexpr int kStageGroups = kRingTokens / 8;           // of eight tokens
constexpr int kRowSegments = (kLatentDim * sizeof(KVType::Storage)) / kSegmentBytes;
constexpr int kGroupBytes = 8 * kRowSegments * kSegmentBytes;
constexpr int kKpeOffset = kStageGroups * kGroupBytes;
constexpr int kScaleOffset = kKpeOffset + kRingTokens * kSegmentBytes;
constexpr int kScaleBytes = kNumScales * 4;  // of a token
constexpr int kRingStageBytes = kScaleOffset + kRingTokens * kScaleBytes;

// Probabilities of a tile: rows of 64 tokens.
constexpr int kProbabilityBytes = kRowTile * kSegmentBytes;
constexpr int kStageQueryOffset = kNumStages * kRingStageBytes;
constexpr int kProbabilityOffset = kStageQueryOffset + kQueryBytesAll;
// Parts of scores that two warps exchange: 16 bytes a lane and block. Those of 32 rows take the place of the
// last tile's probabilities, when these have been read: a stage more has room.
constexpr bool kExchangesInPlace = kRowBlocks > 1;
constexpr int kExchangeBytes = kNumThreads * 16 * kRowBlocks;
constexpr int kExchangeOffset = kProbabilityOffset + (kExchangesInPlace ? 0 : kProbabilityBytes);
// Groups of tokens whose maxima and sums warps find apart.
constexpr int kTopGroups = kNumWarps / kRowBlocks;

static_assert(kRowTile == 16 * kRowBlocks && kRowBlocks <= 2, "each warp scores sixteen rows");
static_assert(kTileTokens == 64 && kNumWarps == kTileStages * kStageGroups,
              "and all warps a tile together");
static_assert(sizeof(KpeType::Storage) * kKpeDim <= kSegmentBytes, "a k_pe fits a segment");
static_assert(kExchangeBytes >= kProbabilityBytes, "so that these fit in its place");
static_assert(kExchangeBytes >= 4 * kRowTile * kNumWarps, "and so do maxima of partial rows");
static_assert(kExchangeOffset + kExchangeBytes == kSmemBytes,
              "the host asks for exactly the shared memory that is used");

// Address of 16 bytes of a token's latent, of a stage; likewise of its k_pe.
__device__ __forceinline__ uint32_t latent_place(uint32_t stage_smem, int token, int vector) {
  return stage_smem + token / 8 * kGroupBytes + (vector / 8 * 8 + token % 8) * kSegmentBytes +
         (vector % 8 ^ token % 8) * 16;
}
__device__ __forceinline__ uint32_t k_pe_place(uint32_t stage_smem, int token, int vector) {
  return stage_smem + kKpeOffset + token * kSegmentBytes + (vector ^ token % 8) * 16;
}
__device__ __forceinline__ uint32_t scales_place(uint32_t stage_smem, int token) {
  return stage_smem + kScaleOffset + token * kScaleBytes;
}

// What lists say of a token.
enum class Listed : uint8_t { kNot = 0, kIs = 1, kIsOutside = 2 };

// TMA tiles of a stage, and warps that copy them in turn.
constexpr int kStageTmaTiles = kRingTokens / kTmaTokens;
constexpr int kStageWarps = kStageTmaTiles > 1 ? 2 : 1;

// Threads that wait for the first Q, and stages that they fill before.
constexpr int kTokenThreads = kUsesTma ? kStageWarps * kWarpSize : kProducerThreads;
constexpr int kEarlyStages = kTileStages;

struct Shared : WorkState {
  alignas(16) float tops[kRowTile][kTopGroups];  // maxima of a tile's scores
  float sums[kTopGroups][kRowTile];
  float row_scales[kRowTile];               // of rows of Q in another type
  uint8_t listed[kNumStages][kRingTokens];  // of stages of lists: Listed
  uint64_t stage_barriers[2][kNumStages];   // full or empty
  uint64_t exchange_barriers[2];

  __device__ __forceinline__ uint32_t full(int stage) {
    return smem_address(&stage_barriers[0][stage]);
  }
  __device__ __forceinline__ uint32_t empty(int stage) {
    return smem_address(&stage_barriers[1][stage]);
  }

  // When all warps have read a tile's scores, and its probabilities.
  __device__ __forceinline__ uint32_t scores_exchanged() {
    return smem_address(&exchange_barriers[0]);
  }
  __device__ __forceinline__ uint32_t probabilities_read() {
    return smem_address(&exchange_barriers[1]);
  }

  __device__ __forceinline__ void init_barriers() {
    // Arrivals: one lane a warp for TMA tiles; else each lane for its own copies, and one lane a warp
    // for what it wrote.
    constexpr auto count_of = [](int threads) { return threads + threads / kWarpSize; };
    constexpr int kLoaders = kUsesTma ? kStageWarps : count_of(kProducerThreads);
    init_items(kUsesTma ? kQueryThreads : count_of(kQueryThreads));
    mbarrier_init(scores_exchanged(), kNumWarps);
    mbarrier_init(probabilities_read(), kNumWarps);
    for (int i = 0; i < kNumStages; ++i) {
      mbarrier_init(full(i), kLoaders);
      mbarrier_init(empty(i), kNumWarps);
    }
    fence_mbarrier_init();
  }
};

}  // namespace jitattn
