// Descriptors of shared memory matrices for warpgroup products.
#pragma once

#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/prelude.cuh"

namespace jitattn {

constexpr int kGroupThreads = 128;

__device__ __forceinline__ int group_idx() { return uniform(threadIdx.x / kGroupThreads); }

// Rows that lie one after the other, kRows to a segment: Q and K.
template <int kRows>
struct RowLayout {
  static __device__ __forceinline__ uint32_t row(uint32_t smem, int segment, int row) {
    return smem + (segment * kRows + row) * kSegmentBytes;
  }
};

// Describes a matrix in shared memory to products, for the 128-byte swizzle. `kStep` and `kLeap`
// are strides in bytes: `kStep` between groups of eight rows; `kLeap` between segments, of V only.
template <int kStep, int kLeap>
struct Descriptor {
  uint32_t low;

  // Found by one lane for all, so that the parts are found where products read them.
  __device__ __forceinline__ explicit Descriptor(uint32_t smem) {
    low = __shfl_sync(0xffffffff, smem / 16 | kLeap / 16 << 16, 0);
  }

  // Descriptor `bytes` further.
  __device__ __forceinline__ uint64_t at(int bytes) const {
    constexpr uint32_t kSwizzle128 = 1u << 30;
    uint64_t words;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(words)
        : "r"(low + bytes / 16), "n"(kSwizzle128 | kStep / 16));
    return words;
  }
};

// The registers of an accumulator, each of which an instruction names.
template <int... kIndices>
struct Registers {
  // Begins values += a b, or values = a b where `scale` is zero.
  template <typename Product, int kCount, typename Scale, typename... Operands>
  static __device__ __forceinline__ void multiply(float (&values)[kCount], Scale scale,
                                                  Operands... operands) {
    Product::fma(operands..., values[kIndices]..., scale);
  }
};
template <int kCount, int... kIndices>
struct FirstRegisters : FirstRegisters<kCount - 1, kCount - 1, kIndices...> {};
template <int... kIndices>
struct FirstRegisters<0, kIndices...> : Registers<kIndices...> {};

}  // namespace jitattn
