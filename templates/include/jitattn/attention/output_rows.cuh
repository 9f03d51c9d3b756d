// From registers of a warpgroup's products to rows of out.
#pragma once

#include "jitattn/attention/output.cuh"
#include "jitattn/attention/work_items.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// From word j of lane t of four to word t of lane j.
__device__ __forceinline__ uint4 transpose_quad(uint32_t (&words)[4]) {
  for_each<2>([&](int round) {
    const int step = 1 << round;
    const bool is_high = lane_idx() & step;
    for_each<2>([&](int k) {
      uint32_t& low = words[round ? k : 2 * k];
      uint32_t& high = words[round ? k + 2 : 2 * k + 1];
      const uint32_t other = __shfl_xor_sync(0xffffffff, is_high ? low : high, step);
      (is_high ? low : high) = other;
    });
  });
  return {words[0], words[1], words[2], words[3]};
}

// Address and final factor of a row of out. Each of four lanes finds one row, and shuffles the
// others'.
struct OutputRow {
  uint64_t columns;  // 0 where there is no such row
  float factor;

  // Finds both for a row with this maximum and sum, and writes its lse.
  __device__ __forceinline__ OutputRow(const AttentionParams& params, const WorkItem& item,
                                       const QueryRows& rows, int row, float m, float d,
                                       bool writes_lse) {
    columns = 0;
    factor = 0.f;
    if (row >= rows.num_rows) return;
    const int32_t token = rows.token(row), head = rows.head(row);
    const RowResult result(params, item.query_tile, head, m, d);
    const int32_t value_block = kNumValueBlocks > 1 ? item.block(params).value_block : 0;
    if (writes_lse && value_block == 0) write_lse(params, token, head, result.lse);
    factor = result.factor;
    columns = reinterpret_cast<uint64_t>(static_cast<OutType::Storage*>(params.out) +
                                         token * params.out_token_stride +
                                         head * params.out_head_stride + value_block * kValueDim);
  }

  // Factor and columns of lane `lane` of the four.
  __device__ __forceinline__ float factor_of(int lane) const {
    return __shfl_sync(0xffffffff, factor, lane_idx() / 4 * 4 + lane);
  }
  __device__ __forceinline__ OutType::Storage* columns_of(int lane) const {
    const uint64_t address = __shfl_sync(0xffffffff, columns, lane_idx() / 4 * 4 + lane);
    return reinterpret_cast<OutType::Storage*>(address);
  }
};

// Two neighbouring columns of a row.
struct alignas(2 * sizeof(OutType::Storage)) OutputPair {
  OutType::Storage low, high;
};

// Whether vectors of a row's columns can be written at once.
__device__ __forceinline__ bool has_aligned_rows(const AttentionParams& params) {
  constexpr int kSize = sizeof(OutType::Storage), kVectorBytes = kSize == 2 ? 16 : 8;
  const uint64_t strides = kSize * (params.out_token_stride | params.out_head_stride);
  return (reinterpret_cast<uint64_t>(params.out) | strides) % kVectorBytes == 0;
}

// Writes what a lane has of the first of its rows, multiplied by `factor`: of `lane_values` two of
// four, which are two of eight columns.
template <int kColumns, typename Out = OutType>
__device__ __forceinline__ void write_columns(const float* lane_values, float factor,
                                              typename Out::Storage* columns, bool is_aligned) {
  const int lane = lane_idx() % 4;
  constexpr bool kIsPacked = sizeof(typename Out::Storage) == 2;
  if constexpr (kIsPacked) {
    // Four lanes have 32 columns of a row between them: each writes eight that follow each other.
    for_each<kColumns / 32>([&](int q) {
      uint32_t words[4];
      for_each<4>([&](int j) {
        const float* pair = lane_values + 4 * (4 * q + j);
        words[j] = Out::pack(pair[0] * factor, pair[1] * factor);
      });
      const uint4 vector = transpose_quad(words);
      typename Out::Storage* place = columns + 32 * q + 8 * lane;
      if (!columns) return;
      if (is_aligned) {
        *reinterpret_cast<uint4*>(place) = vector;
      } else {
        store_16(place, vector);
      }
    });
  }
  constexpr int kFirst = kIsPacked ? kColumns / 32 * 4 : 0;
  if (!columns) return;
  for_each<kColumns / 8 - kFirst>([&](int j) {
    const float* values = lane_values + 4 * (kFirst + j);
    const OutputPair pair = {OutType::from_float(values[0] * factor),
                             OutType::from_float(values[1] * factor)};
    typename Out::Storage* place = columns + 8 * (kFirst + j) + 2 * lane;
    if (is_aligned) {
      *reinterpret_cast<OutputPair*>(place) = pair;
    } else {
      place[0] = pair.low, place[1] = pair.high;
    }
  });
}

}  // namespace jitattn
