"""The kernels of attention, compiled for the CPU and launched by the real host code.

The lanes of a CTA are coroutines, which meet where a warp or the CTA does; CTAs run one after the
other. Instructions that the host hasn't are written anew here; the templates and the headers of
their arithmetic are the real ones. Shared memory begins full of NaN, and copies to it land when
they are waited for.

With a seed the order of lanes is random, some warps run far ahead of others, and what is under way
happens as late as it may: boxes land when nobody expects them, products read and write when they
are waited for. Until then NaN stands where they write. What a launch does wrong whatever comes of
it, a wait without end or a product that reads past its fence, fails the test.
"""

from __future__ import annotations

import ctypes
import functools
import re

import pytest
import torch

import jitattn
from jitattn.device import driver
from jitattn.device.driver import DeviceFacts
from jitattn.jit.render import TEMPLATES, render
from jitattn.kernels.common import cuda_kernels
from jitattn.kernels.common.params import ScheduleParams, kernel_params
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.mla.kernels import MLAKernels
from jitattn.spec.layout import Layout
from tests.emulator import launch_recorder
from tests.emulator.cuda_runtime import QUALIFIERS, TYPES, WORDS, library_of
from tests.emulator.launch_recorder import FakeKernel
from tests.emulator.schedule import EmulatedSchedule, compile_schedule

