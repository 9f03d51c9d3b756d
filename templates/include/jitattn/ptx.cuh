// One function per PTX instruction, on raw bits. Nothing here knows about attention.
#pragma once

#include "jitattn/prelude.cuh"

namespace jitattn {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Index of the CTA, and their number, read where they are needed and kept in no register until then.
__device__ __forceinline__ int32_t cta_idx_again() {
  int32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ int32_t grid_size_again() {
  int32_t count;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
  return count;
}

// Copies 16 bytes to shared memory, or writes zeros and reads nothing when `valid` is false. The L2
// cache fetches the aligned kFetchBytes around them, 128 or 256.
template <int kFetchBytes>
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  if constexpr (kFetchBytes == 256) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global),
                 "r"(bytes)
                 : "memory");
  }
}

// The same of 4 or 8 bytes.
template <int kBytes>
__device__ __forceinline__ void cp_async_few(uint32_t smem, const void* global, bool valid) {
  const int bytes = valid ? kBytes : 0;
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(smem), "l"(global),
               "n"(kBytes), "r"(bytes)
               : "memory");
}

// Likewise 4 or 16 bytes, of which nothing is read where `is_ignored`: zeros are written then. Fewer
// instructions than a number of bytes that is found at run time; the address still has to be aligned.
template <int kBytes>
__device__ __forceinline__ void cp_async_unless(uint32_t smem, const void* global,
                                                bool is_ignored) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %2, 0;"
        " cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;}" ::"r"(smem),
        "l"(global), "r"(static_cast<int>(is_ignored))
        : "memory");
  } else {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %2, 0;"
        " cp.async.ca.shared.global.L2::128B [%0], [%1], %3, p;}" ::"r"(smem),
        "l"(global), "r"(static_cast<int>(is_ignored)), "n"(kBytes)
        : "memory");
  }
}

// Lets the next kernel on the stream begin, where it was launched to begin early; it waits itself
// for this one's end before it reads or writes anything that others may write or read.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the previous kernel on the stream, whose writes are visible then.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's youngest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Asks for a cache line ahead of its first use.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global) : "memory");
}

// Likewise, into the cache that all SMs share: it may be written yet.
__device__ __forceinline__ void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// Has a warpgroup's threads give registers away until they have kCount, or wait until others gave them so
// many.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// A barrier of the hardware, of kThreads threads: waits for the others.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The same; returns whether any thread had `value`.
template <int kThreads>
__device__ __forceinline__ bool sync_threads_or(int barrier, bool value) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.aligned.pred q, %2, %3, p; "
      "selp.u32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "r"(barrier), "n"(kThreads)
      : "memory");
  return any != 0;
}

// Without a wait: the others need this thread's arrival only.
template <int kThreads>
__device__ __forceinline__ void arrive_threads(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Barriers in shared memory that count arrivals and bytes. A phase ends when both are complete.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Ends the use of a barrier that nothing is under way to.
__device__ __forceinline__ void mbarrier_inval(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes initialised barriers known to the hardware that copies TMA tiles.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and has the phase wait for so many bytes.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives: what this thread read or wrote before is done for who finds the phase over.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred is_over;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_over, [%0], %1;\n"
      "@!is_over bra wait;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Arrives when what this thread copies by cp_async has landed. Products read it after a fence of
// their own threads, which the copies need not wait for.
__device__ __forceinline__ void mbarrier_arrive_later(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Orders this thread's writes to shared memory, and those that it has waited for, before later
// copies of TMA tiles to it and products of it.
__device__ __forceinline__ void fence_before_tma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// True in one lane of the warp. The compiler knows that it is one, and TMA tiles need no loop over
// lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred is_elected;\n"
      "elect.sync _|is_elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, is_elected;\n"
      "}"
      : "=r"(is_elected));
  return is_elected;
}

// Asks for a tensor map ahead of its first use.
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the TMA tile of a tensor map that begins at these coordinates, and counts its bytes to
// `barrier`. What lies outside the tensor arrives as zeros.
__device__ __forceinline__ void copy_tma(uint32_t smem, const void* map, uint32_t barrier,
                                         int32_t token, int32_t segment, int32_t head, int32_t page,
                                         int32_t column = 0) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(smem),
      "l"(map), "r"(column), "r"(token), "r"(segment), "r"(head), "r"(page), "r"(barrier)
      : "memory");
}

// Asks for what copy_tma() loads, into the cache that all SMs share: it may be written yet. What is not
// in the tensor is not asked for.
__device__ __forceinline__ void prefetch_tma(const void* map, int32_t token, int32_t segment,
                                             int32_t head, int32_t page) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
               "r"(0), "r"(token), "r"(segment), "r"(head), "r"(page)
               : "memory");
}

// Loads 16 bytes, or zeros where they don't exist, straight to where they are needed: of a load
// under a condition the compiler would wait for the outcome.
__device__ __forceinline__ uint4 ld_global_16(const void* global, bool exists) {
  uint4 words;
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.s32 exists, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@exists ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
      : "l"(global), "r"(static_cast<int>(exists)));
  return words;
}

// Loads 16 or 8 bytes past the L1 cache: no other thread of the SM reads them.
__device__ __forceinline__ uint4 ld_past_l1_16(const void* global) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(global));
  return words;
}
__device__ __forceinline__ uint2 ld_past_l1_8(const void* global) {
  uint2 words;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(global));
  return words;
}

