// Producer warpgroup of Q and of stages of tokens, in vectors of 16 bytes: of any page table, of lists
// and of caches of 8 bits. Each warp has eight tokens of a stage, and finds their addresses a stage
// ahead; eight lanes have a token's segment.
#pragma once

#include "jitattn/mla/narrow_kernel.cuh"

#include "jitattn/attention/work_items.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/stages.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

// Tokens of a stage that a lane copies vectors of: four apart, of the eight of its warp.
constexpr int kLaneTokens = 2;
// Whether the eight are in one page, hence in the place of the first and of those that follow it.
constexpr bool kHasOnePlace = PageTable::kContiguousTokens % 8 == 0;
constexpr int kLookups = kHasOnePlace ? 1 : kLaneTokens;

// The lane's first token of a stage, counted from the stage's.
__device__ __forceinline__ int first_token() {
  return (warp_idx() - kNumWarps) * 8 + lane_idx() / 8;
}

// Table entries of the lane's tokens; kNone where there is none.
struct TokenIds {
  int32_t latent[kLookups];
  int32_t k_pe[kLookups];

  // Of tokens `first` and four further, before `end`. A list says itself what it has.
  __device__ __forceinline__ void find(const KernelParams& params, PageTable::Row page_row,
                                       int32_t first, int32_t end) {
    for_each<kLookups>([&](int i) {
      const int32_t token = first + 4 * i;
      // Of a page the first of its eight, which exists where the others do.
      const int32_t asked = kHasOnePlace ? token & ~7 : token;
      latent[i] = k_pe[i] = kNone;
      if (asked >= end) return;
      latent[i] = params.pages.k_id(page_row, token);
      k_pe[i] = PageTable::kSharesPages ? latent[i] : params.pages.v_id(page_row, token);
    });
  }
  // Once, when entries are needed.
  __device__ __forceinline__ void check(const PageTable& pages) {
    if (!PageTable::kIsList) return;
    for_each<kLookups>([&](int i) { latent[i] = k_pe[i] = checked(pages, latent[i]); });
  }
};

// Sixteen bytes of a row to shared memory; zeros where there is no token: a NaN left in a slot that
// the request does not own must not meet a probability of zero.
template <typename Storage>
__device__ __forceinline__ void copy_vector(uint32_t smem, const Storage* source, bool exists) {
  if constexpr (kUseVectorLoads) {
    cp_async_16<128>(smem, source, exists);
  } else {
    uint4 words = {};
    // Rows that hold float32 scales begin at multiples of their size.
    if (exists && kNumScales > 0) {
      const auto* parts = reinterpret_cast<const uint32_t*>(source);
      words = {parts[0], parts[1], parts[2], parts[3]};
    } else if (exists) {
      words = load_16(source);
    }
    st_shared_16(smem, words);
  }
}

// What a lane copies of a stage.
struct LaneCopies {
  const KVType::Storage* latents[kLaneTokens];
  const KpeType::Storage* k_pes[kLaneTokens];
  const float* scales[kLaneTokens];
  Listed listed[kLaneTokens];

  // Of tokens `first` and four further, before `end`.
  __device__ __forceinline__ LaneCopies(const KernelParams& params, const TokenIds& ids,
                                        int32_t first, int32_t end) {
    const AttentionParams& attention = params.attention;
    const int lane = lane_idx() % 8;
    find(latents, static_cast<const KVType::Storage*>(attention.k) + lane * kElements<KVType>,
         ids.latent, first, attention.k_page_stride, attention.k_token_stride);
    find(k_pes, static_cast<const KpeType::Storage*>(attention.v) + lane * kElements<KpeType>,
         ids.k_pe, first, attention.v_page_stride, attention.v_token_stride);
    if constexpr (kNumScales > 0) {
      find(scales, params.mla.latent_scales + lane, ids.latent, first, params.mla.scale_page_stride,
           params.mla.scale_token_stride);
    }
    for_each<kLaneTokens>([&](int i) {
      const int32_t id = ids.latent[kHasOnePlace ? 0 : i];
      const bool exists = PageTable::kIsList ? id >= 0 : first + 4 * i < end;
      listed[i] = exists ? Listed::kIs : id == kOutside ? Listed::kIsOutside : Listed::kNot;
    });
  }

  // `place` is the lane's in the stage, `to_k_pe` its distance from that of k_pe.
  __device__ __forceinline__ void copy(uint32_t place, uint32_t to_k_pe,
                                       uint32_t scales_smem) const {
    constexpr int kKpeVectors = kKpeDim / kElements<KpeType>;
    const int lane = lane_idx() % 8;
    for_each<kLaneTokens>([&](int i) {
      const bool exists = listed[i] == Listed::kIs;
      // Four tokens further the swizzle changes halves of a segment.
      const uint32_t row = i == 0 ? place : (place ^ 64) + 4 * kSegmentBytes;
      for_each<kRowSegments>([&](int s) {
        copy_vector(row + s * 8 * kSegmentBytes, latents[i] + s * 8 * kElements<KVType>, exists);
      });
      if (lane < kKpeVectors) copy_vector(row + to_k_pe, k_pes[i], exists);
      // float32 scales lie at multiples of their size.
      if (lane < kNumScales) {
        cp_async_few<4>(scales_smem + i * 4 * kScaleBytes, scales[i], exists);
      }
    });
  }

