// topk: a block or a cluster finds the k greatest elements of a row (select.cuh). Bound by reading x once, as long as
// rows are much longer than k; short rows by the radix selection in shared memory.
//
// topk_many, for a k whose list does not fit in shared memory: a block reads its row once for each digit of the keys
// and once to write what was found. Right for any k; not fast.
#pragma once

#include "select.cuh"
#include "topk_config.h"

namespace deepinfer {

DEVICE int64_t length_of(const TopkArgs& args, int64_t row) {
  if (!args.lengths) return args.row_size;
  const int64_t length = args.lengths[row];
  return length < 0 ? 0 : length < args.row_size ? length : args.row_size;
}

DEVICE int64_t place_of(const TopkArgs& args, int64_t row, int64_t index) {
  if (args.page_table) {
    const int64_t page = args.page_table[row * args.pages + index / args.page_size];
    if (page < 0) return args.fill_index;
    index = page * args.page_size + index % args.page_size;
  }
  return args.offsets ? index + args.offsets[row] : index;
}

template <int wide, int with_values, typename T>
DEVICE void write_place(const TopkArgs& args, const T* x, int64_t row, int64_t at, bool real, int64_t index) {
  const int64_t place = real ? place_of(args, row, index) : args.fill_index;
  const int64_t out = row * args.k + at;
  if constexpr (wide) static_cast<int64_t*>(args.indices)[out] = place;
  else static_cast<int32_t*>(args.indices)[out] = int32_t(place);
  if constexpr (with_values) static_cast<T*>(args.values)[out] = real ? x[index] : from_float<T>(args.fill_value);
}

DEVICE int power_of_two_from(int x) { return x <= 1 ? 1 : 1 << (32 - __clz(x - 1)); }

template <TopkConfig c>
DEVICE void topk(const TopkArgs& args) {
  using T = Element<c.x>;
  extern __shared__ uint64_t shared[];
  __shared__ SelectState state;
  const Lists lists = lists_in(shared, c);

  const int64_t row = blockIdx.x / c.cluster;
  const int rank = int(blockIdx.x % c.cluster), k = int(args.k);
  const T* x = static_cast<const T*>(args.x) + row_offset<c.strided>(args.x_rows, row);
  wait_for_previous_kernel();
  const int64_t size = length_of(args, row);
  const Pieces<T> pieces(x, size);
  const int share = (pieces.count + c.cluster - 1) / c.cluster;
  const int first = share * rank < pieces.count ? share * rank : pieces.count;
  const int last = first + share < pieces.count ? first + share : pieces.count;
  int count = select_pieces<c.threads>(pieces, first, last, k, c.slack, c.limit, lists, state);
  let_next_kernel_start();
  count = merge_cluster<c.threads, c.cluster, sizeof(T) == 4 ? 3 : 2>(lists, count, k, size, state);
  if (rank != 0) return;

  // The list's memory is free for the sort.
  const int padded = power_of_two_from(count);
#pragma unroll 1
  for (int i = threadIdx.x; i < padded; i += c.threads) {
    const uint32_t above = c.order == TopkOrder::by_value ? ~lists.kept_keys[i] : 0;
    shared[i] = i < count ? uint64_t(above) << 32 | uint32_t(lists.kept_indices[i]) : ~uint64_t(0);
  }
  __syncthreads();
  // A whole row of one round is in order.
  constexpr int in_round = c.threads * kPerThread / Pieces<T>::kElements;
  const bool in_order = c.order == TopkOrder::by_index && c.cluster == 1 && count == size && pieces.count <= in_round;
  if (!in_order) sort_ascending<c.threads>(shared, padded);
#pragma unroll 1
  for (int i = threadIdx.x; i < k; i += c.threads)
    write_place<c.wide_index, c.values>(args, x, row, i, i < count, i < count ? uint32_t(shared[i]) : 0);
}

// ---- any k ----

template <TopkManyConfig c>
DEVICE void topk_many(const TopkArgs& args) {
  using T = Element<c.x>;
  constexpr int warps = c.threads / 32;
  __shared__ SelectState state;
  __shared__ uint32_t bins[kBins];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + row_offset<c.strided>(args.x_rows, row);
  wait_for_previous_kernel();
  const int64_t size = length_of(args, row);
  const int64_t count = args.k < size ? args.k : size;
  uint64_t* sorted = args.candidates + row * power_of_two_from(int(args.k));

  // The key of the k-th, and how many that equal it belong to the k.
  uint32_t prefix = 0, known = 0;
  int wanted = int(count);
  if (count < size) {
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      clear_bins<c.threads>(bins);
#pragma unroll 4
      for (int64_t i = threadIdx.x; i < size; i += c.threads) {
        const uint32_t key = key_of(to_float(x[i]));
        if ((key & known) == prefix) atomicAdd(&bins[key >> shift_of(pass) & mask_of(pass)], 1);
      }
      __syncthreads();
      const Digit found = find_digit<c.threads>(bins, wanted, state);
      prefix |= uint32_t(found.digit) << shift_of(pass);
      known |= mask_of(pass) << shift_of(pass);
      wanted = found.wanted;
    }
  }

  // In order of index: what lies above, and the first that are equal.
  int64_t written = 0, equals = 0;
#pragma unroll 1
  for (int64_t base = 0; base < size; base += c.threads) {
    const int64_t i = base + threadIdx.x;
    const uint32_t key = i < size ? key_of(to_float(x[i])) : 0;
    const uint32_t lanes_below = (1u << threadIdx.x % 32) - 1;
    const auto before = [&](uint32_t ballot, int64_t& total) {
      __syncthreads();
      if (threadIdx.x % 32 == 0) state.warp_totals[threadIdx.x / 32] = __popc(ballot);
      __syncthreads();
      int64_t at = total + __popc(ballot & lanes_below);
      for (int warp = 0; warp < warps; ++warp) {
        if (warp < threadIdx.x / 32) at += state.warp_totals[warp];
        total += state.warp_totals[warp];
      }
      return at;
    };
    const bool equal = i < size && key == prefix && count < size;
    const bool chosen_equal = before(__ballot_sync(0xffffffff, equal), equals) < wanted && equal;
    const bool chosen = i < size && (count == size || key > prefix || chosen_equal);
    const int64_t at = before(__ballot_sync(0xffffffff, chosen), written);
    if (!chosen) continue;
    if constexpr (c.order == TopkOrder::by_value) sorted[at] = uint64_t(~key) << 32 | uint32_t(i);
    else write_place<c.wide_index, c.values>(args, x, row, at, true, i);
  }
  if constexpr (c.order == TopkOrder::by_value) {
    const int padded = power_of_two_from(int(count));
    for (int64_t i = count + threadIdx.x; i < padded; i += c.threads) sorted[i] = ~uint64_t(0);
    __syncthreads();
    sort_ascending<c.threads>(sorted, padded);
    for (int64_t i = threadIdx.x; i < count; i += c.threads)
      write_place<c.wide_index, c.values>(args, x, row, i, true, uint32_t(sorted[i]));
  }
  for (int64_t i = count + threadIdx.x; i < args.k; i += c.threads)
    write_place<c.wide_index, c.values>(args, x, row, i, false, 0);
}

}  // namespace deepinfer
