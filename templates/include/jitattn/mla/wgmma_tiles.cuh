// Tiles of latent attention: Q, K, P and S of two warpgroups' products.
//
// A tile of tokens lies in segments of 128 bytes with the hardware's swizzle: two halves of the
// latents, then k_pe. In a half, eight tokens have all their segments before the next eight, as TMA
// tiles of many tokens and segments arrive. The two stages take turns; one warpgroup computes the
// scores and probabilities of the tiles in stage 0, the other of those in stage 1. Each has half of
// the columns of the output, of all rows. Probabilities replace the k_pe of their own tile, which
// is no longer needed then.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include <cute/arch/mma_sm90_gmma.hpp>

#include "jitattn/attention/wgmma_operands.cuh"
#include "jitattn/attention/work_tile.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/query_loader.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kNumGroups = 2;
constexpr int kTokenGroups = kTileTokens / 8;

// Tiles have the type of products, and lie like Q.
constexpr int kLatentSegments = kQuerySegments;
constexpr int kHalfSegments = kLatentSegments / 2;
constexpr int kKpeSegment = kLatentSegments;
constexpr int kSegments = kLatentSegments + 1;
constexpr int kHalfDim = kLatentDim / 2;
constexpr int kTileBytes = kTileTokens * kSegments * kSegmentBytes;
constexpr int kQueryOffset = 2 * kTileBytes;

static_assert(kNumThreads == kNumGroups * kGroupThreads, "two warpgroups compute");
static_assert(kRowTile == 64, "a product has 64 rows");
static_assert(kTileTokens == 64, "probabilities of a row fill a segment");
static_assert(2 * kKpeDim <= kSegmentBytes, "a k_pe fits a segment");
static_assert(kNumStages == 2, "one a warpgroup");
static_assert(kQueryOffset + kQueryBytesAll == kSmemBytes,
              "the host asks for exactly the shared memory that is used");

// Latents of a tile.
struct TileLayout {
  static constexpr int kGroupBytes = 8 * kHalfSegments * kSegmentBytes;  // of eight tokens
  static constexpr int kHalfBytes = kTileTokens / 8 * kGroupBytes;

  static __device__ __forceinline__ uint32_t row(uint32_t smem, int segment, int row) {
    return smem + segment / kHalfSegments * kHalfBytes + row / 8 * kGroupBytes +
           (segment % kHalfSegments * 8 + row % 8) * kSegmentBytes;
  }
};

// k_pe of a tile, and probabilities after them.
struct KpeLayout {
  static __device__ __forceinline__ uint32_t row(uint32_t smem, int row) {
    return smem + 2 * TileLayout::kHalfBytes + row * kSegmentBytes;
  }
};

// Operands Q, k_pe and P: rows of a product's columns.
using Rows = Descriptor<8 * kSegmentBytes, 0>;
// The same of latents.
using KvRows = Descriptor<TileLayout::kGroupBytes, 0>;
// Operand V: its columns are those of a product.
using Columns = Descriptor<TileLayout::kGroupBytes, 8 * kSegmentBytes>;

// The row of the block that half 0 or 1 of a lane's values belong to.
__device__ __forceinline__ int row_of(int half) {
  return warp_idx() % 4 * 16 + half * 8 + lane_idx() / 4;
}

// S = Q K^T: two rows of each lane. at(j, i) is row i / 2 and token i % 2 of the lane's pair in
// group j of eight tokens.
struct ScoreTile {
  float values[kTileTokens / 2];

  __device__ __forceinline__ float& at(int group, int i) { return values[4 * group + i]; }
  __device__ __forceinline__ float at(int group, int i) const { return values[4 * group + i]; }

