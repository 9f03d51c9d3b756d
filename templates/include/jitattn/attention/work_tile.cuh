// Coordinates of a work tile: slot, query tiles, KV tiles and query rows.
#pragma once

#include "jitattn/fp8.cuh"
#include "jitattn/kernel.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// A copy of a number that the compiler can't trace to it: what is computed from the copy need not
// stay in registers across a long loop.
__device__ __forceinline__ int32_t forget(int32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
// The same of an address.
template <typename T>
__device__ __forceinline__ T* forget(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Waits for what came before the run. The second of its kernels doesn't: the first launched it after
// a wait of its own.
__device__ __forceinline__ void wait_for_inputs(const AttentionParams& params) {
  if (!params.is_second) wait_for_previous_kernel();
}

// The heads of one CTA: a block of query rows of a KV head, and a block of the columns of V.
struct HeadBlock {
  int32_t index;
  int32_t kv_head;
  int32_t row_block;
  int32_t value_block;

  __device__ __forceinline__ HeadBlock(const AttentionParams& params, int32_t work) {
    index = work - params.num_head_blocks.divide(work) * params.num_head_blocks;
    const int32_t row_index = index / kNumValueBlocks;
    value_block = index % kNumValueBlocks;
    kv_head = params.num_row_blocks.divide(row_index);
    row_block = row_index - kv_head * params.num_row_blocks;
  }
};

// The range of tiles that this CTA's slot covers. A kernel that includes this defines
// kHasWholeQueryTiles: whether its schedule's slots may be whole query tiles.
struct SlotRange {
  int32_t slot;
  SlotBoundary begin;
  SlotBoundary end;
  int32_t last_query_tile;

  __device__ __forceinline__ SlotRange(const AttentionParams& params, int32_t work) {
    slot = params.num_head_blocks.divide(work);
    if constexpr (kHasWholeQueryTiles) {
      if (params.schedule.header->is_whole()) {
        begin = {slot, -1};  // before its first tile, whichever that is
        end = {slot + 1, 0};
        last_query_tile = slot;
        return;
      }
    }
    begin = params.schedule.boundaries[slot];
    end = params.schedule.boundaries[slot + 1];
    last_query_tile = min(end.query_tile, params.schedule.header->num_query_tiles - 1);
  }
};

// Whether splits may be fixed: a batch-invariant planner launches no other kernels. Rows of a list
// have splits of one length in any case, since all see what is listed, and so have rows with a mask.
constexpr bool kMayFixSplits = kHasWholeQueryTiles || PageTable::kIsList;
constexpr bool kMayEndClasses = kHasWholeQueryTiles && !PageTable::kIsList && !kUseCustomMask;

// Split of a query tile whose first tile is `first`, at `tile` in slot `slot`; and the end of that
// split if it ends before `end`.
__device__ __forceinline__ int32_t split_of(const QueryTile& query_tile, int32_t slot,
                                            int32_t first, int32_t tile) {
  if (kMayFixSplits && query_tile.has_fixed_splits()) {
    const int32_t size = query_tile.split_tiles();
    return tile / size - first / size;
  }
  return slot - query_tile.first_slot;
}
__device__ __forceinline__ int32_t end_of_split(const QueryTile& query_tile, int32_t tile,
                                                int32_t end) {
  if (!kMayFixSplits || !query_tile.has_fixed_splits()) return end;
  const int32_t size = query_tile.split_tiles();
  return min((tile / size + 1) * size, end);
}

// The tiles of one query tile that lie in a slot.
struct TileRange {
  QueryTile query_tile;
  int32_t first;  // first tile of the query tile
  int32_t begin;  // no tiles of a query tile that sees no token
  int32_t end;
  bool is_skipped;    // no KV tile in this slot, and another slot writes the rows
  int32_t early_end;  // tokens from here on belong to this step

  __device__ __forceinline__ TileRange(const KernelParams& params, const SlotRange& slot,
                                       int32_t index) {
    const Schedule& schedule = params.attention.schedule;
    query_tile = schedule.query_tiles[index];
    const Request request = schedule.requests[query_tile.request];
    const int32_t kv_len = PageTable::kIsList ? query_tile.kv_end : request.kv_len;
    if (query_tile.kv_end > 0 && !params.pages.holds(query_tile.request, kv_len)) {
      query_tile.kv_end = kInvalidLength;
    }
    // Reads after the wait for the previous kernel, or without one, need no limit.
    const bool is_early = params.attention.early_kv && !params.attention.is_second;
    early_end = is_early ? request.kv_len - request.q_len : kInt32Max;
    const bool is_empty = query_tile.kv_end <= 0;
    if (is_empty) query_tile.num_splits = 1;
    const bool is_begun = index == slot.begin.query_tile, is_cut = index == slot.end.query_tile;
    first = query_tile.kv_begin / kTileTokens;
    begin = is_begun ? slot.begin.tile : first;
    if constexpr (kHasWholeQueryTiles) begin = max(begin, first);
    end = is_cut ? slot.end.tile : (query_tile.kv_end + kTileTokens - 1) / kTileTokens;
    is_skipped = is_empty ? is_cut : begin >= end;
    if (is_empty) end = begin;
  }

  // Split that begins at `tile`, and its end in this slot.
  __device__ __forceinline__ int32_t split(const SlotRange& slot, int32_t tile) const {
    return split_of(query_tile, slot.slot, first, tile);
  }
  __device__ __forceinline__ int32_t split_end(int32_t tile) const {
    return end_of_split(query_tile, tile, end);
  }
  // Where a merge of `count` splits at a time begins, so that it takes the same together in all
  // query tiles of a request, whatever a window hides.
  __device__ __forceinline__ int32_t first_merged(int32_t count) const {
    return query_tile.has_fixed_splits() ? -(first / query_tile.split_tiles() % count) : 0;
  }
};

// The query rows of a query tile that this CTA has: packed row r of a request is query token
// r / group_size, and head r % group_size of the KV head's group.
struct QueryRows {
  const AttentionParams& params;
  Request request;
  int32_t request_index;
  int32_t first_row;
  int32_t row_end;  // of the request
  int32_t num_rows;
  int32_t kv_head;
  int32_t first_head;
  int32_t offset;  // position of query token 0

  __device__ __forceinline__ QueryRows(const AttentionParams& params, const HeadBlock& block,
                                       const QueryTile& query_tile)
      : QueryRows(params, block, query_tile, params.schedule.requests[query_tile.request]) {}

  __device__ __forceinline__ QueryRows(const AttentionParams& params, const HeadBlock& block,
                                       const QueryTile& query_tile, const Request& request)
      : params(params), request(request) {
    request_index = query_tile.request;
    first_row = query_tile.first_row + block.row_block * kRowTile;
    kv_head = block.kv_head;
    first_head = kv_head * params.group_size;
    offset = request.kv_len - request.q_len;
    // Rows that q doesn't have are neither read nor written.
    row_end = min(request.q_len, params.num_tokens - request.q_begin) * params.group_size;
    num_rows = max(min(most_rows(query_tile), row_end - first_row), 0);
  }

  // Rows that a query tile may have at most.
  static __device__ __forceinline__ int32_t most_rows(const QueryTile& query_tile) {
    return kMayEndClasses && query_tile.has_fixed_splits() ? query_tile.most_rows() : kRowTile;
  }

  // Moves on to later rows of the request; false when there are none.
  __device__ __forceinline__ bool advance(int32_t count) {
    first_row += count;
    num_rows = min(kRowTile, row_end - first_row);
    return num_rows > 0;
  }

  __device__ __forceinline__ int32_t query(int row) const {
    return params.group_size.divide(first_row + row);
  }
  __device__ __forceinline__ int32_t token(int row) const { return request.q_begin + query(row); }
  __device__ __forceinline__ int32_t head(int row) const {
    return first_head + first_row + row - query(row) * params.group_size;
  }

  // The keys that a row sees, but for a custom mask: [first_key, last_key).
  __device__ __forceinline__ int32_t first_key(int row) const {
    return params.window_left >= 0 ? max(offset + query(row) - params.window_left, 0) : 0;
  }
  __device__ __forceinline__ int32_t last_key(int row) const {
    return params.is_causal ? min(offset + query(row) + 1, request.kv_len) : request.kv_len;
  }
  // The keys that every row sees.
  __device__ __forceinline__ int32_t first_common_key() const { return first_key(num_rows - 1); }
  __device__ __forceinline__ int32_t last_common_key() const { return last_key(0); }

  __device__ __forceinline__ bool is_masked(int row, int32_t key) const {
    if constexpr (!kUseCustomMask) return false;
    if (row >= num_rows) return false;
    if (params.mask_kind == MaskKind::kRagged) {
      const int64_t byte = params.mask_indptr[request_index * params.mask_indptr_stride] +
                           query(row) * static_cast<int64_t>((request.kv_len + 7) / 8) + key / 8;
      // Keys beyond the mask are masked.
      if (byte < 0 || byte >= params.mask_bytes) return true;
      return !(params.mask[byte] >> key % 8 & 1);
    }
    // The mask's last column is the request's last key; keys before its first are not masked.
    const int32_t column = key - request.kv_len + params.mask_width;
    if (column < 0) return false;
    const uint8_t* values = params.mask + token(row) * params.mask_row_stride;
    if (params.mask_kind == MaskKind::kBool) return !values[column];
    return !(values[column / 8] >> column % 8 & 1);
  }

  // Whether a row sees a key.
  __device__ __forceinline__ bool sees(int row, int32_t key) const {
    return key >= first_key(row) && key < last_key(row) && !is_masked(row, key);
  }
};

// Work item as two indices, from which its coordinates are recomputed where they are needed, so
// that few registers are live.
struct WorkItemRef {
  const KernelParams& params;
  int32_t work;
  int32_t index;  // of the query tile

  __device__ __forceinline__ HeadBlock block() const {
    return HeadBlock(params.attention, forget(work));
  }
  __device__ __forceinline__ SlotRange slot() const {
    return SlotRange(params.attention, forget(work));
  }
  __device__ __forceinline__ TileRange tiles() const {
    return TileRange(params, slot(), forget(index));
  }
  __device__ __forceinline__ QueryRows rows() const {
    return QueryRows(params.attention, block(), tiles().query_tile);
  }
};

// Eight queries of 8 bits times their scale.
__device__ __forceinline__ uint4 scaled_eight(uint2 bytes, float scale) {
  const auto times = [&](uint32_t pair) {
    uint16_t low, high;
    split(pair, low, high);
    return Half::pack(Half::to_float(low) * scale, Half::to_float(high) * scale);
  };
  const uint2 first = Float8E4M3::to_pairs(bytes.x), last = Float8E4M3::to_pairs(bytes.y);
  return {times(first.x), times(first.y), times(last.x), times(last.y)};
}

// Q of the rows in shared memory, zeros past the last row and dim. The caller synchronises. Where K
// has 8 bits, the even ones of each 16 dims come first, since load_keys() loads those of K in that
// order; where it has 4, dims i and i + 4 of each eight are neighbours, for load_key_blocks().
template <typename Params>
__device__ __forceinline__ void load_query(const Params& all, const QueryRows& rows,
                                           uint32_t q_smem) {
  constexpr int kVectors = 2 * kKeyTiles;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRowTile * kVectors; i += kNumThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    uint4 words = {};
    const bool exists = row < rows.num_rows && (!kHasBlocks || vector < kKeyDim / 8);
    if (exists) {
      const AttentionParams& params = rows.params;
      const int64_t element = rows.token(row) * params.q_token_stride +
                              rows.head(row) * params.q_head_stride + vector * 8;
      if constexpr (kHasFP8Queries) {
        const uint8_t* source = reinterpret_cast<const uint8_t*>(params.q) + element;
        const uint2 bytes =
            params.q_is_aligned ? *reinterpret_cast<const uint2*>(source) : load_8(source);
        words = scaled_eight(bytes, all.queries.of(rows.token(row), rows.head(row)));
      } else {
        const uint16_t* source = params.q + element;
        words = params.q_is_aligned ? *reinterpret_cast<const uint4*>(source) : load_16(source);
      }
    }
    const uint32_t place = q_smem + row * kQueryRowBytes;
    if constexpr (kHasBlocks) {
      // Elements i and i + 4 of a vector are neighbours, two of these pairs in each product.
      const uint32_t lane = place + vector / 4 * 64 + vector % 4 * 4;
      st_shared_4(lane, __byte_perm(words.x, words.z, 0x5410));
      st_shared_4(lane + 16, __byte_perm(words.x, words.z, 0x7632));
      st_shared_4(lane + 32, __byte_perm(words.y, words.w, 0x5410));
      st_shared_4(lane + 48, __byte_perm(words.y, words.w, 0x7632));
    } else if constexpr (kDequantises) {
      const uint32_t half = place + vector / 2 * 32 + vector % 2 * 8;
      st_shared_8(half,
                  {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.z, words.w, 0x5410)});
      st_shared_8(half + 16,
                  {__byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632)});
    } else {
      st_shared_16(place + vector * 16, words);
    }
  }
}

}  // namespace jitattn