 private:
  // Of 16 bytes.
  template <typename Type>
  static constexpr int kElements = 16 / sizeof(typename Type::Storage);

  // Where rows lie; without a token the pool's begin: an address all the same, of which nothing is
  // read.
  template <typename Storage>
  static __device__ __forceinline__ void find(const Storage* (&rows)[kLaneTokens],
                                              const Storage* base, const int32_t (&ids)[kLookups],
                                              int32_t first, int64_t page_stride,
                                              int64_t token_stride) {
    for_each<kLookups>([&](int i) {
      const Location at = PageTable::locate(ids[i], first + 4 * i);
      const int64_t offset = at.page * page_stride + at.token * token_stride;
      rows[i] = base + (ids[i] < 0 ? 0 : offset);
    });
    if constexpr (kHasOnePlace) rows[1] = rows[0] + 4 * token_stride;
  }
};

// Arrives for this warp: of each lane when its copies have landed, and for what it wrote without one.
__device__ __forceinline__ void arrive_with_copies(uint32_t barrier) {
  mbarrier_arrive_later(barrier);
  __syncwarp();
  if (lane_idx() == 0) mbarrier_arrive(barrier);
}

// Loads the tokens of a work item.
__device__ __forceinline__ void load_item(const KernelParams& params, Shared& shared,
                                          const WorkItem& item, uint32_t smem, Ring& ring) {
  const PageTable::Row page_row = params.pages.row(item.query_tile.request);
  const int32_t end = item.end * kTileStages, own = first_token();
  // A list has what its entries say, in any tile.
  const int32_t end_token = PageTable::kIsList ? end * kRingTokens : item.request.kv_len;
  const uint32_t place = smem + latent_place(0, own, lane_idx() % 8);
  const uint32_t to_k_pe =
      k_pe_place(0, own, lane_idx() % 8) - latent_place(0, own, lane_idx() % 8);
  const uint32_t scales_smem = smem + scales_place(0, own) + lane_idx() % 8 * 4;
  int32_t stage = item.begin * kTileStages;
  TokenIds ids;
  ids.find(params, page_row, stage * kRingTokens + own, end_token);
#pragma unroll 1
  for (; stage < end; ++stage) {
    const int32_t first = stage * kRingTokens + own;
    ids.check(params.pages);
    const LaneCopies copies(params, ids, first, end_token);
    // Before they are needed; beyond the last stage is what the next CTA has, or nothing.
    ids.find(params, page_row, first + kRingTokens, end_token);
    mbarrier_wait(shared.empty(ring.stage), ring.parity);
    if constexpr (PageTable::kIsList) {
      if (lane_idx() % 8 == 0) {
        for_each<kLaneTokens>([&](int i) {
          shared.listed[ring.stage][own + 4 * i] = static_cast<uint8_t>(copies.listed[i]);
        });
      }
    }
    const uint32_t offset = ring.stage * kRingStageBytes;
    copies.copy(place + offset, to_k_pe, scales_smem + offset);
    arrive_with_copies(shared.full(ring.stage));
    ring.next(kNumStages);
    if (item.is_first && stage + 1 == item.begin * kTileStages + kEarlyStages) {
      wait_for_first_query<kTokenThreads>();
      mbarrier_wait(shared.full(0), 0);  // as where TMA loads
    }
  }
}

// Finds the work items, and loads their Q and tokens; then writes the rows of empty ones.
__device__ __forceinline__ void produce(const KernelParams& params, Shared& shared, uint32_t smem) {
  const int thread = threadIdx.x - kNumThreads;
  prefetch_schedule(params.attention.schedule, thread);
  WorkItemIterator source(params);
  Ring ring = {0, 1};  // stages are empty: the phases before their first are over
  uint32_t query_parity = 1;
  int32_t index = 0;
#pragma unroll 1
  while (true) {
    WorkItem& item = shared.work_items[index];
    if (thread == 0) shared.find_item(source, index);
    sync_threads<kProducerThreads>(kQueryBarrier);  // the work item is written
    const bool is_end = item.work == kNoWork;
    if (thread < kQueryThreads) {
      mbarrier_wait(shared.q_empty(), query_parity);
      if (!is_end) {
        copy_next_query(params, shared.work_items, index, smem + kStageQueryOffset);
      }
      arrive_with_copies(shared.q_full());
    }
    if (is_end) break;
    load_item(params, shared, item, smem, ring);
    query_parity ^= 1;
    index = (index + 1) % kNumWorkItems;
  }
  write_empty_tiles(params, thread / kWarpSize, kProducerThreads / kWarpSize);
}

}  // namespace jitattn
