// Constants, page table and arguments of a kernel of products of 8 bits: a sample for editors, by
// tests/support/kernel_header.py. A rendered kernel defines its own before it includes parts.
#pragma once

#ifndef JITATTN_KERNEL
#define JITATTN_KERNEL  // its own jitattn/kernel.cuh follows

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/reg_reconfig.h>

#include "jitattn/attention_params.cuh"
#include "jitattn/fp8.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/nvfp4.cuh"
#include "jitattn/prelude.cuh"
#include "jitattn/ptx.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// The spec and its tile as constants: the only place where numbers are substituted.
// Of FP8 queries what they are once they are multiplied with their scales.
using QType = Half;
using ProductType = Float8E4M3;  // of both products
using KVType = Float8E4M3;
using OutType = BFloat16;
constexpr int kKeyDim = 128;
constexpr int kPageSize = 16;
constexpr int kRowTile = 128;
// Queries of 8 bits with scales of their own, which decode kernels multiply them with.
constexpr bool kHasFP8Queries = 1;
constexpr bool kUseLogitsSoftCap = 0;
constexpr bool kUseCustomMask = 0;
constexpr bool kHasVariant = 0;
constexpr bool kUseVectorLoads = 0;
constexpr bool kUsesTma = 1;

constexpr int kValueDim = 128;  // columns of V and out that a CTA computes
constexpr int kNumValueBlocks = 128 / kValueDim;
// Warps of consumers, and producer warpgroups beside them.
constexpr int kNumWarps = 8;
constexpr int kNumProducers = 1;
constexpr int kTileTokens = 128;
constexpr int kNumStages = 2;
constexpr int kCtasPerSm = 1;
constexpr int kSmemBytes = 131072;
constexpr int kMergeSplits = 8;  // of a row at a time
// Splits loaded at a time; 0 in the tile stands for all.
constexpr int kMergeLoads = 4 > 0 ? 4 : kMergeSplits;
// Whether partial rows have float16 numbers with a scale for each half of their columns, not float32.
constexpr bool kPacksPartials = 0;
// Whether a stage is one tile that all warps read, or each warp has a ring of its own slices.
constexpr bool kSharesTiles = 1;

constexpr int kNumThreads = kNumWarps * kWarpSize;
constexpr int kSliceTokens = kTileTokens / kNumWarps;  // what a warp loads

// Caches of 8 and 4 bits have scales, and are dequantised to ProductType but for products of 8 bits.
constexpr bool kHasScales = sizeof(KVType::Storage) == 1;
constexpr bool kHasFP8Products = 1;
constexpr bool kDequantises = kHasScales && !kHasFP8Products;
// Probabilities of few exponents are so many powers of two as large: small ones keep their digits.
constexpr int kProbabilityBits = 8;
constexpr float kProbabilityFactor = 1 << kProbabilityBits;
// Two elements a byte, in blocks with a scale, and with int4 a zero. Where consumers dequantise,
// products take 32 dims in two steps.
constexpr bool kHasBlocks = BlocksOf<KVType>::kExist;
constexpr bool kHasZeros = BlocksOf<KVType>::kHaveZeros;
constexpr int kElementBits = kHasBlocks ? 4 : 8 * sizeof(KVType::Storage);
constexpr bool kTakesSteps = kHasBlocks && kNumProducers == 0;
constexpr int kKeyTiles = kTakesSteps ? (kKeyDim + 31) / 32 * 2 : kKeyDim / 16;
constexpr int kValueTiles = kTakesSteps ? (kValueDim + 31) / 32 * 2 : kValueDim / 16;

// Tensor maps see a row as segments of so many bytes, and load so many tokens at a time.
constexpr int kSegmentBytes = 128;
constexpr int kTmaTokens = 16 > 0 ? 16 : 8;

// A row of K or V as caches store it, but for the scales of its blocks, and these.
__device__ constexpr int stored_bytes(int dim) { return kElementBits * dim / 8; }
__device__ constexpr int block_bytes(int dim) { return BlocksOf<KVType>::bytes(dim); }
// Vector sizes of rows and of their scales, whose strides are multiples of them. Twin:
// jitattn/tensors/cache_views.py.
constexpr int kVectorBytes = kHasBlocks && (kKeyDim % 32 || kValueDim % 32) ? 8 : 16;
__device__ constexpr int block_vector(int dim) {
  const int bytes = block_bytes(dim);
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 1;
}
// What numbers in products are too small by.
constexpr float kProductFactor = kHasBlocks && !kHasZeros ? kBlockFactor<ProductType> : 1.f;
constexpr int kQueryRowBytes = padded_row(2 * 16 * kKeyTiles);
constexpr int kKeyRowBytes = padded_row(stored_bytes(kKeyDim));
constexpr int kValueRowBytes = padded_row(stored_bytes(kValueDim));
// Bytes of a row that a product takes, or two products with blocks.
constexpr int kStepBytes = kHasBlocks ? 16 : 16 * sizeof(KVType::Storage);
constexpr int kStageTokens = kSharesTiles ? kTileTokens : kSliceTokens;
constexpr int kTokenBytes =
    kUsesTma ? static_cast<int>(sizeof(KVType::Storage)) * (kKeyDim + kValueDim)
             : kKeyRowBytes + kValueRowBytes + block_bytes(kKeyDim) + block_bytes(kValueDim);
constexpr int kStageBytes = kStageTokens * kTokenBytes;
constexpr int kRingBytes = (kSharesTiles ? 1 : kNumWarps) * kNumStages * kStageBytes;
constexpr int kQueryBytes = kRowTile * kQueryRowBytes;

