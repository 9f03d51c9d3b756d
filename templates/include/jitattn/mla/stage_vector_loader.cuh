// Producer warpgroup of Q and of stages of tokens, in vectors of 16 bytes: of any page table, of lists
// and of caches of 8 bits. Each warp has eight tokens of a stage, and finds their addresses a stage
// ahead; eight lanes have a token's segment.
#pragma once

#include "jitattn/mla/kernel.cuh"

#include "jitattn/attention/work_items.cuh"
#include "jitattn/lanes.cuh"
#include "jitattn/mla/query_loader.cuh"
#include "jitattn/mla/stages.cuh"
#include "jitattn/ptx.cuh"

namespace jitattn {

constexpr int kLaneRows = 2;  // tokens of a stage that a lane copies vectors of

__device__ __forceinline__ int stage_row(int i) {
  return (warp_idx() - kNumWarps) * 8 + i * 4 + lane_idx() / 8;
}

// Table entries of a token; kNone where there is none.
struct TokenIds {
  int32_t token;
  int32_t latent_id;
  int32_t k_pe_id;

  // `stage` counts those of the request, of which the work item has some before `end`.
  __device__ __forceinline__ void find(const KernelParams& params, PageTable::Row page_row,
                                       const WorkItem& item, int32_t stage, int32_t end, int row) {
    token = stage * kRingTokens + row;
    latent_id = k_pe_id = kNone;
    if (stage >= end) return;
    // A list says itself what it has.
    if (!PageTable::kIsList && (token < item.query_tile.kv_begin || token >= item.request.kv_len))
      return;
    latent_id = params.pages.k_id(page_row, token);
    k_pe_id = PageTable::kSharesPages ? latent_id : params.pages.v_id(page_row, token);
  }

  __device__ __forceinline__ bool exists() const { return latent_id >= 0; }
  __device__ __forceinline__ Listed listed() const {
    return exists() ? Listed::kIs : latent_id == kOutside ? Listed::kIsOutside : Listed::kNot;
  }

  __device__ __forceinline__ const KVType::Storage* latent(const AttentionParams& params) const {
    return place(static_cast<const KVType::Storage*>(params.k), latent_id, params.k_page_stride,
                 params.k_token_stride);
  }
  __device__ __forceinline__ const KpeType::Storage* k_pe(const AttentionParams& params) const {
    return place(static_cast<const KpeType::Storage*>(params.v), k_pe_id, params.v_page_stride,
                 params.v_token_stride);
  }
  __device__ __forceinline__ const float* scales(const MLAParams& params) const {
    return place(params.latent_scales, latent_id, params.scale_page_stride,
                 params.scale_token_stride);
  }

 private:
  // Without a token the first of the pool: an address all the same, of which nothing is read.
  template <typename Storage>
  __device__ __forceinline__ const Storage* place(const Storage* base, int32_t id,
                                                  int64_t page_stride, int64_t token_stride) const {
    if (id < 0) return base;
    const Location at = PageTable::locate(id, token);
    return base + at.page * page_stride + at.token * token_stride;
  }
};

// Sixteen bytes of a row to shared memory; zeros where there is no token: a NaN left in a slot that
// the request does not own must not meet a probability of zero.
template <typename Storage>
__device__ __forceinline__ void copy_vector(uint32_t smem, const Storage* row, int vector,
                                            bool exists) {
  const Storage* source = row + vector * (16 / static_cast<int>(sizeof(Storage)));
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

// Where the tokens of a lane begin.
struct LaneTokens {
  const KVType::Storage* latents[kLaneRows];
  const KpeType::Storage* k_pes[kLaneRows];
  const float* scales[kLaneRows];
  Listed listed[kLaneRows];

  __device__ __forceinline__ LaneTokens(const KernelParams& params,
                                        const TokenIds (&ids)[kLaneRows]) {
    for_each<kLaneRows>([&](int i) {
      latents[i] = ids[i].latent(params.attention);
      k_pes[i] = ids[i].k_pe(params.attention);
      if constexpr (kNumScales > 0) scales[i] = ids[i].scales(params.mla);
      listed[i] = ids[i].listed();
    });
  }

  __device__ __forceinline__ void copy(uint32_t smem) const {
    constexpr int kKpeVectors = kKpeDim * static_cast<int>(sizeof(KpeType::Storage)) / 16;
    const int lane = lane_idx() % 8;
    for_each<kLaneRows>([&](int i) {
      const int row = stage_row(i);
      const bool exists = listed[i] == Listed::kIs;
      for_each<kRowSegments>([&](int s) {
        const int vector = s * 8 + lane;
        copy_vector(latent_place(smem, row, vector), latents[i], vector, exists);
      });
      if (lane < kKpeVectors) copy_vector(k_pe_place(smem, row, lane), k_pes[i], lane, exists);
      // float32 scales lie at multiples of their size.
      if (lane < kNumScales) {
        cp_async_few<4>(scales_place(smem, row) + lane * 4, scales[i] + lane, exists);
      }
    });
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
  const int32_t end = item.end * kTileStages;
  int32_t stage = item.begin * kTileStages;
  TokenIds ids[kLaneRows];
  const auto find = [&](int32_t stage) {
    for_each<kLaneRows>(
        [&](int i) { ids[i].find(params, page_row, item, stage, end, stage_row(i)); });
  };
  find(stage);
#pragma unroll 1
  for (; stage < end; ++stage) {
    const LaneTokens tokens(params, ids);
    find(stage + 1);  // before they are needed
    mbarrier_wait(shared.empty(ring.stage), ring.parity);
    if constexpr (PageTable::kIsList) {
      if (lane_idx() % 8 == 0) {
        for_each<kLaneRows>([&](int i) {
          shared.listed[ring.stage][stage_row(i)] = static_cast<uint8_t>(tokens.listed[i]);
        });
      }
    }
    tokens.copy(smem + ring.stage * kRingStageBytes);
    arrive_with_copies(shared.full(ring.stage));
    ring.next(kNumStages);
    if (item.is_first && stage + 1 == item.begin * kTileStages + kEarlyStages) {
      wait_for_first_query<kTokenThreads>();
    }
  }
}

// Finds the work items, loads their Q and tokens, and writes the rows of empty ones.
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
    if (!is_end && (item.is_empty() || item.rows(params.attention).num_rows == 0)) {
      write_empty(params.attention, item, thread, kProducerThreads);
      sync_threads<kProducerThreads>(kQueryBarrier);  // and read
      continue;
    }
    if (thread < kQueryThreads) {
      mbarrier_wait(shared.q_empty(), query_parity);
      if (!is_end) {
        copy_next_query(params, shared.work_items, index, smem + kStageQueryOffset);
      }
      arrive_with_copies(shared.q_full());
    }
    if (is_end) return;
    load_item(params, shared, item, smem, ring);
    query_parity ^= 1;
    index = (index + 1) % kNumWorkItems;
  }
}

}  // namespace jitattn
