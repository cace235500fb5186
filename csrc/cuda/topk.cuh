// topk: a block or a cluster filters a row (filter.cuh) and puts the k greatest of what is left in order. Bound by
// reading x once.
//
// topk_short (topk_short.cuh): rows that the registers of a block hold.
//
// topk_many, for a k whose list does not fit in shared memory: a block reads its row once for each digit of the keys
// and once to write what was found. Right for any k; not fast.
#pragma once

#include "filter.cuh"
#include "topk_config.h"
#include "topk_outputs.cuh"

namespace deepinfer {

template <TopkConfig c>
DEVICE void topk(const TopkArgs& args) {
  using T = Element<c.x>;
  extern __shared__ uint64_t shared[];
  __shared__ SelectState<c.threads> select;
  __shared__ FilterState state;
  uint64_t* ring = shared;
  uint64_t* list = ring + c.threads * kVectorsPerThread * kVectorBytes / 8 * c.stages;

  const int64_t row = blockIdx.x / c.cluster;
  const int rank = int(blockIdx.x % c.cluster), k = int(args.k);
  const T* x = static_cast<const T*>(args.x) + row_offset<c.strided>(args.x_rows, row);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t size = length_of(args, row);
  const Vectors<T> vectors(x, size);
  const int share = (vectors.count + c.cluster - 1) / c.cluster;
  const int first = share * rank < vectors.count ? share * rank : vectors.count;
  const int last = first + share < vectors.count ? first + share : vectors.count;
  const Filtered filtered = filter<T, c.threads, c.stages, c.cluster, c.capacity, c.bulk>(
      vectors, first, last, k, ring, list, select, state);
  int count = filtered.count;
  if constexpr (c.cluster > 1) {
    count = gather<T, c.threads, c.cluster, c.capacity>(list, filtered, k, ring, select, state);
    if (rank != 0) return;
  }
  // The ring is free, or it has what was gathered and the list is free.
  uint64_t* from = c.cluster > 1 ? ring : list;
  uint64_t* ordered = c.cluster > 1 ? list : ring;
  const int found = count < k ? count : k;
  if (found > 0) {
    const uint64_t cut =
        count > found ? find_cut<c.threads>(from, count, found, 0, filtered.least, filtered.most, select) : 0;
    const auto place = [&](int at, uint64_t entry) { write_entry<c.wide_index, c.values>(args, x, row, at, entry); };
    if constexpr (c.order == TopkOrder::by_value) {
      const ByValue<c.threads> order(filtered.least, filtered.most);
      put_in_order<c.threads>(from, count, cut, found, order, ordered, select, place);
    } else {
      const ByIndex<c.threads> order{uint32_t(size)};
      put_in_order<c.threads>(from, count, cut, found, order, ordered, select, place);
    }
  }
#pragma unroll 1
  for (int i = found + threadIdx.x; i < k; i += c.threads) write_fill<c.wide_index, c.values, T>(args, row, i);
}

// ---- any k ----

constexpr int kManyBins = 2048;  // of a radix pass: 11 bits

template <TopkManyConfig c>
DEVICE void topk_many(const TopkArgs& args) {
  using T = Element<c.x>;
  __shared__ SelectState<kManyBins> state;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + row_offset<c.strided>(args.x_rows, row);
  wait_for_previous_kernel();
  const int64_t size = length_of(args, row);
  const int64_t count = args.k < size ? args.k : size;
  uint64_t* sorted = args.candidates + row * power_of_two_from(int(args.k));
  clear_bins<c.threads>(state);
  __syncthreads();

  // The key of the k-th, and how many that equal it belong to the k.
  uint32_t kth = 0;
  int wanted = int(count);
  if (count < size) {
#pragma unroll 1
    for (int shift = 21; shift >= 0; shift -= shift > 10 ? 11 : 10) {  // digits of 11, 11 and 10 bits
      const uint32_t digit = shift == 0 ? 1023 : kManyBins - 1, known = ~(digit << shift | ((1u << shift) - 1));
#pragma unroll 4
      for (int64_t i = threadIdx.x; i < size; i += c.threads) {
        const uint32_t key = key_of(to_float(x[i]));
        if ((key & known) == kth) atomicAdd(&state.bins[key >> shift & digit], 1);
      }
      __syncthreads();
      visit_bins<c.threads>(state, [&](int bin, int above, int size) {
        if (above < wanted && wanted <= above + size) state.found = {bin, wanted - above, size};
      });
      kth |= uint32_t(state.found.digit) << shift;
      wanted = state.found.wanted;
      __syncthreads();
      if (shift == 0) break;
    }
  }

  // In order of index: what lies above, and the first that are equal.
  int64_t written = 0, equals = 0;
#pragma unroll 1
  for (int64_t base = 0; base < size; base += c.threads) {
    const int64_t i = base + threadIdx.x;
    const uint32_t key = i < size ? key_of(to_float(x[i])) : 0;
    const auto number = [&](bool chosen, int64_t& written) {
      const int64_t at = written + sum_before<c.threads>(chosen, state);
      written += __syncthreads_count(chosen);
      return at;
    };
    const bool equal = i < size && key == kth && count < size;
    const bool chosen_equal = number(equal, equals) < wanted && equal;
    const bool chosen = i < size && (count == size || key > kth || chosen_equal);
    const int64_t at = number(chosen, written);
    if (!chosen) continue;
    if constexpr (c.order == TopkOrder::by_value) sorted[at] = entry_of(key, uint32_t(i));
    else write_place<c.wide_index, c.values>(args, x, row, at, i);
  }
  if constexpr (c.order == TopkOrder::by_value) {
    const int padded = power_of_two_from(int(count));
    for (int64_t i = count + threadIdx.x; i < padded; i += c.threads) sorted[i] = 0;
    __syncthreads();
    sort_entries<c.threads, ByValue<c.threads>>(sorted, padded);
    for (int64_t i = threadIdx.x; i < count; i += c.threads)
      write_place<c.wide_index, c.values>(args, x, row, i, index_in(sorted[i]));
  }
  for (int64_t i = count + threadIdx.x; i < args.k; i += c.threads)
    write_fill<c.wide_index, c.values, T>(args, row, i);
}

}  // namespace deepinfer
