// Tiles of Q, K, V and S of a warpgroup's products, in shared memory and in registers.
//
// Rows lie in segments of 128 bytes, with the hardware's 128-byte swizzle: vector v of row r of a
// segment lies at v ^ r % 8. Of K all rows of a tile follow each other, segment after segment; V
// lies TMA tile after TMA tile, each of kTmaTokens rows, segment after segment. K of wide heads
// comes and goes in parts, some segments each, so that one tile of it in shared memory is enough.
//
// Products of 8 bits want the tokens of V next to each other: V lands as it would otherwise lie,
// and is transposed from there to a row for each column, segments of 128 tokens. The tokens of each
// sixteen lie in the order in which a lane has their probabilities: 2 t, 2 t + 1, 2 t + 8, 2 t + 9
// for t from 0 to 3.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

#include "jitattn/attention/wgmma_operands.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kNumGroups = kNumThreads / kGroupThreads;  // of consumers
constexpr int kProducerThreads = kNumProducers * kGroupThreads;
constexpr int kCtaThreads = kNumThreads + kProducerThreads;
constexpr int kNumTmaTiles = kTileTokens / kTmaTokens;
constexpr int kTokenGroups = kTileTokens / 8;

// Tensor cores add products of 8 bits with 14 bits or so, rounding towards zero: the sums of tiles are
// added in float32.
constexpr bool kSumsTiles = kHasFP8Products;

constexpr int kItemBytes = kHasFP8Products ? 1 : 2;  // of an element in products
// Products of a row of Q and one of K, 32 bytes each.
constexpr int kKeySteps = kItemBytes * kKeyDim / 32;
constexpr int kKeySegments = (kItemBytes * kKeyDim + kSegmentBytes - 1) / kSegmentBytes;
constexpr int kValueSegments = (kItemBytes * kValueDim + kSegmentBytes - 1) / kSegmentBytes;
constexpr int kKeyPartSegments = kKeySegments / kKeyParts;
constexpr int kKeyStageBytes = kTileTokens * kKeySegments * kSegmentBytes;
constexpr int kKeyPartBytes = kTileTokens * kKeyPartSegments * kSegmentBytes;
constexpr int kNumKeyParts = kNumStages * kKeyParts;                         // of K's ring
constexpr int kLandingBytes = kTileTokens * kValueSegments * kSegmentBytes;  // of V
constexpr int kTokenSegments = (kTileTokens + kSegmentBytes - 1) / kSegmentBytes;
constexpr int kValueStageBytes =
    kHasFP8Products ? kValueDim * kTokenSegments * kSegmentBytes : kLandingBytes;
constexpr int kQueryStageBytes = kRowTile * kKeySegments * kSegmentBytes;
constexpr int kKeyOffset = 0;
constexpr int kValueOffset = kKeyOffset + kNumStages * kKeyStageBytes;
constexpr int kQueryOffset = kValueOffset + kNumStages * kValueStageBytes;

constexpr int kLandingOffset = kQueryOffset + kNumQueryStages * kQueryStageBytes;

static_assert((kDequantises && kNumLandings > 0) ||
                  kLandingOffset + (kHasFP8Products ? kNumLandings * kLandingBytes : 0) ==
                      kSmemBytes,
              "the host asks for exactly the shared memory that is used");
static_assert(kKeyParts == 1 || kKeySteps == kKeyParts * kKeyPartSegments * 4,
              "parts are equal and have whole segments");

// The row of the query tile that half 0 or 1 of a lane's values belong to.
__device__ __forceinline__ int row_of(int half, int thread = threadIdx.x) {
  return thread / kWarpSize * 16 + half * 8 + thread % kWarpSize / 4;
}

using QueryLayout = RowLayout<kRowTile>;
using KeyLayout = RowLayout<kTileTokens>;

struct ValueLayout {
  static constexpr int kTmaBytes = kTmaTokens * kValueSegments * kSegmentBytes;
  static __device__ __forceinline__ uint32_t row(uint32_t smem, int segment, int row) {
    return smem + row / kTmaTokens * kTmaBytes +
           (segment * kTmaTokens + row % kTmaTokens) * kSegmentBytes;
  }
};
// Of V once it is transposed, a row for each column.
using ColumnLayout = RowLayout<kValueDim>;

// One warpgroup's S = Q K^T: 64 rows, two of each lane. at(j, i) is row i / 2 and token i % 2 of
// the lane's pair in group j of eight tokens.
struct ScoreTile {
  float values[kTileTokens / 2];

