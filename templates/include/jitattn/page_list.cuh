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

  // Entry `index` of a request for K or V; -1 where it has none. Nothing is read outside the table.
  __device__ __forceinline__ int64_t entry(int32_t request, int64_t index, bool is_value) const {
    int64_t begin = is_value ? value_stride : 0, end = num_entries;
    if (indptr) {
      const int64_t first = indptr[request * indptr_stride];
      end = min(end, static_cast<int64_t>(indptr[(request + 1) * indptr_stride])) - first;
      if (first < 0) return -1;
      begin += first * entry_stride;
    } else {
      const int64_t row =
          rows ? load_integer(rows, request * rows_stride, rows_are_int64) : request;
      if (row < 0 || row >= num_rows) return -1;
      begin += row * row_stride;
    }
    if (index >= end) return -1;
    return load_integer(entries, begin + index * entry_stride, entries_are_int64);
  }

  // The place of a token, from 0 to 2**31 - 1, in K or V. Of tables of int32.
  __device__ __forceinline__ PagePlace find(int32_t request, int32_t token, bool is_value) const {
    const int32_t index = page_size.divide(token);
    const int64_t id = entry(request, are_slots ? token : index, is_value);
    if (id < 0) return {-1, 0};
    if (!are_slots) return {id, token - index * page_size};
    const int32_t page = page_size.divide(static_cast<int32_t>(id));
    return {page, static_cast<int32_t>(id) - page * page_size};
  }
};

}  // namespace jitattn
