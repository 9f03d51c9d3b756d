// Page list of any page table layout, read at run time by the kernels of templates/pages. Kernels
// that are compiled for one layout have parts/page_table.cuh.jinja. Twin: jitattn/spec/params.py.
#pragma once

#include "jitattn/operands.cuh"
#include "jitattn/types.cuh"

namespace jitattn {

// A page and a place in it; `page` is -1 where the table has none.
struct PagePlace {
  int64_t page;
  int32_t place;
};

// Entries of a request: the first one, and how many; none where `count` is not positive.
struct PageRow {
  int64_t begin, count;
};

// The words of an entry, the low one alone of an int32, and the place in its page; what they say is
// asked for when it is needed, so that loads of several are under way together. -1 where there is none.
struct PageEntry {
  int32_t low, high, place;
};

struct PageList {
  const void* entries;    // [num_rows, num_entries], [num_rows, 2, num_entries], or [num_entries]
  const void* rows;       // [batch_size], int32 or int64: the row of each request; null: its own
  const int32_t* indptr;  // [batch_size + 1], where each request begins; null where it has a row
  int64_t row_stride;
  int64_t value_stride;  // from the ids for K to those for V; 0 where both have the same
  int64_t entry_stride;
  int64_t rows_stride;
  int64_t indptr_stride;
  int64_t num_rows;
  int64_t num_entries;  // of a row; with `indptr` of all
  Divisor page_size;
  int32_t entries_are_int64;
  int32_t rows_are_int64;
  int32_t are_slots;  // entries are page * page_size + place of every token, not pages

  // The entries of a request for K or V: none where it has no row. Nothing is read outside the table.
  __device__ __forceinline__ PageRow row(int32_t request, bool is_value) const {
    const int64_t begin = is_value ? value_stride : 0;
    if (indptr) {
      const int64_t first = indptr[request * indptr_stride];
      const int64_t end =
          min(num_entries, static_cast<int64_t>(indptr[(request + 1) * indptr_stride]));
      return {begin + first * entry_stride, first < 0 ? 0 : end - first};
    }
    const int64_t own = rows ? load_integer(rows, request * rows_stride, rows_are_int64) : request;
    if (own < 0 || own >= num_rows) return {begin, 0};
    return {begin + own * row_stride, num_entries};
  }

  // Entry `index` of a request for K or V; -1 where it has none.
  __device__ __forceinline__ int64_t entry(int32_t request, int64_t index, bool is_value) const {
    return number(load(row(request, is_value), index));
  }

  // The place of a token, from 0 to 2**31 - 1, in K or V. Of tables of int32.
  __device__ __forceinline__ PagePlace find(int32_t request, int32_t token, bool is_value) const {
    return place(load_for(row(request, is_value), token));
  }

  // The entry of a row that says the place of a token, and that place.
  __device__ __forceinline__ PageEntry load_for(const PageRow& own, int32_t token) const {
    const int32_t index = are_slots ? token : page_size.divide(token);
    PageEntry entry = load(own, index);
    entry.place = are_slots ? 0 : token - index * page_size;
    return entry;
  }
  __device__ __forceinline__ PagePlace place(const PageEntry& entry) const {
    const int64_t id = number(entry);
    if (id < 0) return {-1, 0};
    if (!are_slots) return {id, entry.place};
    const int32_t page = page_size.divide(static_cast<int32_t>(id));
    return {page, static_cast<int32_t>(id) - page * page_size};
  }

 private:
  __device__ __forceinline__ PageEntry load(const PageRow& own, int64_t index) const {
    PageEntry entry = {-1, -1, 0};
    if (index < own.count) {
      const int64_t at = own.begin + index * entry_stride;
      const auto* words = static_cast<const int32_t*>(entries) + (entries_are_int64 ? 2 * at : at);
      entry.low = words[0];
      if (entries_are_int64) entry.high = words[1];
    }
    return entry;
  }

  __device__ __forceinline__ int64_t number(const PageEntry& entry) const {
    if (!entries_are_int64) return entry.low;
    return static_cast<int64_t>(entry.high) << 32 | static_cast<uint32_t>(entry.low);
  }
};

}  // namespace jitattn
