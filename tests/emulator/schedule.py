"""The schedule kernel, compiled for the CPU: a CTA is so many threads, each a warp of one lane."""

from __future__ import annotations

import ctypes
import re

import torch

from jitattn.jit.render import TEMPLATES
from jitattn.kernels.common.params import ListScheduleParams, Schedule, ScheduleParams
from tests.emulator.cuda_runtime import QUALIFIERS, THREADS, WORDS, library_of

# A thread is a warp. What else the template includes is of no device.
HOST = f"""
constexpr int kBlock = $(num_threads);
{QUALIFIERS}{WORDS}{THREADS}
inline void __threadfence() {{}}
constexpr struct {{ int x; }} blockIdx = {{0}};
inline int atomicAdd(int* place, int value) {{
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {{ return value; }}
inline int64_t __shfl_up_sync(unsigned, int64_t value, int) {{ return value; }}
namespace jitattn {{
constexpr int kWarpSize = 1;
constexpr int32_t kInt32Max = 0x7fffffff;
inline void wait_for_previous_kernel() {{}}
"""
CALL = """
extern "C" void call(const jitattn::Params* params) {
  jitattn::PlanParams<jitattn::Params> plan;
  plan.of[0] = *params;
  std::vector<std::thread> others;
  for (int i = 1; i < kBlock; ++i) {
    others.emplace_back([=, &plan] { threadIdx.x = i; schedule(plan); });
  }
  schedule(plan);
  for (std::thread& other : others) other.join();
}
"""

# What a kernel finds in each slot, in the words of work_tile.cuh.
WORK = """
namespace jitattn {
constexpr bool kHasWholeQueryTiles = true;
constexpr bool kUseCustomMask = false;
int32_t kTileTokens;
struct Divisor { int32_t divide(int32_t x) const { return x; } };
struct AttentionParams { Schedule schedule; Divisor num_head_blocks; int32_t early_kv, is_second; };
struct PageTable {
  static constexpr bool kIsList = false;
  bool holds(int32_t, int32_t) const { return true; }
};
struct KernelParams { AttentionParams attention; PageTable pages; };
"""
FIND = """
}
extern "C" int find(const jitattn::Schedule* schedule, int tile_tokens, int32_t (*found)[5]) {
  using namespace jitattn;
  kTileTokens = tile_tokens;
  const KernelParams params = {{*schedule}};
  int count = 0;
  for (int slot_index = 0; slot_index < schedule->header->num_slots; ++slot_index) {
    const SlotRange slot(params.attention, slot_index);
    for (int index = slot.begin.query_tile; index <= slot.last_query_tile; ++index) {
      const TileRange tiles(params, slot, index);
      if (tiles.is_skipped) continue;
      const int32_t part[5] = {slot_index, index, tiles.begin, tiles.end,
                               tiles.query_tile.num_splits};
      for (int i = 0; i < 5; ++i) found[count][i] = part[i];
      ++count;
    }
  }
  return count;
}
"""


class EmulatedSchedule:
    """The schedule kernel on the CPU, and what kernels find in a schedule."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, params: ScheduleParams | ListScheduleParams) -> None:
        """Schedule for one kernel of a plan."""
        self._library.call(ctypes.byref(params))

    def find(self, schedule: Schedule, tile_tokens: int, most: int) -> list[list[int]]:
        """Return slot, query tile, first tile, end and number of splits of each work tile."""
        found = torch.zeros(most, 5, dtype=torch.int32)
        pointer = ctypes.c_void_p(found.data_ptr())
        count = self._library.find(ctypes.byref(schedule), tile_tokens, pointer)
        assert count <= most
        return found[:count].tolist()


def compile_schedule(num_threads: int, *, has_lists: bool = False) -> EmulatedSchedule:
    source = (TEMPLATES / "attention/schedule.cu.jinja").read_text()
    types = (TEMPLATES / "include/jitattn/types.cuh").read_text()
    load_integer = types[types.index("__device__ __forceinline__ int64_t load_integer") :]
    headers = [
        (TEMPLATES / f"include/jitattn/{name}.cuh").read_text()
        for name in ("schedule", "schedule_params")
    ]
    work = (TEMPLATES / "include/jitattn/attention/work_tile.cuh").read_text()
    ranges = work[work.index("struct SlotRange") : work.index("struct QueryRows")]
    parts = (HOST, load_integer, *headers, source, CALL, WORK, ranges, FIND)
    text = "\n".join(re.sub(r"#include \"|#pragma", r"// \g<0>", part) for part in parts)
    text = text.replace("$(num_threads)", str(num_threads)).replace("$(symbol)", "schedule")
    text = text.replace("$(has_lists | int)", str(int(has_lists)))
    return EmulatedSchedule(library_of(text))
