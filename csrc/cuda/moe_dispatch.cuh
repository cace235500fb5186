// Sorting tokens by expert, and moving their rows there and back.
//
// expert_map: a counting sort in one launch. Each block counts and places a chunk of the slots; the blocks of a cluster
// read each other's counts. Slots that exceed a cluster, and devices without: expert_count leaves the counts of each
// chunk in device memory first. Inside a chunk each warp counts its own run of slots, so that placing needs no barrier
// and keeps the order. Bound by latency.
//
// moe_permute: a block a token, given the inverse map. The row is read once and written to its topk places: by the bulk
// copy engine, through shared memory, where there is one and the rows are aligned to 16 bytes, else through registers.
// Without the inverse map, a block a row of the result. Bound by memory: the token rows once and the expert rows once.
//
// An index that is no index poisons: its row is filled with bytes of 0xff, a NaN in every floating-point type.
#pragma once

#include "device.cuh"
#include "hopper.cuh"
#include "moe_dispatch_config.h"

namespace deepinfer {

constexpr int32_t kInvalid = -2;  // an expert outside [-1, num_experts)

// The local expert of a slot, kDropped or kInvalid.
template <ExpertMapConfig c>
DEVICE int32_t local_expert(const ExpertMapArgs& args, int64_t slot) {
  const int64_t id = c.wide_ids ? static_cast<const int64_t*>(args.ids)[slot]
                                : int64_t(static_cast<const int32_t*>(args.ids)[slot]);
  if (id < -1 || id >= args.num_experts) return kInvalid;
  const int64_t local = id - args.first_expert;
  return id >= 0 && local >= 0 && local < args.num_local_experts ? int32_t(local) : kDropped;
}

// The lanes that hold the same expert; one vote a bit is several times as fast as match.any.
template <int bits>
DEVICE uint32_t lanes_with_same(int32_t expert) {
  uint32_t same = __ballot_sync(0xffffffff, expert >= 0);
  if (expert < 0) same = ~same;
#pragma unroll
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = expert >> bit & 1;
    const uint32_t others = __ballot_sync(0xffffffff, set);
    same &= set ? others : ~others;
  }
  return same;
}

// The counts of one chunk, to `cursors`.
template <ExpertMapConfig c>
DEVICE void expert_count(const ExpertMapArgs& args) {
  extern __shared__ int32_t counts[];
  for (int e = threadIdx.x; e < c.capacity; e += c.threads) counts[e] = 0;
  __syncthreads();
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < c.rounds; ++i) {
    const int64_t slot = (int64_t(blockIdx.x) * c.rounds + i) * c.threads + threadIdx.x;
    const int32_t expert = slot < args.slots ? local_expert<c>(args, slot) : kDropped;
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  let_next_kernel_start();
  for (int e = threadIdx.x; e < args.num_local_experts; e += c.threads)
    args.cursors[blockIdx.x * args.num_local_experts + e] = counts[e];
}

// Exclusive prefix sums of the values that each thread holds, over the block.
template <int threads>
DEVICE int32_t scan_over_block(int32_t x, int32_t* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int32_t before = 0;
  for (int w = 0; w < warp; ++w) before += scratch[w];
  return before + sum - x;
}

