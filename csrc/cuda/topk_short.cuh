// topk_short: rows that fit in the registers of a warp or a block, results in the order of their indices. The key of
// the k-th is found by bisection, bit by bit; a step counts the elements that reach a key, two of 16 bits in an
// instruction. Then prefix sums give each of the k its place, and the indices go through shared memory, so that they
// are written side by side. Bound by instructions: some 20 for each element of 16 bits, most of them in the bisection.
#pragma once

#include "filter.cuh"
#include "topk_config.h"
#include "topk_outputs.cuh"

namespace deepinfer {

// Bits 0, 16, 1, 17, ...
DEVICE uint32_t halves_interleaved(uint32_t x) {
  x = (x & 0xff0000ff) | (x & 0x0000ff00) << 8 | (x & 0x00ff0000) >> 8;
  x = (x & 0xf00ff00f) | (x & 0x00f000f0) << 4 | (x & 0x0f000f00) >> 4;
  x = (x & 0xc3c3c3c3) | (x & 0x0c0c0c0c) << 2 | (x & 0x30303030) >> 2;
  return (x & 0x99999999) | (x & 0x22222222) << 1 | (x & 0x44444444) >> 1;
}

template <int lanes>
DEVICE void row_sync() {
  if constexpr (lanes == 32) __syncwarp();
  else __syncthreads();
}

struct ShortState {
  uint32_t counts[2][2][32];
  uint64_t totals[32];
};

// A lane's part of a row: bit v * n + i of a mask stands for element i of its vector v.
template <typename T, int lanes, int vectors>
struct ShortRow {
  using W = Words<T>;
  static constexpr int n = kVectorBytes / sizeof(T), words = vectors * 4;
  uint32_t at[words];
  uint32_t valid;
  int lane, before;

  DEVICE ShortRow(const T* x, int size, int lane) : valid(0), lane(lane) {
    const Vectors<T> row(x, size);
    before = row.before;
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const int vector = v * lanes + lane, begin = first_index(v);
      const auto loaded = load_access<T, n>(row.start + int64_t(vector) * n, vector < row.count);
#pragma unroll
      for (int w = 0; w < 4; ++w) at[v * 4 + w] = word(loaded, w);
      const int left = size - begin;
      uint32_t here = left >= n ? (1u << n) - 1 : left <= 0 ? 0 : (1u << left) - 1;
      if (begin < 0) here &= ~((1u << -begin) - 1);
      valid |= here << v * n;
    }
    if (valid == (vectors * n == 32 ? 0xffffffff : (1u << vectors * n) - 1)) return;
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const uint32_t there = valid >> w * W::kPerWord;
      const uint32_t mask = W::kPerWord == 1 ? -(there & 1) : (there & 1) * 0xffff | (there >> 1 & 1) * 0xffff0000;
      at[w] = (at[w] & mask) | (W::kLowest & ~mask);
    }
  }

  DEVICE int first_index(int v) const { return (v * lanes + lane) * n - before; }

  // Of the words' halves, all lower ones before the upper ones.
  DEVICE uint32_t reaching(uint32_t key) const {
    const uint32_t threshold = W::threshold(key);
    uint32_t mask = 0;
#pragma unroll
    for (int w = 0; w < words; ++w)
      mask |= W::at_least(at[w], threshold) & ((W::kPerWord == 2 ? 0x10001u : 1u) << w);
    return mask;
  }
  DEVICE uint32_t nans() const {
    uint32_t mask = 0;
#pragma unroll
    for (int w = 0; w < words; ++w) mask |= W::nans(at[w]) & ((W::kPerWord == 2 ? 0x10001u : 1u) << w);
    return mask;
  }
  // Element by element.
  DEVICE uint32_t in_order(uint32_t mask) const {
    return (W::kPerWord == 2 ? halves_interleaved(mask) : mask) & valid;
  }
};

// The sums over the lanes of a row. `turn` alternates from call to call.
template <int lanes, int words>
DEVICE void sum_row(uint32_t (&x)[words], int turn, ShortState& state) {
#pragma unroll
  for (int i = 0; i < words; ++i) x[i] = __reduce_add_sync(0xffffffff, x[i]);
  if constexpr (lanes > 32) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < words; ++i)
      if (lane == 0) state.counts[turn][i][threadIdx.x / 32] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < words; ++i)
      x[i] = __reduce_add_sync(0xffffffff, lane < lanes / 32 ? state.counts[turn][i][lane] : 0);
  }
}