  __device__ __forceinline__ float& at(int group, int i) { return values[4 * group + i]; }
  __device__ __forceinline__ float at(int group, int i) const { return values[4 * group + i]; }

  using Queries = Descriptor<8 * kSegmentBytes, 0>;
  using Keys = Descriptor<8 * kSegmentBytes, 0>;

  // Begins the products of the warpgroup's rows of Q with part `part` of K; wait() says when to look
  // at them.
  __device__ __forceinline__ void multiply(const Queries& q, const Keys& k, int part) {
    using namespace cute::SM90::GMMA;
    cute::warpgroup_arrive();
    for_each<kKeySteps / kKeyParts>([&](int i) {
      const int segment = i / 4, bytes = i % 4 * 32;
      FirstRegisters<kTileTokens / 2>::multiply<ScoreProduct>(
          values, part || i ? ScaleOut::One : ScaleOut::Zero,
          q.at(QueryLayout::row(bytes, part * kKeyPartSegments + segment, 0)),
          k.at(KeyLayout::row(bytes, segment, 0)));
    });
    cute::warpgroup_commit_batch();
  }

  // Requires the values now: their computation may not move past a later wait().
  __device__ __forceinline__ void settle() {
    for_each<kTileTokens / 2>([&](int i) { cute::warpgroup_fence_operand(values[i]); });
  }

  // Waits until at most kPending batches of products are under way.
  template <int kPending>
  __device__ __forceinline__ void wait() {
    cute::warpgroup_wait<kPending>();
    settle();
  }
};

// P as the left side of the product with V: 16 tokens a fragment, or 32 of 8 bits.
struct ProbabilityTile {
  static constexpr int kFragmentTokens = 32 / kItemBytes;
  static constexpr int kFragments = kTileTokens / kFragmentTokens;
  uint32_t fragments[kFragments][4];

  __device__ __forceinline__ void round(const ScoreTile& s) {
    for_each<kFragments>([&](int j) {
      for_each<4>([&](int i) {
        const int group = (2 * j + i / 2) * (2 / kItemBytes), half = i % 2;
        if constexpr (kHasFP8Products) {
          fragments[j][i] = cvt_e4m3x4(s.at(group, 2 * half), s.at(group, 2 * half + 1),
                                       s.at(group + 1, 2 * half), s.at(group + 1, 2 * half + 1));
        } else {
          fragments[j][i] = PairType::pack(s.at(group, 2 * half), s.at(group, 2 * half + 1));
        }
      });
    });
  }
};
static_assert(kTileTokens % ProbabilityTile::kFragmentTokens == 0, "tiles have whole fragments");

// One warpgroup's O: values 4 i to 4 i + 3 are columns 8 i + 2 t and 8 i + 2 t + 1 of both rows of
// a lane, where t is its number in the row's four.
struct OutputTile {
  float values[kValueDim / 2];

  // TMA tiles of eight tokens are groups themselves.
  using Values =
      Descriptor<kTmaTokens == 8 && !kHasFP8Products ? ValueLayout::kTmaBytes : 8 * kSegmentBytes,
                 kHasFP8Products ? 0 : kTmaTokens * kSegmentBytes>;

  __device__ __forceinline__ void clear() {
    for_each<kValueDim / 2>([&](int i) { values[i] = 0.f; });
  }
  __device__ __forceinline__ void add(const OutputTile& other) {
    for_each<kValueDim / 2>([&](int i) { values[i] += other.values[i]; });
  }

  // Begins O += P V, or O = P V where kSumsTiles.
  __device__ __forceinline__ void multiply(const ProbabilityTile& p, const Values& v) {
    using namespace cute::SM90::GMMA;
    for_each<kValueDim / 2>([&](int i) { cute::warpgroup_fence_operand(values[i]); });
    cute::warpgroup_arrive();
    for_each<ProbabilityTile::kFragments>([&](int j) {
      const uint32_t (&a)[4] = p.fragments[j];
      FirstRegisters<kValueDim / 2>::multiply<OutputProduct>(
          values, kSumsTiles && j == 0 ? ScaleOut::Zero : ScaleOut::One, a[0], a[1], a[2], a[3],
          v.at(kHasFP8Products ? ColumnLayout::row(j % 4 * 32, j / 4, 0)
                               : ValueLayout::row(0, 0, j * 16)));
    });
    cute::warpgroup_commit_batch();
  }

  template <int kPending>
  __device__ __forceinline__ void wait() {
    cute::warpgroup_wait<kPending>();
    for_each<kValueDim / 2>([&](int i) { cute::warpgroup_fence_operand(values[i]); });
  }
};

}  // namespace jitattn
