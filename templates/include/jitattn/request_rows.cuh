// Request of each row of a batch, from lengths on the device. Twin: jitattn/spec/params.py.
#pragma once

#include "jitattn/types.cuh"

namespace jitattn {

// A length of each request; one below zero is padding and counts as zero, and one beyond int32 as
// its largest number, so that sums of garbage don't overflow.
struct Lengths {
  const void* values;  // [batch_size], int32 or int64
  int64_t stride;
  int32_t are_int64;
  int32_t batch_size;

  __device__ __forceinline__ int64_t of(int32_t request) const {
    const int64_t length = load_integer(values, request * stride, are_int64);
    return length > kInt32Max ? kInt32Max : length > 0 ? length : 0;
  }
};

// A row of a request; `request` is -1 past the last one.
struct RequestRow {
  int32_t request;
  int64_t row;
};

// Shared memory of a RequestRows.
template <int kNumThreads>
struct RequestRowSums {
  int64_t begins[kNumThreads + 1];
  int64_t warps[kNumThreads / kWarpSize];
};

// The rows of all requests, one request after the other. Each CTA sums the lengths itself, so that
// no kernel has to run before: thread t has the requests from t * share on.
template <int kNumThreads>
struct RequestRows {
  Lengths lengths;
  RequestRowSums<kNumThreads>& sums;
  int32_t share;

  // For all threads of a CTA.
  __device__ __forceinline__ RequestRows(const Lengths& lengths, RequestRowSums<kNumThreads>& sums)
      : lengths(lengths), sums(sums), share((lengths.batch_size + kNumThreads - 1) / kNumThreads) {
    const int32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    int64_t own = 0;
    // Mostly once: threads have one request or none.
#pragma unroll 1
    for (int32_t i = first(); i < last(); ++i) own += lengths.of(i);
    int64_t sum = own;
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == kWarpSize - 1) sums.warps[warp] = sum;
    __syncthreads();  // the sums of all warps are there
    int64_t begin = sum - own;
    for (int32_t i = 0; i < warp; ++i) begin += sums.warps[i];
    sums.begins[threadIdx.x] = begin;
    if (threadIdx.x == kNumThreads - 1) sums.begins[kNumThreads] = begin + own;
    __syncthreads();  // all begins are there
  }

  // The requests of this thread.
  __device__ __forceinline__ int32_t first() const {
    return min(static_cast<int32_t>(threadIdx.x) * share, lengths.batch_size);
  }
  __device__ __forceinline__ int32_t last() const {
    return min(first() + share, lengths.batch_size);
  }

  __device__ __forceinline__ RequestRow find(int64_t row) const {
    if (row >= sums.begins[kNumThreads]) return {-1, 0};
    // The last thread that begins at `row` or before: empty ones before it begin there, too.
    int32_t thread = 0;
    for (int32_t end = kNumThreads; end - thread > 1;) {
      const int32_t middle = (thread + end) / 2;
      (sums.begins[middle] <= row ? thread : end) = middle;
    }
    int32_t request = thread * share;
    row -= sums.begins[thread];
#pragma unroll 1
    for (int64_t length; row >= (length = lengths.of(request)); ++request) row -= length;
    return {request, row};
  }

  // Begin of each request and end of the last, in int32, saturated.
  __device__ __forceinline__ void write_indptr(int32_t* indptr) const {
    if (threadIdx.x == 0) indptr[0] = 0;
    int64_t end = sums.begins[threadIdx.x];
#pragma unroll 1
    for (int32_t i = first(); i < last(); ++i) {
      end += lengths.of(i);
      indptr[i + 1] = end < kInt32Max ? static_cast<int32_t>(end) : kInt32Max;
    }
  }
};

}  // namespace jitattn