static_assert(kDequantises || 1, "q and 16-bit K/V have one type");
static_assert(kKeyDim % 16 == 0 && kValueDim % 16 == 0, "mma.m16n8k16 takes 16 dims at a time");
static_assert(kValueDim * kNumValueBlocks == 128, "value blocks cover V");
// Page table of a layout, one struct each with the same methods, for kernels that are compiled for
// one layout. Those that read the layout at run time have jitattn/page_list.cuh.
// Twin: jitattn/spec/params.py.
//
//   row(request)          argument of k_id and v_id for a request
//   k_id(row, token)      the entry of a token, for K; v_id likewise for V; of lists unchecked, so that
//                         nothing waits for it before it is needed: see checked() below
//   locate(id, token)     the page and the place in it that the entry stands for
//   kContiguousTokens     tokens of an aligned run that has one entry and lies token by token
//   kSharesPages          v_id equals k_id
//   kHasPages             tokens lie in pages; else their entries are their places in K and V
//   holds(request, n)     whether the request may read n tokens, since run() may get a table that
//                         allows less than the planned one
//   early_k_page(..)      of layouts that list pages: the page of a token of a request while the table may
//                         be written yet, hence any number; -1 where it can't be looked up so early;
//                         early_v_page(..) likewise
//   kIsList               what is listed is seen, and nothing else: a table of lists has besides
//
//   row(request, kv_head, first_key, last_key)  a row of which only keys in this range are seen
//   number(row, token)    what position() needs of memory
//   position(row, token, number)  the key at place `token` of the list, of which k_id() is an entry

struct Location {
  int32_t page;
  int32_t token;  // in the page
};

// Entries of lists, and their positions, where there is no token. One beyond the pool makes the rows
// that see it NaN.
constexpr int32_t kNone = -1, kOutside = -2;

// Rows of a table, in the order of the requests or as `rows` says.
struct TableRows {
  const int32_t* table;  // [num_rows, width] or [num_rows, 2, width]
  const void* rows;      // [batch_size], int32 or int64: the row of each request; null: its own
  int64_t row_stride;
  int64_t column_stride;
  int64_t rows_stride;
  int32_t rows_are_int64;

  using Row = const int32_t*;
  static constexpr bool kIsList = false;

  __device__ __forceinline__ Row row(int32_t request) const {
    const int64_t row = rows ? load_integer(rows, request * rows_stride, rows_are_int64) : request;
    return table + row * row_stride;
  }
  static __device__ __forceinline__ bool holds(int32_t, int32_t) { return true; }

 protected:
  // Past L1, which would keep what is outdated.
  __device__ __forceinline__ int32_t early_entry(int32_t request, int64_t place) const {
    return rows ? -1 : __ldcg(table + request * row_stride + place);
  }
};
// table [num_rows, width]: one page id for K and V.
struct PageTable : TableRows {
  static constexpr int kContiguousTokens = kPageSize;
  static constexpr bool kSharesPages = true;
  static constexpr bool kHasPages = true;

  __device__ __forceinline__ int32_t k_id(Row row, int32_t token) const {
    return row[token / kPageSize * column_stride];
  }
  __device__ __forceinline__ int32_t v_id(Row row, int32_t token) const { return k_id(row, token); }
  __device__ __forceinline__ int32_t early_k_page(int32_t request, int32_t token) const {
    return early_entry(request, token / kPageSize * column_stride);
  }
  __device__ __forceinline__ int32_t early_v_page(int32_t request, int32_t token) const {
    return early_k_page(request, token);
  }
  static __device__ __forceinline__ Location locate(int32_t id, int32_t token) {
    return {id, token % kPageSize};
  }
};
// An entry that k_id() returned, as it counts.
template <typename Table>
__device__ __forceinline__ int32_t checked(const Table& pages, int32_t id) {
  if constexpr (Table::kIsList) {
    return pages.checked(id);
  } else {
    return id;
  }
}
// Arguments of an attention kernel. Twin: jitattn/kernels/common/params.py.
struct KernelParams {
  union {
    TensorMap k_map;  // of caches whose loader uses them
    BlockScales k_blocks;
  };
  union {
    TensorMap v_map;
    BlockScales v_blocks;
  };
  AttentionParams attention;
  PageTable pages;
  QueryScales queries;
};
constexpr bool kHasWholeQueryTiles = true;
constexpr int kNumQueryStages = 2;
constexpr int kNumLandings = 2;
// Whether a soft cap bounds scores so closely that 0 serves as the maximum of every row: their
// probabilities and sums stay within the exponents of float32 and bfloat16.
constexpr bool kFixedMaximum = 0;
// Registers of producers that dequantise, and of those of Q, where these have fewer.
constexpr int kDequantRegisters = 56, kQueryRegisters = 0;
// The type of products of 16 bits.
using PairType = Half;
// Whether rows of Q become another type of as many bits, times a power of two that most share.
constexpr bool kConvertsQueries = kDequantises && QType::kMantissaBits != PairType::kMantissaBits;
constexpr float kQueryFactor = kConvertsQueries ? 32.f : 1.f;
constexpr int kKeyParts = 1;  // in which a tile of K comes and goes
// Of few rows, as in decode steps, not all warpgroups have some; these pass. K in parts leaves no
// registers to know it, nor do masks.
constexpr bool kMayPass = kNumThreads > 128 && kKeyParts == 1 && !kUseCustomMask;

using cute::SM90::GMMA::Major;
using ScoreProduct = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;
using OutputProduct = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>;
}  // namespace jitattn
#endif