// How many elements of the masks come before each vector of this lane, in 16 bits for each.
template <int lanes, int vectors, int n>
DEVICE uint64_t number(uint32_t mask, ShortState& state) {
  uint64_t own = 0;
#pragma unroll
  for (int v = 0; v < vectors; ++v) own |= uint64_t(__popc(mask >> v * n & ((1u << n) - 1))) << 16 * v;
  uint64_t upto = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, upto, step);
    if (threadIdx.x % 32 >= step) upto += other;
  }
  uint64_t total = __shfl_sync(0xffffffff, upto, 31), before = upto - own;
  if constexpr (lanes > 32) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) state.totals[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
#pragma unroll 4
    for (int warp = 0; warp < lanes / 32; ++warp) {
      if (warp < threadIdx.x / 32) before += state.totals[warp];
      total += state.totals[warp];
    }
  }
  return before + (total << 16) + (total << 32) + (total << 48);  // all of a vector come before the next one
}

// Calls visit(place, v, bit) for each bit of the mask of this lane, whose places are numbered as above.
template <int vectors, int n, typename Visit>
DEVICE void visit_mask(uint32_t mask, uint64_t before, Visit&& visit) {
#pragma unroll 1
  for (int v = 0; v < vectors; ++v) {
    int place = int(before & 0xffff);
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (mask >> i & 1) visit(place++, v, i);
    mask >>= n % 32;
    before >>= 16;
  }
}

template <TopkShortConfig c>
DEVICE void topk_short(const TopkArgs& args) {
  using T = Element<c.x>;
  using Row = ShortRow<T, c.lanes, c.vectors>;
  using W = Words<T>;
  constexpr int n = Row::n, rows = c.threads / c.lanes;
  static_assert(c.lanes == 32 || rows == 1);
  __shared__ uint16_t chosen[rows][c.lanes * c.vectors * n];
  __shared__ ShortState state;
  const int64_t row = int64_t(blockIdx.x) * rows + threadIdx.x / c.lanes;
  const int lane = int(threadIdx.x % c.lanes), k = int(args.k);
  if (row >= args.x_rows.count) return;
  const T* x = static_cast<const T*>(args.x) + row_offset<c.strided>(args.x_rows, row);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int size = int(length_of(args, row));
  if (size <= k) {
#pragma unroll 4
    for (int i = lane; i < size; i += c.lanes) write_place<c.wide_index, c.values>(args, x, row, i, i);
#pragma unroll 4
    for (int i = size + lane; i < k; i += c.lanes) write_fill<c.wide_index, c.values, T>(args, row, i);
    return;
  }

  // The greatest key that k elements reach, digit by digit.
  const Row here(x, size, lane);
  constexpr int bits = W::kPerWord == 2 ? 16 : 32, higher_digits = (1 << c.digit) - 1;
  uint32_t key = 0;
  int reached = 0, turn = 0;
#pragma unroll 1
  for (int shift = bits - c.digit; shift >= 0 && reached != k; shift -= c.digit) {
    uint32_t counts[(higher_digits + 1) / 2] = {};  // 16 bits for each digit
#pragma unroll
    for (int i = 0; i < higher_digits; ++i) {
      const uint32_t higher = key + (uint32_t(i + 1) << shift);
      const uint32_t count = __popc(here.reaching(higher < W::kInfinity ? higher : W::kInfinity));
      counts[i / 2] += (higher > W::kInfinity ? 0 : count) << i % 2 * 16;
    }
    sum_row<c.lanes>(counts, turn, state);
    turn ^= 1;
    uint32_t next = key;
#pragma unroll
    for (int i = 0; i < higher_digits; ++i) {
      const int count = int(counts[i / 2] >> i % 2 * 16 & 0xffff);
      if (count < k) continue;
      next = key + (uint32_t(i + 1) << shift);
      reached = count;
    }
    key = next;
  }

  uint32_t mask = here.in_order(here.reaching(key));
  if (reached != k) {  // some of those that equal the k-th are left out
    uint32_t above = here.in_order(key < W::kInfinity ? here.reaching(key + 1) : here.nans());
    uint32_t sums[1] = {uint32_t(__popc(above))};
    sum_row<c.lanes>(sums, turn, state);
    int wanted = k - int(sums[0]);
    uint32_t equal = mask & ~above;
    if (wanted <= 0) {  // there are as many NaNs
      equal = above;
      above = 0;
      wanted = k;
    }
    uint32_t first_ones = 0;
    visit_mask<c.vectors, n>(equal, number<c.lanes, c.vectors, n>(equal, state), [&](int place, int v, int i) {
      if (place < wanted) first_ones |= 1u << (v * n + i);
    });
    mask = above | first_ones;
  }
  visit_mask<c.vectors, n>(mask, number<c.lanes, c.vectors, n>(mask, state), [&](int place, int v, int i) {
    chosen[threadIdx.x / c.lanes][place] = uint16_t(here.first_index(v) + i);
  });
  row_sync<c.lanes>();
#pragma unroll 4
  for (int i = lane; i < k; i += c.lanes)
    write_place<c.wide_index, c.values>(args, x, row, i, chosen[threadIdx.x / c.lanes][i]);
}

}  // namespace deepinfer