template <ExpertMapConfig c>
DEVICE void expert_map(const ExpertMapArgs& args) {
  constexpr int warps = c.threads / 32;
  extern __shared__ int32_t tables[];
  __shared__ int32_t scratch[32], laid_out;
  int32_t* own = tables;                  // this chunk's slots of each expert
  int32_t* before = own + c.capacity;     // those of earlier chunks, then the row of this chunk's first
  int32_t* total = before + c.capacity;   // those of all chunks
  // Of each warp: its count of an expert, then how many of the chunk's are placed before its next one.
  auto* placed = reinterpret_cast<uint16_t*>(total + c.capacity);
  const int experts = int(args.num_local_experts);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = (int64_t(blockIdx.x) * warps + warp) * c.rounds * 32 + lane;  // a warp's slots are a run

  for (int i = threadIdx.x; i < warps * c.capacity / 2; i += c.threads) reinterpret_cast<uint32_t*>(placed)[i] = 0;
  for (int e = threadIdx.x; e < c.capacity; e += c.threads) before[e] = total[e] = 0;
  wait_for_previous_kernel();
  int32_t expert[c.rounds];
#pragma unroll
  for (int i = 0; i < c.rounds; ++i)
    expert[i] = first + i * 32 < args.slots ? local_expert<c>(args, first + i * 32) : kDropped;
  __syncthreads();

  uint16_t* mine = placed + warp * c.capacity;
  uint32_t peers[c.rounds];
#pragma unroll
  for (int i = 0; i < c.rounds; ++i) {
    peers[i] = lanes_with_same<c.bits>(expert[i]);
    if (expert[i] >= 0 && lane == __ffs(peers[i]) - 1) mine[expert[i]] += __popc(peers[i]);
    __syncwarp();
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += c.threads) {
    int32_t sum = 0;
    uint16_t counts[warps];
#pragma unroll
    for (int w = 0; w < warps; ++w) counts[w] = placed[w * c.capacity + e];
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      placed[w * c.capacity + e] = uint16_t(sum);
      sum += counts[w];
    }
    own[e] = sum;
  }

  if constexpr (c.counted) {
    __syncthreads();
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < args.chunks * experts; i += c.threads) {
      const int32_t count = args.cursors[i];
      const int e = int(i % experts);
      atomicAdd(&total[e], count);
      if (i < int64_t(blockIdx.x) * experts) atomicAdd(&before[e], count);
    }
  } else if constexpr (c.cluster > 1) {
    cluster_sync();
    for (int e = threadIdx.x; e < experts; e += c.threads) {
#pragma unroll
      for (int block = 0; block < c.cluster; ++block) {
        const int32_t count = load_from_cluster(own + e, block);
        total[e] += count;
        if (block < blockIdx.x) before[e] += count;
      }
    }
    cluster_sync();  // no block leaves while others read its counts
  } else {
    for (int e = threadIdx.x; e < experts; e += c.threads) total[e] = own[e];
  }
  __syncthreads();

  // Each thread lays out a run of experts.
  constexpr int run = c.capacity / c.threads;
  const int32_t alignment = int32_t(args.alignment);
  auto aligned = [&](int32_t count) { return (count + alignment - 1) / alignment * alignment; };
  int32_t taken = 0;
  for (int i = 0; i < run; ++i) taken += aligned(total[threadIdx.x * run + i]);
  int32_t start = scan_over_block<c.threads>(taken, scratch);
  for (int i = 0; i < run; ++i) {
    const int e = threadIdx.x * run + i;
    before[e] += start;
    const int32_t next = start + aligned(total[e]);
    if (e < experts && blockIdx.x == 0) {
      args.counts[e] = total[e];
      args.offsets[e] = start;
      if (e == experts - 1) args.offsets[experts] = next;
    }
    // Padding between the experts is shared out over the blocks.
    if (e < experts && e % gridDim.x == blockIdx.x)
      for (int32_t row = start + total[e]; row < next; ++row) args.rows_to_slots[row] = kDropped;
    if (e == experts - 1) laid_out = next;
    start = next;
  }
  if (args.tail && blockIdx.x == 0 && threadIdx.x < 3) args.tail[threadIdx.x] = threadIdx.x == 0 ? args.tail_value : 0;
  __syncthreads();
  for (int64_t row = laid_out + int64_t(blockIdx.x) * c.threads + threadIdx.x; row < args.rows;
       row += int64_t(gridDim.x) * c.threads)
    args.rows_to_slots[row] = kDropped;
  let_next_kernel_start();

#pragma unroll
  for (int i = 0; i < c.rounds; ++i) {
    const int64_t slot = first + i * 32;
    const bool leads = lane == __ffs(peers[i]) - 1;
    int32_t row = 0;
    if (expert[i] >= 0) row = before[expert[i]] + mine[expert[i]] + __popc(peers[i] & ((1u << lane) - 1));
    __syncwarp();
    if (expert[i] >= 0 && leads) mine[expert[i]] += __popc(peers[i]);
    __syncwarp();
    if (slot >= args.slots) continue;
    args.slots_to_rows[slot] = expert[i] >= 0 ? row : expert[i];
    if (expert[i] >= 0) args.rows_to_slots[row] = int32_t(slot);
  }
}

// ---- rows ----

template <int n>
DEVICE Vec<uint8_t, n> filled_with(uint8_t byte) {
  Vec<uint8_t, n> v;
#pragma unroll
  for (int i = 0; i < n; ++i) v.at[i] = byte;
  return v;
}

// A stream of rows that nobody reads soon should not push the token rows out of the L2 cache.
template <int n>
DEVICE void store_bytes(char* p, const Vec<uint8_t, n>& v) {
  if constexpr (n == 16) {
    const auto* w = reinterpret_cast<const uint32_t*>(&v);
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  } else {
    *reinterpret_cast<Vec<uint8_t, n>*>(p) = v;
  }
}

// All of a row of the result to one byte, by the threads of a block.
template <MoePermuteConfig c>
DEVICE void fill_row(const MoePermuteArgs& args, int64_t row, uint8_t byte) {
  char* out = args.out + row * args.row_bytes;
  for (int64_t i = threadIdx.x * c.access; i < args.row_bytes; i += c.threads * c.access)
    store_bytes(out + i, filled_with<c.access>(byte));
}