REAL_HEADERS = ("operands", "schedule", "attention_params", "mla_params", "nvfp4", "lanes")
ARCHITECTURES = {"sm_80": (8, 0), "sm_90a": (9, 0)}
HOST = (
    QUALIFIERS
    + WORDS
    + r"""
#include <setjmp.h>
#include <ucontext.h>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>
inline int64_t max(int64_t a, long long b) { return std::max<int64_t>(a, b); }  // one type there
struct Index { unsigned x; };
static Index blockIdx, gridDim;

struct Copy { uint32_t smem; const uint8_t* source; int size; bool valid; };
struct Lane {
  Index index;
  ucontext_t context;  // where it begins
  bool has_begun = false;
  jmp_buf place;
  std::vector<char> stack;
  bool is_done = false;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  uint64_t seen = 0;  // events, when it began to wait
  std::deque<std::vector<std::function<void()>>> products;
  std::vector<std::function<void()>> issued;
  struct Accumulator { int pending = 0; std::vector<float> values; };
  std::map<float*, Accumulator> accumulators;
  std::vector<uint32_t> unfenced;  // words of shared memory that it wrote since its last fence
  std::vector<std::pair<uint32_t, uint16_t>> acquired;  // words of others, and whose they are
};
static std::vector<Lane> lanes;
static Lane* current;
static jmp_buf host;
static uint32_t seed;           // 0: everything happens at once, and lanes take turns
static const char* fault;       // what a launch did wrong
static uint64_t events = 1;     // after each, somebody's wait may be over
static std::vector<std::function<void()>> boxes;  // under way
#define threadIdx (current->index)
inline uint32_t draw(uint32_t count) {
  seed ^= seed << 13, seed ^= seed >> 17, seed ^= seed << 5;
  return seed % count;
}
// Jumps between stacks, since swapcontext() asks the system for a signal mask each time. Neither
// function has locals, which a jump would forget.
__attribute__((noinline)) static void yield() {
  current->seen = events;
  if (_setjmp(current->place) == 0) _longjmp(host, 1);
}
__attribute__((noinline)) static void resume() {
  if (_setjmp(host) != 0) return;
  if (current->has_begun) _longjmp(current->place, 1);
  current->has_begun = true;
  setcontext(&current->context);
}

struct Barrier {
  unsigned waiting = 0, phase = 0, expected = 0;
  bool arrive(unsigned count) {
    if (waiting > 0 && count != expected) fault = "a barrier is met with different counts";
    expected = count;
    if (++waiting < count) return false;
    waiting = 0, ++phase, ++events;
    return true;
  }
  void wait(unsigned count) {
    const unsigned entered = phase;
    if (!arrive(count)) while (phase == entered) yield();
  }
};
static Barrier cta_barrier;
static Barrier warp_barriers[32];
static uint32_t exchanged[32][32][4];
inline unsigned warp() { return threadIdx.x / 32; }
inline unsigned lane() { return threadIdx.x % 32; }
inline void __syncthreads() { cta_barrier.wait(lanes.size()); }
inline void __syncwarp() { warp_barriers[warp()].wait(32); }
static int votes;
inline int __syncthreads_or(int vote) {
  __syncthreads();
  votes = 0;
  __syncthreads();
  votes |= vote;
  __syncthreads();
  return votes;
}
// What every lane of the warp gives.
template <typename T>
struct Given {
  T of[32];
  explicit Given(T mine) {
    static_assert(sizeof(T) <= 16, "");
    std::memcpy(exchanged[warp()][lane()], &mine, sizeof mine);
    __syncwarp();
    for (int i = 0; i < 32; ++i) std::memcpy(&of[i], exchanged[warp()][i], sizeof mine);
    __syncwarp();
  }
};
template <typename T> T __shfl_sync(unsigned, T value, int from) {
  return Given<T>(value).of[from % 32];
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int mask) {
  return Given<T>(value).of[lane() ^ mask];
}
inline bool __any_sync(unsigned, bool value) {
  const Given<bool> all(value);
  return std::any_of(all.of, all.of + 32, [](bool x) { return x; });
}
inline bool __all_sync(unsigned mask, bool value) { return !__any_sync(mask, !value); }
inline uint32_t __ballot_sync(unsigned, bool value) {
  const Given<bool> all(value);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) votes |= uint32_t(all.of[i]) << i;
  return votes;
}
inline int __popc(uint32_t word) { return __builtin_popcount(word); }
template <typename T> T __ldcg(const T* place) { return *place; }
inline int atomicMax(int* place, int value) {
  const int old = *place;
  *place = std::max(old, value);
  return old;
}
inline void __threadfence_block() {}
inline int atomicAdd(int* place, int value) { const int old = *place; *place += value; return old; }
inline int atomicCAS(int* place, int expected, int value) {
  const int old = *place;
  if (old == expected) *place = value;
  return old;
}
constexpr int kSmem = 240 * 1024;
alignas(1024) static uint8_t host_smem[kSmem];

namespace jitattn {
constexpr int kWarpSize = 32;
constexpr int32_t kInt32Max = 0x7fffffff;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline float neg_inf() { return -INFINITY; }
inline float quiet_nan() { return NAN; }
inline uint32_t smem_address(const void* pointer) {
  return static_cast<const uint8_t*>(pointer) - host_smem;
}
inline uint8_t* at(uint32_t smem, int size) {
  if (smem % size || smem + size > kSmem) std::abort();
  return host_smem + smem;
}
// Who wrote a word in the way that products and boxes need a fence to know of: a lane + 1.
static uint16_t writers[kSmem / 4];
inline uint8_t* written(uint32_t smem, int size) {
  uint8_t* place = at(smem, size);
  if (!seed) return place;
  for (uint32_t word = smem / 4; word < (smem + size + 3) / 4; ++word) {
    writers[word] = threadIdx.x + 1;
    current->unfenced.push_back(word);
  }
  return place;
}
// Of what this thread wrote, and of what it has waited for.
inline void fence_before_tma() {
  for (uint32_t word : current->unfenced) {
    if (writers[word] == threadIdx.x + 1) writers[word] = 0;
  }
  current->unfenced.clear();
  for (const auto& [word, writer] : current->acquired) {
    if (writers[word] == writer) writers[word] = 0;
  }
  current->acquired.clear();
}
inline void copy_later(uint32_t smem, const void* source, int size, bool valid) {
  if (valid && reinterpret_cast<uintptr_t>(source) % size) std::abort();
  uint8_t* place = at(smem, size);
  if (seed) std::memset(place, 0xff, size);
  current->open.push_back({smem, static_cast<const uint8_t*>(source), size, valid});
}
inline uint4 ld_global_16(const void* source, bool exists) {
  if (reinterpret_cast<uintptr_t>(source) % 16) std::abort();
  uint4 words = {};
  if (exists) std::memcpy(&words, source, 16);
  return words;
}
inline uint32_t ld_global_4(const void* source, bool exists) {
  uint32_t word = 0;
  if (exists) std::memcpy(&word, source, 4);
  return word;
}
template <int kFetchBytes> void cp_async_16(uint32_t smem, const void* source, bool valid) {
  copy_later(smem, source, 16, valid);
}
template <int kBytes> void cp_async_few(uint32_t smem, const void* source, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8, "");
  copy_later(smem, source, kBytes, valid);
}
inline void cp_async_commit() {
  current->groups.push_back(current->open);
  current->open.clear();
}
template <int kPending> void cp_async_wait() {
  while (current->groups.size() > kPending) {
    for (const Copy& copy : current->groups.front()) {
      uint8_t* place = written(copy.smem, copy.size);
      if (copy.valid) std::memcpy(place, copy.source, copy.size);
      else std::memset(place, 0, copy.size);
    }
    current->groups.pop_front();
  }
}
inline void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait<0>();
}
// Barriers, by the places that stand for them.
struct Phases {
  int count, pending, bytes;
  uint32_t parity;
  // What those who arrive have written without a fence: in this phase, and in the one before.
  std::vector<std::pair<uint32_t, uint16_t>> arriving, arrived;

  void finish() {
    if (pending < 0) fault = "more arrive than a barrier counts";
    if (pending != 0 || bytes != 0) return;
    pending = count, parity ^= 1, ++events;
    arrived = std::move(arriving);
    arriving.clear();
  }
};
static std::map<uint32_t, Phases> phases;
inline void mbarrier_init(uint32_t barrier, int count) {
  phases[barrier] = {count, count, 0, 0, {}, {}};
}
inline void mbarrier_expect(uint32_t barrier, int bytes) {
  Phases& now = phases.at(barrier);
  --now.pending, now.bytes += bytes;
  now.finish();
}
// One lane arrives for its warp, which has met before. Others of it may have written more since,
// which they publish again when that is said to be there.
inline void mbarrier_arrive(uint32_t barrier) {
  const size_t first = threadIdx.x / 32 * 32;
  for (size_t i = first; i < std::min(first + 32, lanes.size()); ++i) {
    std::vector<uint32_t>& words = lanes[i].unfenced;
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    words.erase(std::remove_if(words.begin(), words.end(),
                               [&](uint32_t word) { return writers[word] != i + 1; }),
                words.end());
    for (uint32_t word : words) phases.at(barrier).arriving.push_back({word, writers[word]});
  }
  mbarrier_expect(barrier, 0);
}
inline void mbarrier_inval(uint32_t barrier) { phases.erase(barrier); }
inline bool elect_one() {
  __syncwarp();
  return lane() == 0;
}
// A tensor map as launch_recorder.py writes it.
struct Map {
  uint64_t pointer, item_bytes, sizes[5], strides[4];
  uint32_t box[5];
};
// `from` counts in the map's dimensions but the first, of which a tile has 128 bytes from `column`.
inline void land_box(uint32_t smem, const Map& it, uint32_t barrier, const int (&from)[4],
                     int column) {
  const int row_bytes = it.box[0] * it.item_bytes;
  if (row_bytes != 128 || smem % 1024 || it.box[4] != 1) std::abort();
  const int rows = it.box[1] * it.box[2] * it.box[3];
  for (int r = 0; r < rows; ++r) {
    const int steps[4] = {r % int(it.box[1]), r / int(it.box[1]) % int(it.box[2]),
                          r / int(it.box[1] * it.box[2]), 0};
    const auto* row = reinterpret_cast<const uint8_t*>(it.pointer);
    bool exists = true;
    for (int d = 0; d < 4; ++d) {
      const int64_t place = from[d] + steps[d];
      exists &= place >= 0 && place < int64_t(it.sizes[d + 1]);
      row += place * int64_t(it.strides[d]);
    }
    const uint32_t place = smem + r * 128;
    for (int v = 0; v < 8; ++v) {
      uint8_t* vector = at(place + (v ^ place / 128 % 8) * 16, 16);
      const uint64_t begin = column * it.item_bytes + v * 16;
      if (exists && begin < it.sizes[0] * it.item_bytes) std::memcpy(vector, row + begin, 16);
      else std::memset(vector, 0, 16);
    }
  }
  Phases& now = phases.at(barrier);
  now.bytes -= rows * row_bytes;
  now.finish();
}
inline void copy_tma(uint32_t smem, const void* map, uint32_t barrier, int token, int segment,
                     int head, int page, int column = 0) {
  Map it;
  std::memcpy(&it, map, sizeof it);
  const auto land = [=] { land_box(smem, it, barrier, {token, segment, head, page}, column); };
  if (!seed) return land();
  const int size = it.box[1] * it.box[2] * it.box[3] * 128;
  for (uint32_t word = smem / 4; word < (smem + size) / 4; ++word) {
    if (writers[word]) fault = "a box overwrites what was written without a fence";
  }
  std::memset(at(smem, 128), 0xff, size);
  boxes.push_back(land);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const Phases& now = phases.at(barrier);
  while (now.parity == parity) yield();
  current->acquired.insert(current->acquired.end(), now.arrived.begin(), now.arrived.end());
}
inline void mbarrier_arrive_later(uint32_t barrier) {
  std::vector<Copy> copies;
  copies.swap(current->open);
  const auto land = [=] {
    for (const Copy& copy : copies) {
      uint8_t* place = at(copy.smem, copy.size);
      if (copy.valid) std::memcpy(place, copy.source, copy.size);
      else std::memset(place, 0, copy.size);
    }
    mbarrier_expect(barrier, 0);
  };
  if (!seed) return land();
  boxes.push_back(land);
}
inline void fence_mbarrier_init() {}
static Barrier named_barriers[16];
template <int kThreads> void sync_threads(int barrier) { named_barriers[barrier].wait(kThreads); }
template <int kThreads> void arrive_threads(int barrier) {
  named_barriers[barrier].arrive(kThreads);
}
inline void require_now(float) {}
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
inline void prefetch_tensor_map(const void*) {}
inline void prefetch_line(const void*) {}
inline int32_t atomic_add_acq_rel(int32_t* place, int32_t value) { return atomicAdd(place, value); }
template <typename T> uint4 load_16(const T* source) {
  uint4 words;
  std::memcpy(&words, source, 16);
  return words;
}
template <typename T> void store_16(T* target, uint4 words) { std::memcpy(target, &words, 16); }
inline uint2 load_8(const void* source) {
  uint2 words;
  std::memcpy(&words, source, 8);
  return words;
}
inline void st_shared_byte(uint32_t smem, uint32_t value) { *written(smem, 1) = value; }
inline uint32_t ld_shared_byte(uint32_t smem) { return *at(smem, 1); }
inline uint32_t ld_shared_4(uint32_t smem) {
  uint32_t word;
  std::memcpy(&word, at(smem, 4), 4);
  return word;
}
inline void st_shared_4(uint32_t smem, uint32_t value) { std::memcpy(written(smem, 4), &value, 4); }
inline void st_shared_8(uint32_t smem, uint2 value) { std::memcpy(written(smem, 8), &value, 8); }
inline void st_shared_16(uint32_t smem, uint4 value) { std::memcpy(written(smem, 16), &value, 16); }
// Matrix `m` of an ldmatrix, of the lane's two elements.
inline uint32_t matrix(const Given<uint32_t>& places, int m, bool is_transposed) {
  const int g = lane() / 4, t = lane() % 4;
  uint16_t pair[2];
  for (int i = 0; i < 2; ++i) {
    const int row = is_transposed ? 2 * t + i : g, column = is_transposed ? g : 2 * t + i;
    std::memcpy(&pair[i], at(places.of[8 * m + row], 16) + 2 * column, 2);
  }
  return pair[0] | uint32_t(pair[1]) << 16;
}
inline uint2 ldmatrix_x2(uint32_t smem) {
  const Given<uint32_t> places(smem);
  return {matrix(places, 0, false), matrix(places, 1, false)};
}
inline uint2 ldmatrix_x2_trans(uint32_t smem) {
  const Given<uint32_t> places(smem);
  return {matrix(places, 0, true), matrix(places, 1, true)};
}
inline uint2 ld_shared_8(uint32_t smem) {
  uint2 words;
  std::memcpy(&words, at(smem, 8), 8);
  return words;
}
inline uint4 ld_shared_16(uint32_t smem) {
  uint4 words;
  std::memcpy(&words, at(smem, 16), 16);
  return words;
}
inline uint4 ldmatrix_x4(uint32_t smem) {
  const Given<uint32_t> p(smem);
  return {matrix(p, 0, false), matrix(p, 1, false), matrix(p, 2, false), matrix(p, 3, false)};
}
inline uint4 ldmatrix_x4_trans(uint32_t smem) {
  const Given<uint32_t> p(smem);
  return {matrix(p, 0, true), matrix(p, 1, true), matrix(p, 2, true), matrix(p, 3, true)};
}
inline uint32_t movmatrix_trans(uint32_t fragment) {
  const Given<uint32_t> all(fragment);
  const int g = lane() / 4, t = lane() % 4;
  uint32_t word = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t source = all.of[(2 * t + i) * 4 + g / 2];
    word |= (source >> g % 2 * 16 & 0xffff) << 16 * i;
  }
  return word;
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }

template <typename Type>
struct Numbers {
  using Storage = uint16_t;
  static uint32_t pack(float low, float high) {
    return Type::from_float(low) | uint32_t(Type::from_float(high)) << 16;
  }
  static float low(uint32_t word) { return Type::to_float(word); }
  static float high(uint32_t word) { return Type::to_float(word >> 16); }
  static uint32_t mul(uint32_t a, uint32_t b) { return pack(low(a) * low(b), high(a) * high(b)); }
  static void mma(float (&d)[4], uint4 a, uint2 b) {
    const Given<uint4> as(a);
    const Given<uint2> bs(b);
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i / 2 * 8, column = 2 * t + i % 2;
      float sum = 0.f;
      for (int k = 0; k < 16; ++k) {
        const uint4& x = as.of[row % 8 * 4 + k % 8 / 2];
        const uint2& y = bs.of[column * 4 + k % 8 / 2];
        const uint32_t left = row < 8 ? (k < 8 ? x.x : x.z) : (k < 8 ? x.y : x.w);
        const uint32_t right = k < 8 ? y.x : y.y;
        sum += (k % 2 ? high(left) : low(left)) * (k % 2 ? high(right) : low(right));
      }
      d[i] += sum;
    }
  }
};
"""
    + TYPES
    + r"""
struct Float4E2M1 { using Storage = uint8_t; };
template <typename To, typename From> uint2 unpack_pairs(uint32_t bytes) {
  const uint2 halves = From::to_pairs(bytes);
  return {To::from_halves(halves.x), To::from_halves(halves.y)};
}
template <typename To, typename From> uint2 unpack(uint32_t bytes) {
  if constexpr (std::is_base_of_v<Bytes<From>, From>) {
    const uint2 halves = From::to_halves(bytes);
    return {To::from_halves(halves.x), To::from_halves(halves.y)};
  }
  return {};
}
}  // namespace jitattn
"""
)
# Products of warpgroups, which are done at once, or with a seed when they are waited for.
WARPGROUPS = r"""
namespace cutlass::arch {
template <int kRegisters> void warpgroup_reg_dealloc() {}
template <int kRegisters> void warpgroup_reg_alloc() {}
}  // namespace cutlass::arch
namespace cute {
// A warp's lanes are together at each of these instructions.
inline void meet() { if (seed) __syncwarp(); }
inline void finish_products(int pending) {
  while (current->products.size() > pending) {
    for (const auto& product : current->products.front()) product();
    current->products.pop_front();
  }
}
// Begins a product that has its sums in `d`, where nobody finds them until it is done.
template <typename Run> void begin_product(const std::vector<float*>& d, Run run) {
  if (!seed) return run();
  Lane::Accumulator& sums = current->accumulators[d[0]];
  if (sums.pending++ == 0) {
    for (float* place : d) sums.values.push_back(*place), *place = NAN;
  }
  current->issued.push_back([=, &sums] {
    for (int i = 0; i < sums.values.size(); ++i) *d[i] = sums.values[i];
    sums.values.clear();
    run();
    if (--sums.pending == 0) current->accumulators.erase(d[0]);
  });
}
inline void warpgroup_arrive() { meet(); }
inline void warpgroup_commit_batch() {
  if (!seed) return;
  current->products.push_back(std::move(current->issued));
  current->issued.clear();
  if (draw(4) == 0) finish_products(0);
}
template <int kPending> void warpgroup_wait() {
  finish_products(kPending);
  meet();
}
inline void warpgroup_fence_operand(float&) {}
namespace SM90::GMMA {
enum class Major { K, MN };
enum class ScaleOut { Zero, One };
// An element of a matrix with the 128-byte swizzle: `along` lies in its rows of 128 bytes.
template <typename Type> float element(uint64_t matrix, int row, int along) {
  using Storage = typename Type::Storage;
  constexpr int kSize = sizeof(Storage), kRow = 128 / kSize;
  const uint32_t begin = (matrix & 0x3fff) * 16, leap = (matrix >> 16 & 0x3fff) * 16;
  const uint32_t step = (matrix >> 32 & 0x3fff) * 16;
  const uint32_t place =
      begin + row / 8 * step + row % 8 * 128 + along / kRow * leap + along % kRow * kSize;
  Storage bits;
  const uint32_t swizzled = place ^ (place >> 7 & 7) << 4;
  if (jitattn::writers[swizzled / 4]) fault = "a product reads what was written without a fence";
  std::memcpy(&bits, jitattn::at(swizzled, kSize), kSize);
  if constexpr (kSize == 1) return jitattn::Half::to_float(Type::half(bits));
  else return Type::to_float(bits);
}
template <typename Type, Major kB, typename A>
void multiply(const A& a, uint64_t b, const std::vector<float*>& d, bool adds) {
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < d.size(); ++i) {
    const int row = g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    float sum = adds ? *d[i] : 0.f;
    for (int k = 0; k < 32 / sizeof(typename Type::Storage); ++k) {
      const float right =
          kB == Major::K ? element<Type>(b, column, k) : element<Type>(b, k, column);
      sum += a(row, k) * right;
    }
    *d[i] = sum;
  }
}
template <typename Type, Major kA = Major::K, Major kB = Major::K> struct SharedByShared {
  template <typename... Floats> static void fma(uint64_t a, uint64_t b, Floats&&... floats) {
    run(a, b, std::forward_as_tuple(floats...), std::make_index_sequence<sizeof...(floats) - 1>());
  }
  template <typename Tuple, size_t... I>
  static void run(uint64_t a, uint64_t b, Tuple all, std::index_sequence<I...>) {
    const int first = warp() % 4 * 16;
    const auto left = [=](int row, int k) { return element<Type>(a, first + row, k); };
    const std::vector<float*> d = {&std::get<I>(all)...};
    const bool adds = std::get<sizeof...(I)>(all) == ScaleOut::One;
    begin_product(d, [=] { multiply<Type, kB>(left, b, d, adds); });
  }
};
template <typename Type, Major kA, Major kB> struct RegistersByShared {
  template <typename... Floats>
  static void fma(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                  Floats&&... floats) {
    run({a0, a1, a2, a3}, b, std::forward_as_tuple(floats...),
        std::make_index_sequence<sizeof...(floats) - 1>());
  }
  template <typename Tuple, size_t... I>
  static void run(uint4 mine, uint64_t b, Tuple all, std::index_sequence<I...>) {
    const Given<uint4> given(mine);
    const auto a = [=](int row, int k) {
      const uint4& x = given.of[row % 8 * 4 + k % 8 / 2];
      const uint32_t word = row < 8 ? (k < 8 ? x.x : x.z) : (k < 8 ? x.y : x.w);
      return k % 2 ? Type::high(word) : Type::low(word);
    };
    const std::vector<float*> d = {&std::get<I>(all)...};
    const bool adds = std::get<sizeof...(I)>(all) == ScaleOut::One;
    begin_product(d, [=] { multiply<Type, kB>(a, b, d, adds); });
  }
};
}  // namespace SM90::GMMA
}  // namespace cute
"""
CALL = r"""
alignas(64) static uint8_t host_params[sizeof(jitattn::KernelParams)];
using Kernel = void(jitattn::KernelParams);
static Kernel* kernel;
static void run_lane() {
  kernel(*reinterpret_cast<const jitattn::KernelParams*>(host_params));
  current->is_done = true;
  yield();
}
extern "C" int64_t params_size() { return sizeof host_params; }
static void begin_cta(int num_threads) {
  std::memset(host_smem, 0xff, sizeof host_smem);
  std::memset(jitattn::writers, 0, sizeof jitattn::writers);
  jitattn::phases.clear();
  boxes.clear();
  cta_barrier = {};
  for (Barrier& barrier : warp_barriers) barrier = {};
  for (Barrier& barrier : jitattn::named_barriers) barrier = {};
  for (int i = 0; i < num_threads; ++i) {
    Lane& one = lanes[i];
    std::vector<char> stack = std::move(one.stack);
    one = {};
    one.index.x = i;
    one.stack = std::move(stack);
    one.stack.resize(256 * 1024);
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = one.stack.data();
    one.context.uc_stack.ss_size = one.stack.size();
    one.context.uc_link = nullptr;
    makecontext(&one.context, run_lane, 0);
  }
}
// Lanes of a warp that can go on do so; says whether any could.
static bool run_warp(int warp) {
  bool is_running = false;
  const int first = seed ? draw(32) : 0;
  for (int i = 0; i < 32; ++i) {
    Lane& one = lanes[warp * 32 + (first + i) % 32];
    if (one.is_done || one.seen == events) continue;
    is_running = true;
    current = &one;
    resume();
    if (one.is_done) ++events;
  }
  return is_running;
}
static void run_cta(int num_warps) {
  std::vector<int> rates(num_warps, 1);
  int num_idle = 0;
  for (uint64_t round = 0; !fault; ++round) {
    if (seed && round % 512 == 0) {
      // A warp goes on in one of so many rounds; those of a warpgroup alike.
      for (int w = 0; w < num_warps; ++w) rates[w] = w % 4 ? rates[w - w % 4] : 1 << draw(8);
    }
    bool is_running = false;
    const int first = seed ? draw(num_warps) : 0;
    for (int i = 0; i < num_warps; ++i) {
      const int w = (first + i) % num_warps;
      if (rates[w] > 1 && draw(rates[w])) continue;
      is_running |= run_warp(w);
    }
    if (!boxes.empty() && draw(8) == 0) {
      std::swap(boxes[draw(boxes.size())], boxes.back());
      boxes.back()();
      boxes.pop_back();
      is_running = true;
    }
    num_idle = is_running ? 0 : num_idle + 1;
    if (num_idle < (seed ? 4096 : 1)) continue;
    for (const Lane& one : lanes) {
      if (!one.is_done) fault = "a wait has no end";
    }
    return;
  }
}
extern "C" const char* call(Kernel* function, const void* params, int grid, int num_threads,
                            uint32_t random) {
  kernel = function, seed = random, fault = nullptr;
  std::memcpy(host_params, params, sizeof host_params);
  gridDim.x = grid;
  lanes = std::vector<Lane>(num_threads);
  for (blockIdx.x = 0; blockIdx.x < grid && !fault; ++blockIdx.x) {
    begin_cta(num_threads);
    run_cta(num_threads / 32);
  }
  return fault;
}
"""