// Likewise four bytes.
__device__ __forceinline__ uint32_t ld_global_4(const void* global, bool exists) {
  uint32_t word;
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.s32 exists, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@exists ld.global.b32 %0, [%1];\n"
      "}"
      : "=&r"(word)
      : "l"(global), "r"(static_cast<int>(exists)));
  return word;
}

// Likewise eight bytes.
__device__ __forceinline__ uint2 ld_global_8(const void* global, bool exists) {
  uint2 words;
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.s32 exists, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@exists ld.global.v2.b32 {%0, %1}, [%2];\n"
      "}"
      : "=&r"(words.x), "=&r"(words.y)
      : "l"(global), "r"(static_cast<int>(exists)));
  return words;
}

// Eight 16-bit elements, wherever they lie.
__device__ __forceinline__ uint4 load_16(const uint16_t* source) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = source[2 * i] | uint32_t(source[2 * i + 1]) << 16;
  return {words[0], words[1], words[2], words[3]};
}

// Stores eight 16-bit elements, wherever they are to lie.
__device__ __forceinline__ void store_16(uint16_t* target, uint4 value) {
  const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    target[2 * i] = static_cast<uint16_t>(words[i]);
    target[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
  }
}

// Sixteen 8-bit elements, wherever they lie.
__device__ __forceinline__ uint4 load_16(const uint8_t* source) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 4] |= uint32_t(source[i]) << i % 4 * 8;
  return {words[0], words[1], words[2], words[3]};
}

// Eight bytes, wherever they lie.
__device__ __forceinline__ uint2 load_8(const void* source) {
  const uint8_t* bytes = static_cast<const uint8_t*>(source);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i / 4] |= uint32_t(bytes[i]) << i % 4 * 8;
  return {words[0], words[1]};
}

__device__ __forceinline__ void st_shared_byte(uint32_t smem, uint32_t value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_byte(uint32_t smem) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_shared_4(uint32_t smem) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
  return value;
}
__device__ __forceinline__ void st_shared_4(uint32_t smem, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_8(uint32_t smem, uint2 value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ __forceinline__ void st_shared_16(uint32_t smem, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// Two 8 x 8 matrices of 16-bit elements; lane l < 16 names row l % 8 of matrix l / 8.
__device__ __forceinline__ uint2 ldmatrix_x2(uint32_t smem) {
  uint2 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r.x), "=r"(r.y)
               : "r"(smem)
               : "memory");
  return r;
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ uint2 ldmatrix_x2_trans(uint32_t smem) {
  uint2 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r.x), "=r"(r.y)
               : "r"(smem)
               : "memory");
  return r;
}

// Four 8 x 8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ uint4 ldmatrix_x4(uint32_t smem) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(smem)
               : "memory");
  return r;
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ uint4 ldmatrix_x4_trans(uint32_t smem) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(smem)
               : "memory");
  return r;
}

__device__ __forceinline__ uint2 ld_shared_8(uint32_t smem) {
  uint2 r;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(smem) : "memory");
  return r;
}

__device__ __forceinline__ uint4 ld_shared_16(uint32_t smem) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(smem)
               : "memory");
  return r;
}

// Stores four 8 x 8 matrices of 16-bit elements, two of a row a lane; lane l names row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, uint4 value) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements that a warp holds, two a lane.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t fragment) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(fragment));
  return r;
}

// The sum over the lanes of a warp.
__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
  uint32_t sum;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
  return sum;
}

// Adds to a counter in global memory and returns what it was. What this thread, or those it has met
// at a barrier, wrote before is visible to who finds the addition; and what others had written
// before theirs is visible here.
__device__ __forceinline__ int32_t atomic_add_acq_rel(int32_t* counter, int32_t value) {
  int32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(value)
               : "memory");
  return old;
}

// Adds to a counter in global memory: what this thread, or those it has met at a barrier, wrote before
// is visible to who finds the addition.
__device__ __forceinline__ void add_release(int32_t* counter, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" : : "l"(counter), "r"(value) : "memory");
}

// Reads a counter in global memory: what was written before what it holds is visible here.
__device__ __forceinline__ int32_t load_acquire(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

__device__ __forceinline__ void sleep_ns(uint32_t time) {
  asm volatile("nanosleep.u32 %0;" : : "r"(time));
}

// Has a sum, which is never negative, before what follows: else the assembler may move a wait for
// warpgroup products before the work that is meant to run beside them. For whole warps, which stay
// together.
__device__ __forceinline__ void require_now(float sum) {
  asm volatile(
      "{\n"
      ".reg .pred is_negative, is_any;\n"
      "setp.lt.f32 is_negative, %0, 0f00000000;\n"
      "vote.sync.any.pred is_any, is_negative, 0xffffffff;\n"
      "@is_any trap;\n"
      "}" ::"f"(sum)
      : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of angles from -pi to pi, within 2**-20.
__device__ __forceinline__ float sin_approx(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float cos_approx(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one, or NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Two floats as 8-bit ones, to the nearest, saturated; NaN is 0x7f. `low` lands in the low byte. Of
// compute capability 8.9 and up.
__device__ __forceinline__ uint32_t cvt_e4m3x2(float low, float high) {
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
}
// Likewise four, the first in the lowest byte.
__device__ __forceinline__ uint32_t cvt_e4m3x4(float a, float b, float c, float d) {
  uint32_t bytes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}
__device__ __forceinline__ uint32_t cvt_e5m2x2(float low, float high) {
  uint16_t bytes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
}

}  // namespace jitattn
