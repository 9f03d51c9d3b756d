// Angles of rotary embeddings.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

struct CosSin {
  float cos;
  float sin;
};

// Of position * turns, in units of 2**-64 of a turn. The product loses whole turns and nothing
// else, so that an angle is as exact at the millionth token as at the first.
__device__ __forceinline__ CosSin cos_sin(int64_t position, uint64_t turns) {
  const uint64_t angle = static_cast<uint64_t>(position) * turns;
  // Half turns, from -1 to 1, of which 32 bits are plenty.
  const float half_turns = static_cast<float>(static_cast<int32_t>(angle >> 32)) * 4.656612873e-10f;
  CosSin result;
  sincospif(half_turns, &result.sin, &result.cos);
  return result;
}

}  // namespace jitattn
