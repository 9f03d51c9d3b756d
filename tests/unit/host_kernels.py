"""The kernels that move tokens and pages, compiled for the CPU and launched by the real host code.

A CTA is so many threads of the host, each of them a warp of its own. Instructions that the host
hasn't are written anew here; the templates and the headers of their arithmetic are the real ones.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitattn import batches, gather, page_copies, tables
from jitattn.driver import Launch
from jitattn.render import TEMPLATES, environment
from jitattn.spec import GatherSpec, KernelSpec
from jitattn.tiling import CopyPagesTile, GatherTile, TableTile, Tile

MODULES = (batches, gather, page_copies, tables)
REAL_HEADERS = (
    *("operands", "request_rows", "page_list", "gather_params", "copy_params", "table_params"),
)
HOST = """
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
constexpr int kBlock = NUM_THREADS;
struct Index { int x = 0; };
thread_local Index threadIdx;
static Index blockIdx, gridDim;
struct Barrier {
  std::mutex mutex;
  std::condition_variable changed;
  int waiting = 0, phase = 0;
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const int entered = phase;
    if (++waiting == kBlock) {
      waiting = 0, ++phase;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return phase != entered; });
  }
};
static Barrier barrier;
inline void __syncthreads() { if (kBlock > 1) barrier.wait(); }
template <typename T> T __shfl_up_sync(unsigned, T value, int) { return value; }
template <typename T> T __shfl_xor_sync(unsigned, T value, int) { return value; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
using std::min;
using std::max;
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
namespace jitattn {
constexpr int kWarpSize = 1;
constexpr int32_t kInt32Max = 0x7fffffff;
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
inline int64_t load_integer(const void* base, int64_t element, bool is_int64) {
  return is_int64 ? static_cast<const int64_t*>(base)[element]
                  : static_cast<const int32_t*>(base)[element];
}
inline void split(uint32_t word, uint16_t& low, uint16_t& high) { low = word, high = word >> 16; }
template <typename A, typename B> constexpr bool kIsSame = false;
template <typename A> constexpr bool kIsSame<A, A> = true;
struct Half {
  using Storage = uint16_t;
  static float to_float(uint16_t bits) { _Float16 x; std::memcpy(&x, &bits, 2); return x; }
  static uint16_t from_float(float value) {
    const _Float16 x = value; uint16_t bits; std::memcpy(&bits, &x, 2); return bits;
  }
  static uint32_t pack(float low, float high) {
    return from_float(low) | uint32_t(from_float(high)) << 16;
  }
};
struct BFloat16 {
  using Storage = uint16_t;
  static float to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
  static uint16_t from_float(float value) {
    const uint32_t bits = __float_as_uint(value);
    return value == value ? bits + 0x7fff + (bits >> 16 & 1) >> 16 : 0x7fff;
  }
  static uint32_t pack(float low, float high) {
    return from_float(low) | uint32_t(from_float(high)) << 16;
  }
};
struct Float { using Storage = float; };
struct Int8 { using Storage = uint8_t; };
struct Float8E5M2 {
  using Storage = uint8_t;
  static uint2 to_halves(uint32_t b) { return {b << 8 & 0xff00ff00u, b & 0xff00ff00u}; }
};
struct Float8E4M3 {
  using Storage = uint8_t;
  static uint32_t half(uint32_t byte) {
    const uint32_t sign = (byte & 0x80) << 8;
    if ((byte & 0x7f) == 0x7f) return sign | 0x7fff;
    uint16_t bits = (byte & 0x7f) << 7;
    _Float16 x; std::memcpy(&x, &bits, 2);
    x *= _Float16(256); std::memcpy(&bits, &x, 2);
    return sign | bits;
  }
  static uint2 to_halves(uint32_t b) {
    return {half(b & 255) | half(b >> 16 & 255) << 16, half(b >> 8 & 255) | half(b >> 24) << 16};
  }
};
struct Float4E2M1 { using Storage = uint8_t; static constexpr int kBlockDims = 16; };
inline float e4m3_to_float(uint32_t b) { return Half::to_float(Float8E4M3::half(b)); }
inline float int8_to_float(uint32_t b) { return int8_t(b); }
inline float e2m1_to_float(uint32_t code) {
  static const float values[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -values[code & 7] : values[code & 7];
}
}  // namespace jitattn
"""
CALL = """
extern "C" void call(const jitattn::PARAMS* params, int grid) {
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    std::vector<std::thread> others;
    for (int i = 1; i < kBlock; ++i) {
      others.emplace_back([=] { threadIdx.x = i; SYMBOL(*params); });
    }
    SYMBOL(*params);
    for (std::thread& other : others) other.join();
  }
}
"""
PARAMS = {
    "gather": "GatherParams",
    "copy_pages": "CopyParams",
    "block_table": "BlockTableParams",
    "batch_info": "BatchInfoParams",
}


@functools.cache
def compiled(spec: KernelSpec, num_threads: int) -> ctypes.CDLL:
    """The kernel of ``spec`` as a function of the host."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run kernels on the CPU")
    folder = Path(tempfile.mkdtemp(prefix="jitattn-host-"))
    tile = host_tile(spec, num_threads)._asdict()
    source = environment().get_template(spec.template).render(spec.context() | tile)
    headers = [(TEMPLATES / f"include/jitattn/{name}.cuh").read_text() for name in REAL_HEADERS]
    call = CALL.replace("PARAMS", PARAMS[spec.family]).replace("SYMBOL", spec.symbol)
    text = "\n".join((HOST.replace("NUM_THREADS", str(num_threads)), *headers, source, call))
    text = re.sub(r"#include \"|#pragma|#line", r"// \g<0>", text)
    path, library = folder / "kernel.cpp", folder / "kernel.so"
    path.write_text(text)
    options = ["-std=c++17", "-O1", "-pthread", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
    done = subprocess.run(
        [compiler, *options, "-o", library, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def host_tile(spec: KernelSpec, num_threads: int) -> Tile:
    """A tile of few threads."""
    if isinstance(spec, GatherSpec):
        return GatherTile(num_threads=num_threads)
    if spec.family == "copy_pages":
        return CopyPagesTile(num_threads=num_threads, part_words=8 * num_threads)
    return TableTile(num_threads=num_threads)


class _Kernel:
    """Stands for a loaded kernel."""

    smem_bytes = 0
    begins_early = False

    def __init__(self, spec: KernelSpec, num_threads: int) -> None:
        self.library = compiled(spec, num_threads)


def use_host_kernels(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, counts: list[int] | None = None
) -> None:
    """Have the functions launch kernels on tensors of the CPU; ``counts`` gets their grids."""

    def launch_on(card: int, launch: Launch) -> None:
        assert card == 0
        grid, threads, _ = launch.shape
        assert threads == num_threads
        if counts is not None:
            counts.append(grid)
        launch.kernel.library.call(ctypes.byref(launch.params), grid)

    for module in MODULES:
        monkeypatch.setattr(module, "card_of", lambda device: 0)
        monkeypatch.setattr(module, "load", lambda spec, card: _Kernel(spec, num_threads))
        monkeypatch.setattr(module, "tile_of", lambda spec, card: host_tile(spec, num_threads))
        monkeypatch.setattr(module, "launch_on", launch_on)
        monkeypatch.setattr(module, "_recent", type(module._recent)())
    monkeypatch.setattr(page_copies._Copy, "_most_ctas", lambda self: 5)
    # The lanes of an entry are one warp, which is one thread here.
    make_fill = tables._Fill.__init__

    def make(self: tables._Fill, *arguments: object) -> None:
        make_fill(self, *arguments)
        lanes = 1 << self._params.lanes_log2
        self._params.lanes_log2 = 0
        if self._launch is not None:
            entries = arguments[0].batch_size * arguments[1].shape[1]
            assert (self._launch.shape[0] - 1) * num_threads < entries * lanes
            self._launch.shape = -(-entries // num_threads), num_threads, 0

    monkeypatch.setattr(tables._Fill, "__init__", make)


@pytest.fixture(params=[1, 5], ids=["one thread", "five threads"])
def host_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Launch kernels on the CPU, in CTAs of so many threads."""
    use_host_kernels(monkeypatch, request.param)
    yield request.param
