// Online softmax of rows whose scores four lanes share, as products of warps and warpgroups do.
#pragma once

#include "jitattn/attention/output.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Maximum over the four lanes of a row.
__device__ __forceinline__ float max_of_four(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}

// Sum over the four lanes of a row.
__device__ __forceinline__ float sum_of_four(float value) {
  value += __shfl_xor_sync(0xffffffff, value, 1);
  value += __shfl_xor_sync(0xffffffff, value, 2);
  return value;
}

// Raises maximum `m` of row `half` to that of fragments of logits; returns the factor of its sum
// and output so far.
template <int kCount>
__device__ __forceinline__ float raise_maximum_of(const float (&s)[kCount][4], int half, float& m,
                                                  bool& is_raised) {
  float top = m;
  for_each<kCount>([&](int n) { top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1])); });
  top = max_of_four(top);
  is_raised |= top > m;
  const float old_scale = exp2_approx(m - finite_maximum(top));
  m = top;
  return old_scale;
}

// Offset of exponents, in log2 units, from which on its rounding is no small part of one.
constexpr float kLargeOffset = 4096.f;

// Raises maximum `m` of row `half` to that of scores, which `scale` takes to log2 units; returns
// the new maximum in these. `old_scale` is the factor of its sum and output so far: 1 exactly where
// the maximum stays.
template <int kGroups, typename Scores>
__device__ __forceinline__ float raise_scaled_maximum(const Scores& s, int half, float scale,
                                                      float& m, float& old_scale) {
  float top = m;
  for_each<kGroups>(
      [&](int j) { top = fmaxf(top, fmaxf(s.at(j, 2 * half), s.at(j, 2 * half + 1))); });
  top = max_of_four(top);
  const float reference = finite_maximum(top);
  old_scale = exp2_approx((m - reference) * scale);
  m = top;
  return reference * scale;
}

// Turns scores of row `half` into probabilities, and returns this lane's sum of them.
template <int kGroups, typename Scores>
__device__ __forceinline__ float exponentiate_row(Scores& s, int half, float scale, float offset) {
  float sum = 0.f;
  for_each<kGroups>([&](int j) {
    for_each<2>([&](int i) {
      float& value = s.at(j, 2 * half + i);
      value = exp2_approx(fmaf(value, scale, -offset));
      sum += value;
    });
  });
  return sum;
}

// Takes the maxima `m` from the scores of both rows where an offset is large, and leaves offsets of
// 0: a product's rounding would be thousands there, and exponents of equal scores not 0.
template <int kGroups, typename Scores>
__device__ __forceinline__ void reduce_large_offsets(Scores& s, const float (&m)[2],
                                                     float (&offset)[2]) {
  const float largest = fmaxf(fabsf(offset[0]), fabsf(offset[1]));
  if (!__any_sync(0xffffffff, largest > kLargeOffset)) return;
  for_each<2>([&](int half) {
    const float reference = finite_maximum(m[half]);
    for_each<kGroups>(
        [&](int j) { for_each<2>([&](int i) { s.at(j, 2 * half + i) -= reference; }); });
    offset[half] = 0.f;
  });
}

}  // namespace jitattn
