// Angles of rotary embeddings.
#pragma once

#include "jitattn/prelude.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

struct CosSin {
  float cos;
  float sin;
};

// Angle of position * turns, in units of 2**-64 of a turn, within 1e-6. The product loses whole
// turns and nothing else, so that an angle is as exact at the millionth token as at the first, and
// so small that the approximations of the hardware are good enough.
__device__ __forceinline__ CosSin cos_sin(int64_t position, uint64_t turns) {
  const uint64_t fraction = static_cast<uint64_t>(position) * turns;
  constexpr float kPi = 3.14159265358979f;
  // From -pi to pi, of which 32 bits are plenty.
  const float angle =
      static_cast<float>(static_cast<int32_t>(fraction >> 32)) * (kPi / 2147483648.f);
  return {cos_approx(angle), sin_approx(angle)};
}

}  // namespace jitattn