def arch_of(arch: str) -> str:
    """The architecture that sources ask for, as ``prelude.cuh`` has it."""
    major, minor = ARCHITECTURES[arch]
    return f"namespace jitattn {{ constexpr int kArch = {100 * major + 10 * minor}; }}"


def with_parts(source: str, included: set[str]) -> str:
    """Replace includes of parts by their text, each once, for they read what the kernel defines."""

    def text_of(match: re.Match[str]) -> str:
        name = match[1]
        if name in included or name.endswith("kernel.cuh"):
            return ""
        included.add(name)
        return with_parts((TEMPLATES / "include" / name).read_text(), included)

    return re.sub(r"#include \"(jitattn/(?:attention|mla)/\w+\.cuh)\"\n", text_of, source)


@functools.cache
def compiled(spec: AttentionSpec, arch: str) -> ctypes.CDLL:
    """The kernel of ``spec`` as a function of the host."""
    headers = [(TEMPLATES / f"include/jitattn/{name}.cuh").read_text() for name in REAL_HEADERS]
    source = with_parts(render(spec, arch), set())
    source = re.sub(r"extern __shared__ __align__\(\d+\) uint8_t smem\[\];", SMEM, source)
    for name in dict.fromkeys(re.findall(r"MMA_64x\w+", source)):
        kind = "SharedByShared" if name.endswith("SS") else "RegistersByShared"
        number = "jitattn::BFloat16" if "BF16" in name else "jitattn::Half"
        source = re.sub(rf"\b{name}<", f"{kind}<{number}, ", source)
    source = re.sub(r'asm\("mov\.b64[^;]*;"[^;]*;', JOIN, source)
    text = "\n".join((arch_of(arch), *headers, WARPGROUPS, source, CALL))
    text = re.sub(r"#include [\"<](?=jitattn|cut)|#pragma|#line", r"// \g<0>", text)
    return library_of(text, begin=HOST)


