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

// Turns scores of row `half` into probabilities, and returns this lane's sum of them. `exponent_of` a
// score is that of its probability, in log2 units.
template <int kGroups, typename Scores, typename ExponentOf>
__device__ __forceinline__ float exponentiate_row(Scores& s, int half,
                                                  const ExponentOf& exponent_of) {
  float sum = 0.f;
  for_each<kGroups>([&](int j) {
    for_each<2>([&](int i) {
      float& value = s.at(j, 2 * half + i);
      value = exp2_approx(exponent_of(value));
      sum += value;
    });
  });
  return sum;
}

// Takes maximum `m` from the scores of row `half` where their offset is large, and returns 0, else
// the offset: a product's rounding would be thousands there, and exponents of equal scores not 0. Each row
// by its own offset: others of the warp must not change its bits.
template <int kGroups, typename Scores>
__device__ __forceinline__ float reduce_large_offset(Scores& s, int half, float m, float offset) {
  const bool is_large = fabsf(offset) > kLargeOffset;
  if (!__any_sync(0xffffffff, is_large)) return offset;
  const float reference = is_large ? finite_maximum(m) : 0.f;
  for_each<kGroups>(
      [&](int j) { for_each<2>([&](int i) { s.at(j, 2 * half + i) -= reference; }); });
  return is_large ? 0.f : offset;
}

// Raises the maxima `m` to those of both rows of a lane, turns scores into probabilities times
// kProbabilityFactor, and adds these to the sums `d`. Exponentials of the first row run beside the
// maximum of the second.
template <int kGroups, bool kHasLargeScores, typename Scores>
__device__ __forceinline__ void exponentiate_rows(Scores& s, const float (&scales)[2],
                                                  float (&m)[2], float (&d)[2],
                                                  float (&old_scale)[2]) {
  float offset[2];
  const auto raise = [&](int half) {
    offset[half] = raise_scaled_maximum<kGroups>(s, half, scales[half], m[half], old_scale[half]);
  };
  const auto reduce = [&](int half) {
    if constexpr (kHasLargeScores)
      offset[half] = reduce_large_offset<kGroups>(s, half, m[half], offset[half]);
  };
  const auto add = [&](int half) {
    if constexpr (kProbabilityBits > 0) offset[half] -= kProbabilityBits;
    const float sum = exponentiate_row<kGroups>(
        s, half, [&](float score) { return fmaf(score, scales[half], -offset[half]); });
    d[half] = d[half] * old_scale[half] + sum;
  };
  raise(0);
  reduce(0);
  raise(1);
  add(0);
  reduce(1);
  add(1);
}

}  // namespace jitattn