  // Begins the products with the first half of latents, and the rest when that is there.
  __device__ __forceinline__ void multiply_first(const Rows& q, const KvRows& k) {
    cute::warpgroup_arrive();
    multiply_half<0>(q, k);
  }
  // Scores of latents are multiplied with `scale` before those of k_pe join them, where these
  // have none.
  __device__ __forceinline__ void multiply_rest(const Rows& q, const KvRows& k, const Rows& k_pe,
                                                float scale) {
    multiply_half<1>(q, k);
    if constexpr (kIsMixed && kNumScales == 0) {
      cute::warpgroup_commit_batch();
      wait<0>();
      for_each<kTileTokens / 2>([&](int i) { values[i] *= scale; });
      for_each<kTileTokens / 2>([&](int i) { cute::warpgroup_fence_operand(values[i]); });
      cute::warpgroup_arrive();
    }
    for_each<kKpeDim / 16>([&](int i) {
      multiply(q.at(QueryLayout::row(i * 32, kKpeSegment, 0)), k_pe.at(i * 32), true);
    });
    cute::warpgroup_commit_batch();
  }

  // Waits until at most kPending batches of products are under way.
  template <int kPending>
  __device__ __forceinline__ void wait() {
    cute::warpgroup_wait<kPending>();
    for_each<kTileTokens / 2>([&](int i) { cute::warpgroup_fence_operand(values[i]); });
  }

 private:
  template <int kHalf>
  __device__ __forceinline__ void multiply_half(const Rows& q, const KvRows& k) {
    for_each<4 * kHalfSegments>([&](int i) {
      const int segment = kHalf * kHalfSegments + i / 4, bytes = i % 4 * 32;
      multiply(q.at(QueryLayout::row(bytes, segment, 0)), k.at(TileLayout::row(bytes, segment, 0)),
               kHalf > 0 || i > 0);
    });
  }
  // A product of 16 dims.
  __device__ __forceinline__ void multiply(uint64_t q, uint64_t k, bool adds) {
    using namespace cute::SM90::GMMA;
    FirstRegisters<kTileTokens / 2>::multiply<ScoreProduct>(
        values, adds ? ScaleOut::One : ScaleOut::Zero, q, k);
  }
};

// Writes P, rounded, in the place of k_pe: of the product with V. `at(half, v)` is a lane's number `v` of
// its row `half`. Eight lanes say where eight rows of eight tokens go; four such matrices go together.
template <typename At>
__device__ __forceinline__ void write_probabilities(uint32_t tile_smem, const At& at) {
  const int lane = lane_idx(), row = warp_idx() % 4 * 16 + lane % 16;
  // Found here, and not kept in registers from tile to tile.
  const uint32_t place =
      forget(static_cast<int32_t>(KpeLayout::row(tile_smem, row) + (lane / 16 ^ row % 8) * 16));
  for_each<kTokenGroups / 2>([&](int j) {
    uint32_t words[4];
    for_each<4>([&](int i) {
      const float low = at(i % 2, 4 * j + i / 2 * 2), high = at(i % 2, 4 * j + i / 2 * 2 + 1);
      words[i] = ProductType::pack(low, high);
    });
    stmatrix_x4(place ^ j * 32, {words[0], words[1], words[2], words[3]});
  });
}

// A warpgroup's half of O's columns: values 4 i to 4 i + 3 are columns 8 i + 2 t and 8 i + 2 t + 1
// of both rows of a lane, where t is its number in the row's four.
struct OutputTile {
  float values[kHalfDim / 2];

  // Before products.
  __device__ __forceinline__ void begin() {
    fence();
    cute::warpgroup_arrive();
  }
  // Adds P V to O, when what began before is complete.
  __device__ __forceinline__ void multiply(const Rows& p, const Columns& v) {
    using namespace cute::SM90::GMMA;
    for_each<kTileTokens / 16>([&](int j) {
      FirstRegisters<kHalfDim / 2>::multiply<OutputProduct>(values, ScaleOut::One, p.at(j * 32),
                                                            v.at(TileLayout::row(0, 0, j * 16)));
    });
    cute::warpgroup_commit_batch();
  }

  __device__ __forceinline__ void wait() {
    cute::warpgroup_wait<0>();
    fence();
  }

 private:
  __device__ __forceinline__ void fence() {
    for_each<kHalfDim / 2>([&](int i) { cute::warpgroup_fence_operand(values[i]); });
  }
};

}  // namespace jitattn