SMEM = "uint8_t* smem = host_smem;"
JOIN = "words = uint64_t(kSwizzle128 | kStep / 16) << 32 | (low + bytes / 16);"


@functools.cache
def schedule_on_host() -> EmulatedSchedule:
    """The schedule kernel as a function of the host."""
    return compile_schedule(1)


class EmulatedCuda:
    """A CUDA backend whose kernels run on the CPU, of an architecture."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, arch: str, seed: int = 0, num_sms: int = 4
    ) -> None:
        """Put it in the place of the driver; launches are random by a seed."""
        self.arch = arch
        self.seed = seed
        self.fake = launch_recorder.install(monkeypatch)
        self.specs: dict[str, AttentionSpec] = {}
        self.ran: list[str] = []
        self.grids: list[tuple[str, int]] = []
        facts = DeviceFacts(0, "card", ARCHITECTURES[arch], num_sms, max_smem_bytes=232448)
        monkeypatch.setattr(cuda_kernels, "device_facts", lambda index: facts)
        monkeypatch.setattr(driver, "_launch_function", lambda: self.launch)

    def planner(self, **arguments: object) -> jitattn.AttentionPlanner:
        """A planner for tensors on the CPU."""
        planner = self.fake.planner(**arguments)
        self._know(planner)
        return planner

    def mla_planner(self, **arguments: object) -> jitattn.MLAPlanner:
        """The same of multi-head latent attention."""
        planner = jitattn.MLAPlanner(**arguments, device="cpu")  # type: ignore[arg-type]
        planner.kernels = MLAKernels(planner.config, torch.device("cuda", 0))
        planner.kernels.device, planner.backend = launch_recorder.CPU, "cuda"
        self._know(planner)
        return planner

    def _know(self, planner: jitattn.AttentionPlanner | jitattn.MLAPlanner) -> None:
        config, others = planner.config, planner.kernels.traits.params
        self.params = kernel_params(Layout(config.page_table), config.variant, others)
        for spec in planner.kernels.specs:
            if isinstance(spec, AttentionSpec):
                self.specs[spec.symbol] = spec

    def launch(self, config: object, kernel: FakeKernel, pointer: object, extra: None) -> int:
        """Stand for ``cuLaunchKernelEx``."""
        assert extra is None
        at = pointer._obj.value  # type: ignore[attr-defined]
        if kernel.symbol.startswith("jitattn_schedule"):
            schedule_on_host()(ScheduleParams.from_address(at))
            return 0
        shape = config._obj  # type: ignore[attr-defined]
        spec = self.specs[kernel.symbol.removesuffix("_merge")]
        if kernel.symbol == spec.symbol:
            assert shape.block_x == spec.tile(self.arch).num_threads
            self.ran.append(kernel.symbol)
        library = compiled(spec, self.arch)
        assert library.params_size() == ctypes.sizeof(self.params)
        function = ctypes.cast(library[kernel.symbol], ctypes.c_void_p)
        if self.seed:
            self.seed += 1
        random = self.seed * 0x9E3779B1 & 0xFFFFFFFF
        self.grids.append((kernel.symbol, shape.grid_x))
        library.call.restype = ctypes.c_char_p
        shape = shape.grid_x, shape.block_x
        fault = library.call(function, ctypes.c_void_p(at), *shape, ctypes.c_uint32(random))
        assert fault is None, (kernel.symbol, fault.decode())
        return 0
