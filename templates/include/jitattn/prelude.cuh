// Declarations that NVRTC lacks. First include of every kernel; no toolkit header is needed.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

namespace jitattn {

#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__;  // 800 for sm_80
#endif

constexpr int kWarpSize = 32;
constexpr int32_t kInt32Max = 0x7fffffff;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fffffff); }

}  // namespace jitattn
