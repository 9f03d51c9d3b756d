// What kernels ask of a device, for their lanes that are coroutines: device.cpp does it. Kept short,
// since each kernel is compiled with it.

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;
inline int32_t cta_idx_again() { return blockIdx.x; }
inline int32_t grid_size_again() { return gridDim.x; }
void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffff);
int __syncthreads_or(int vote);
bool __any_sync(unsigned mask, bool value);
bool __all_sync(unsigned mask, bool value);
uint32_t __ballot_sync(unsigned mask, bool value);
inline void __threadfence_block() {}
inline int64_t max(int64_t a, long long b) { return a < b ? b : a; }  // one type there
inline int __popc(uint32_t word) { return __builtin_popcount(word); }
inline int __ffs(uint32_t word) { return __builtin_ffs(word); }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
}
template <typename T>
T __ldcg(const T* place) {
  return *place;
}
int atomicMax(int* place, int value);
int atomicAdd(int* place, int value);
int atomicCAS(int* place, int expected, int value);

namespace emulator {
constexpr int kWarpLanes = 32, kSmem = 240 * 1024;
extern uint8_t smem[kSmem];
// Lanes of a warp meet, each with up to 12 words; says what each gave, until two meetings later.
using Words = uint32_t[12];
const Words* meet(const void* mine, int size, uint32_t mask = 0xffffffff);
}  // namespace emulator

template <typename T>
T __shfl_sync(uint32_t mask, T value, int from) {
  std::memcpy(&value, emulator::meet(&value, sizeof value, mask)[from % 32], sizeof value);
  return value;
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  return __shfl_sync(mask, value, threadIdx.x ^ lanes);
}

namespace jitattn {
constexpr int kWarpSize = 32;
constexpr int32_t kInt32Max = 0x7fffffff;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline float neg_inf() { return -INFINITY; }
inline float quiet_nan() { return NAN; }
// The hardware's sine and cosine are within 2**-20 of these.
float sin_approx(float x);
float cos_approx(float x);
float exp2_approx(float x);
float log2_approx(float x);
float reciprocal_approx(float x);
inline void require_now(float) {}
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
inline void prefetch_tensor_map(const void*) {}
inline void prefetch_line(const void*) {}
inline void prefetch_to_l2(const void*) {}
inline void prefetch_tma(const void*, int32_t, int32_t, int32_t, int32_t) {}
inline int32_t atomic_add_acq_rel(int32_t* place, int32_t value) { return atomicAdd(place, value); }
inline void add_release(int32_t* place, int32_t value) { atomicAdd(place, value); }
inline int32_t load_acquire(const int32_t* place) { return *place; }
inline void sleep_ns(uint32_t) {}
template <int kCount>
void give_registers() {}
template <int kCount>
void take_registers() {}
bool elect_one();

// Memory.
uint4 ld_global_16(const void* source, bool exists);
uint4 ld_past_l1_16(const void* source);
uint2 ld_past_l1_8(const void* source);
uint2 ld_global_8(const void* source, bool exists);
uint32_t ld_global_4(const void* source, bool exists);
uint2 load_8(const void* source);
template <typename T>
uint4 load_16(const T* source) {
  uint4 words;
  std::memcpy(&words, source, 16);
  return words;
}
template <typename T>
void store_16(T* target, uint4 words) {
  std::memcpy(target, &words, 16);
}
uint32_t smem_address(const void* pointer);
uint32_t ld_shared_byte(uint32_t smem);
uint32_t ld_shared_4(uint32_t smem);
uint2 ld_shared_8(uint32_t smem);
uint4 ld_shared_16(uint32_t smem);
void st_shared_byte(uint32_t smem, uint32_t value);
void st_shared_4(uint32_t smem, uint32_t value);
void st_shared_8(uint32_t smem, uint2 value);
void st_shared_16(uint32_t smem, uint4 value);

// Copies that land when they are waited for.
void copy_later(uint32_t smem, const void* source, int size, bool valid);
template <int kFetchBytes>
void cp_async_16(uint32_t smem, const void* source, bool valid) {
  copy_later(smem, source, 16, valid);
}
template <int kBytes>
void cp_async_few(uint32_t smem, const void* source, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8, "");
  copy_later(smem, source, kBytes, valid);
}
template <int kBytes>
void cp_async_unless(uint32_t smem, const void* source, bool is_ignored) {
  static_assert(kBytes == 4 || kBytes == 16, "");
  copy_later(smem, source, kBytes, !is_ignored);
}
void cp_async_commit();
void wait_for_copies(int pending);
template <int kPending>
void cp_async_wait() {
  wait_for_copies(kPending);
}
void cp_async_wait_all();
void copy_tma(uint32_t smem, const void* map, uint32_t barrier, int token, int segment, int head,
              int page, int column = 0);
void fence_before_tma();

// Barriers, by the places that stand for them, or by number.
inline void fence_mbarrier_init() {}
void mbarrier_init(uint32_t barrier, int count);
void mbarrier_expect(uint32_t barrier, int bytes);
void mbarrier_arrive(uint32_t barrier);
void mbarrier_arrive_later(uint32_t barrier);
void mbarrier_inval(uint32_t barrier);
void mbarrier_wait(uint32_t barrier, uint32_t parity);
void meet_at(int barrier, int count, bool waits);
template <int kThreads>
void sync_threads(int barrier) {
  meet_at(barrier, kThreads, true);
}
template <int kThreads>
bool sync_threads_or(int barrier, bool value) {
  static bool votes[16];
  sync_threads<kThreads>(barrier);
  votes[barrier] = false;
  sync_threads<kThreads>(barrier);
  votes[barrier] |= value;
  sync_threads<kThreads>(barrier);
  return votes[barrier];
}
template <int kThreads>
void arrive_threads(int barrier) {
  meet_at(barrier, kThreads, false);
}

// Matrices.
uint2 ldmatrix_x2(uint32_t smem);
uint2 ldmatrix_x2_trans(uint32_t smem);
uint4 ldmatrix_x4(uint32_t smem);
uint4 ldmatrix_x4_trans(uint32_t smem);
uint32_t movmatrix_trans(uint32_t fragment);
void stmatrix_x4(uint32_t smem, uint4 value);
uint32_t cvt_e4m3x4(float a, float b, float c, float d);
template <typename Type>
void multiply(float (&d)[4], uint4 a, uint2 b);  // of Half and BFloat16
template <typename Type>
struct Numbers {
  using Storage = uint16_t;
  static uint32_t pack(float low, float high) {
    return Type::from_float(low) | uint32_t(Type::from_float(high)) << 16;
  }
  static float low(uint32_t word) { return Type::to_float(word); }
  static float high(uint32_t word) { return Type::to_float(word >> 16); }
  static uint32_t mul(uint32_t a, uint32_t b) { return pack(low(a) * low(b), high(a) * high(b)); }
  static void mma(float (&d)[4], uint4 a, uint2 b) { multiply<Type>(d, a, b); }
};
}  // namespace jitattn