// One row of x to `count` rows of the result; those that are no rows are left out.
template <MoePermuteConfig c, int count>
DEVICE void copy_row(const MoePermuteArgs& args, const char* x, const int32_t* rows, int given = count) {
  constexpr int step = c.threads * c.access;
  for (int64_t first = threadIdx.x * c.access; first < args.row_bytes; first += c.vectors * step) {
    Vec<uint8_t, c.access> held[c.vectors];
#pragma unroll
    for (int k = 0; k < c.vectors; ++k)
      if (first + k * step < args.row_bytes)
        held[k] = load_access<uint8_t, c.access>(reinterpret_cast<const uint8_t*>(x) + first + k * step);
#pragma unroll
    for (int j = 0; j < (count ? count : given); ++j) {
      if (rows[j] < 0 || rows[j] >= args.rows) continue;
      char* out = args.out + rows[j] * args.row_bytes;
#pragma unroll
      for (int k = 0; k < c.vectors; ++k)
        if (first + k * step < args.row_bytes) store_bytes(out + first + k * step, held[k]);
    }
  }
}

// Behind the tokens, blocks that look for rows without one.
template <MoePermuteConfig c>
DEVICE void fill_rows_without_token(const MoePermuteArgs& args) {
  const int64_t begin = (blockIdx.x - args.tokens) * kRowsToFill, mine = begin + threadIdx.x % kRowsToFill;
  const int32_t slot = mine < args.rows ? args.rows_to_slots[mine] : 0;
  const uint32_t empty = __ballot_sync(0xffffffff, slot == kDropped);
  const bool invalid = mine < args.rows && (slot < kDropped || slot >= args.tokens * args.topk);
  uint32_t left = empty | __ballot_sync(0xffffffff, invalid);
  for (; left; left &= left - 1) {
    const int i = __ffs(left) - 1;
    fill_row<c>(args, begin + i, empty >> i & 1 ? 0 : 0xff);
  }
}

template <MoePermuteConfig c>
DEVICE void moe_permute_by_token(const MoePermuteArgs& args) {
  const int64_t token = blockIdx.x, topk = c.topk ? c.topk : args.topk;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (token >= args.tokens) return fill_rows_without_token<c>(args);
  copy_row<c, c.topk>(args, args.x + token * args.row_stride, args.slots_to_rows + token * topk, int(topk));
}

// One warp, whose first lane drives the copy engine.
template <MoePermuteConfig c>
DEVICE void moe_permute_bulk(const MoePermuteArgs& args) {
  extern __shared__ __align__(128) char stage[];
  __shared__ uint64_t barrier;
  const int64_t token = blockIdx.x;
  if (threadIdx.x == 0) init_barrier(&barrier, 1);
  __syncwarp();  // the compiler initialises by an instruction of the whole warp
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (token >= args.tokens) return fill_rows_without_token<c>(args);
  if (threadIdx.x != 0) return;
  const char* x = args.x + token * args.row_stride;
  const int32_t* rows = args.slots_to_rows + token * args.topk;
  uint32_t parity = 0;
  for (int64_t at = 0; at < args.row_bytes; at += c.stage_bytes) {
    const uint32_t bytes = uint32_t(args.row_bytes - at < c.stage_bytes ? args.row_bytes - at : c.stage_bytes);
    if (at > 0) wait_bulk_stores_read();
    expect_bytes(&barrier, bytes);
    bulk_load(stage, x + at, bytes, &barrier);
    wait_barrier(&barrier, parity);
    parity ^= 1;
    for (int j = 0; j < args.topk; ++j)
      if (rows[j] >= 0 && rows[j] < args.rows) bulk_store(args.out + rows[j] * args.row_bytes + at, stage, bytes);
  }
  wait_bulk_stores_read();
}

template <MoePermuteConfig c>
DEVICE void moe_permute_by_row(const MoePermuteArgs& args) {
  const int64_t row = blockIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int32_t slot = args.rows_to_slots[row];
  if (slot == kDropped) return fill_row<c>(args, row, 0);
  if (slot < 0 || slot >= args.tokens * args.topk) return fill_row<c>(args, row, 0xff);
  const int32_t here = int32_t(row);
  copy_row<c, 1>(args, args.x + slot / args.topk * args.row_stride, &here);
}

// A thread a scale.
template <MoePermuteScalesConfig c>
DEVICE void moe_permute_scales(const MoePermuteScalesArgs& args) {
  using Scale = Choose<c.bytes == 1, uint8_t, uint32_t>;
  const int64_t i = int64_t(blockIdx.x) * c.threads + threadIdx.x;
  const int64_t across = c.by_rows ? args.rows : args.columns, outer = i / across, inner = i - outer * across;
  const int64_t row = c.by_rows ? inner : outer, column = c.by_rows ? outer : inner;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (row >= args.rows || column >= args.columns) return;
  const int32_t slot = args.rows_to_slots[row];
  Scale scale = slot == kDropped ? Scale(0) : Scale(0xffffffff);
  if (slot >= 0 && slot < args.tokens * args.topk)
    scale = static_cast<const Scale*>(args.scales)[slot / args.topk * args.row_stride + column * args.column_stride];
  static_cast<Scale*>(args.out)[row * args.out_row_stride + column * args.out_column_stride] = scale;
}

}  // namespace deepinfer
