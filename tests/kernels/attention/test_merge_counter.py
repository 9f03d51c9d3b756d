"""The counter by which CTAs share a merge, with threads of the host as CTAs.

The CPU's model of a card runs CTAs one after the other, so that who comes last merges alone there.
"""

from __future__ import annotations

import ctypes
import re

import pytest

from jitattn.jit.render import TEMPLATES
from tests.emulator.cuda_runtime import QUALIFIERS, library_of

STAND_INS = """
#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>
using std::min;
struct Block { int32_t index = 0; };
struct AttentionParams { int32_t* counters; int32_t num_head_blocks = 1; };
struct QueryTile { int32_t first_slot, last_slot, num_splits; };
struct WorkItem {
  QueryTile query_tile;
  int32_t slot;
  Block block(const AttentionParams&) const { return {}; }
};
using Counter = std::atomic<int32_t>;
inline Counter& counter_at(const int32_t* place) {
  return *reinterpret_cast<Counter*>(const_cast<int32_t*>(place));
}
inline int32_t atomicAdd(int32_t* place, int32_t value) {
  return counter_at(place).fetch_add(value);
}
inline int32_t atomicCAS(int32_t* place, int32_t expected, int32_t value) {
  counter_at(place).compare_exchange_strong(expected, value);
  return expected;
}
inline void add_release(int32_t* place, int32_t value) { counter_at(place).fetch_add(value); }
inline int32_t atomic_add_acq_rel(int32_t* place, int32_t value) {
  return counter_at(place).fetch_add(value);
}
inline int32_t load_acquire(const int32_t* place) { return counter_at(place).load(); }
inline void sleep_ns(unsigned) { std::this_thread::yield(); }
"""
# Says how often a row is merged too often or not at all, and how many CTAs merged.
RUN = """
extern "C" int run(int num_ctas, int num_rows, int step, int seed, int late, int* num_merging) {
  alignas(64) int32_t word = 0;
  std::vector<std::atomic<int>> merged(num_rows);
  std::atomic<int> merging{0};
  std::vector<std::thread> ctas;
  for (int slot = 0; slot < num_ctas; ++slot) {
    ctas.emplace_back([&, slot] {
      std::minstd_rand random(seed * 1000 + slot + 1);
      const int delay = random() % 4 < unsigned(late) ? random() % 300 : 0;
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
      const WorkItem item = {{0, num_ctas - 1, num_ctas}, slot};
      const MergeCounter counter(AttentionParams{&word}, item);
      counter.publish(1);
      const RowRange rows = counter.take(item, num_rows, step);
      for (int row = rows.begin; row < rows.end; ++row) ++merged[row];
      merging += rows.begin < rows.end;
    });
  }
  for (std::thread& cta : ctas) cta.join();
  *num_merging = merging;
  int wrong = word != 0;
  for (const auto& count : merged) wrong += count != 1;
  return wrong;
}
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    header = (TEMPLATES / "include/jitattn/attention/merge_counter.cuh").read_text()
    text = "\n".join((QUALIFIERS, STAND_INS, header, "using namespace jitattn;", RUN))
    return library_of(re.sub(r"#include \"|#pragma", r"// \g<0>", text))


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("num_ctas", [2, 3, 13])
def test_each_row_is_merged_once(library: ctypes.CDLL, num_ctas: int, late: int) -> None:
    """Whoever leaves or comes late; and the counter is ready for the next launch."""
    num_merging = ctypes.c_int()
    for seed in range(60):
        num_rows = (128, 80, 5)[seed % 3]
        wrong = library.run(
            num_ctas, num_rows, (8, 1)[seed % 2], seed, late, ctypes.byref(num_merging)
        )
        assert wrong == 0, seed
        assert 1 <= num_merging.value <= num_ctas
