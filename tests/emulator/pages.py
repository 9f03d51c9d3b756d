"""The kernels that move tokens and pages, compiled for the CPU and launched by the real host code.

A CTA has so many threads, each of them a warp of its own, which take turns: one runs until it waits
for the others. Instructions that the host hasn't are written anew here; the templates and the
headers of their arithmetic are the real ones.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import pytest

from jitattn.device.driver import Launch
from jitattn.jit.render import environment
from jitattn.kernels.common import device_kernels
from jitattn.kernels.pages import batch_info, block_table, copy_pages, gather
from jitattn.kernels.pages.spec import GatherSpec
from jitattn.kernels.pages.tile import CopyPagesTile, GatherTile, TableTile
from jitattn.spec.family import KernelSpec, Tile
from tests.emulator.cuda_runtime import (
    CONVERSIONS,
    PAIRS,
    QUALIFIERS,
    TYPES,
    WORDS,
    library_of,
    with_headers,
)

CACHES = [module.LAUNCHES for module in (batch_info, gather, copy_pages, block_table)]
HOST_HEADERS = ("prelude", "ptx", "types", "fp8")
HOST = f"""
#include <cstdlib>
#include <ucontext.h>
{QUALIFIERS}{WORDS}
extern const int kBlock;
constexpr int kMostThreads = 8;
struct Index {{ int x = 0; }};
static Index threadIdx, blockIdx, gridDim;
static ucontext_t host, places[kMostThreads];
inline void __syncthreads() {{ if (kBlock > 1) swapcontext(&places[threadIdx.x], &host); }}
template <typename T> T __shfl_up_sync(unsigned, T value, int) {{ return value; }}
template <typename T> T __shfl_xor_sync(unsigned, T value, int) {{ return value; }}
namespace jitattn {{
constexpr int kWarpSize = 1;
constexpr int32_t kInt32Max = 0x7fffffff;
inline void launch_dependents() {{}}
inline void wait_for_previous_kernel() {{}}
{PAIRS}{TYPES}{CONVERSIONS}
}}  // namespace jitattn
"""
# Turns go up and down, so that what a thread reads of one before it or behind it without a barrier
# is not there in one of two CTAs.
CALL = """
static const jitattn::PARAMS* given;
static bool has_ended[kMostThreads];
static void run_thread() {
  SYMBOL(*given);
  has_ended[threadIdx.x] = true;
}
static void run_cta() {
  static char stacks[kMostThreads][1 << 18];
  for (int i = 0; i < kBlock; ++i) {
    getcontext(&places[i]);
    places[i].uc_stack.ss_sp = stacks[i];
    places[i].uc_stack.ss_size = sizeof stacks[i];
    places[i].uc_link = &host;
    makecontext(&places[i], run_thread, 0);
    has_ended[i] = false;
  }
  int num_left = kBlock;
  for (int round = blockIdx.x; num_left > 0; ++round) {
    for (int n = 0; n < kBlock; ++n) {
      threadIdx.x = round % 2 == 0 ? n : kBlock - 1 - n;
      swapcontext(&host, &places[threadIdx.x]);
      num_left -= has_ended[threadIdx.x];
    }
    if (num_left > 0 && num_left < kBlock) std::abort();  // some wait for those that have ended
  }
}
extern "C" void call(const jitattn::PARAMS* params, int grid) {
  static_assert(kBlock <= kMostThreads);
  given = params;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_cta();
}
"""
PARAMS = {
    "gather": "GatherParams",
    "copy_pages": "CopyParams",
    "block_table": "BlockTableParams",
    "batch_info": "BatchInfoParams",
    "layer_tables": "LayerTablesParams",
}


@functools.cache
def compiled(spec: KernelSpec, num_threads: int) -> ctypes.CDLL:
    """The kernel of ``spec`` as a function of the host."""
    tile = emulated_tile(spec, num_threads)._asdict()
    source = environment().get_template(spec.template("sm_90a")).render(spec.context() | tile)
    call = CALL.replace("PARAMS", PARAMS[spec.kernel]).replace("SYMBOL", spec.symbol)
    text = f"const int kBlock = {num_threads};\n{with_headers(source, HOST_HEADERS)}{call}"
    return library_of(text, begin=HOST)


def emulated_tile(spec: KernelSpec, num_threads: int) -> Tile:
    """A tile of few threads."""
    if isinstance(spec, GatherSpec):
        return GatherTile(num_threads=num_threads)
    if spec.kernel == "copy_pages":
        return CopyPagesTile(num_threads=num_threads, part_words=8 * num_threads)
    return TableTile(num_threads=num_threads)


class _Kernel:
    """Stands for a loaded kernel."""

    smem_bytes = 0
    begins_early = False

    def __init__(self, spec: KernelSpec, num_threads: int) -> None:
        self.library = compiled(spec, num_threads)


def emulate_kernels(
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

    monkeypatch.setattr(device_kernels, "card_of", lambda device: 0)
    monkeypatch.setattr(device_kernels, "load", lambda spec, card: _Kernel(spec, num_threads))
    monkeypatch.setattr(
        device_kernels, "tile_of", lambda spec, card: emulated_tile(spec, num_threads)
    )
    monkeypatch.setattr(device_kernels, "launch_on", launch_on)
    monkeypatch.setattr(copy_pages, "max_ctas", lambda card, *, on_bus: 5)
    # The lanes of an entry are one warp, which is one thread here.
    monkeypatch.setattr(block_table, "lanes_log2", lambda page_size: 0)
    for cache in CACHES:
        cache.clear()


@pytest.fixture(params=[1, 5], ids=["one thread", "five threads"])
def emulated_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """Launch kernels on the CPU, in CTAs of so many threads."""
    emulate_kernels(monkeypatch, request.param)
    yield request.param
    for cache in CACHES:
        cache.clear()
