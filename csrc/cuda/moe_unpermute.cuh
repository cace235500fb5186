// The weighted sum of the topk expert rows of each token. Bound by memory: the expert rows once and the token rows
// once.
//
// moe_unpermute: a block a token, or a piece of its row where tokens are few; the topk rows are in flight together.
//
// moe_unpermute_bulk, for many tokens: blocks stay, one a processor. One warp drives the copy engine: it brings pieces
// of the topk rows of one token after the other into a ring in shared memory, which keeps as many bytes in flight as
// memory needs; the other warps add up what has arrived.
//
// Both add in the order of the slots. An index that is no index poisons: the token's row is filled with bytes of 0xff,
// a NaN in every floating-point type.
#pragma once

#include "device.cuh"
#include "hopper.cuh"
#include "moe_dispatch_config.h"
#include "quantizer.cuh"

namespace deepinfer {

template <MoeUnpermuteConfig c>
struct Unpermute {
  using T = Element<c.out>;
  using Y = Choose<c.coded, uint8_t, T>;
  using W = Element<c.weights>;
  static constexpr int n = kVectorBytes / sizeof(T);  // elements that a thread adds up at once
  static_assert(!c.coded || !c.added);

  // What a slot's row is multiplied by.
  DEVICE static float factor(const MoeUnpermuteArgs& args, int64_t slot, int32_t row) {
    float factor = c.weighted ? to_float(static_cast<const W*>(args.weights)[slot]) : 1.f;
    if (c.coded) factor *= args.row_scales[row];
    return factor;
  }

  DEVICE static void add(float (&sum)[n], const Vec<Y, n>& y, float factor) {
    float values[n];
    if constexpr (c.coded) {
      from_codes<Code::e4m3, n>(y, values);
    } else {
#pragma unroll
      for (int e = 0; e < n; ++e) values[e] = to_float(y.at[e]);
    }
#pragma unroll
    for (int e = 0; e < n; ++e) sum[e] += factor * values[e];
  }

  DEVICE static Vec<T, n> result(const float (&sum)[n], bool poisoned) {
    Vec<T, n> y;
#pragma unroll
    for (int e = 0; e < n; ++e) y.at[e] = from_float<T>(poisoned ? __uint_as_float(0xffffffff) : sum[e]);
    return y;
  }

  DEVICE static Vec<T, n> plus(Vec<T, n> y, const Vec<T, n>& addend) {
#pragma unroll
    for (int e = 0; e < n; ++e) y.at[e] = from_float<T>(to_float(y.at[e]) + to_float(addend.at[e]));
    return y;
  }
};

template <MoeUnpermuteConfig c>
DEVICE void moe_unpermute(const MoeUnpermuteArgs& args) {
  using U = Unpermute<c>;
  using Y = typename U::Y;
  constexpr int n = U::n;
  constexpr int together = c.topk ? c.topk : 4;  // rows in flight
  // Few tokens are shared out over several blocks each.
  const uint32_t blocks = gridDim.x / uint32_t(args.tokens), block = blockIdx.x % blocks;
  const int64_t token = blockIdx.x / blocks, size = args.hidden_size;
  const int topk = c.topk ? c.topk : int(args.topk);
  auto* out = static_cast<typename U::T*>(args.out) + token * size;
  const auto* addend = static_cast<const typename U::T*>(args.addend) + token * size;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int32_t* rows = args.slots_to_rows + token * topk;

  for (int64_t i = (block * c.threads + threadIdx.x) * n; i < size; i += blocks * c.threads * n) {
    float sum[n] = {};
    bool poisoned = false;
    for (int first = 0; first < topk; first += together) {
      Vec<Y, n> held[together];
      float factor[together];
      bool present[together];
#pragma unroll
      for (int j = 0; j < together; ++j) {
        const int32_t row = first + j < topk ? rows[first + j] : kDropped;
        present[j] = row >= 0 && row < args.rows;
        poisoned |= row < kDropped || row >= args.rows;
        factor[j] = present[j] ? U::factor(args, token * topk + first + j, row) : 0.f;
        const Y* y = static_cast<const Y*>(args.y) + row * args.row_stride;
        if (present[j]) held[j] = load_vector<c.access, n>(y, i, size);
      }
#pragma unroll
      for (int j = 0; j < together; ++j)
        if (present[j]) U::add(sum, held[j], factor[j]);
    }
    Vec<typename U::T, n> y = U::result(sum, poisoned);
    if constexpr (c.added) y = U::plus(y, load_vector<c.access, n>(addend, i, size));
    store_vector<c.access, n>(out, i, size, y);
  }
}

// What a stage of the ring holds beside the pieces of rows.
template <MoeUnpermuteConfig c>
struct UnpermuteStage {
  static constexpr int rows = c.topk + c.added;
  static constexpr uint32_t poisoned = 1u << 31;  // in `present`

  uint64_t full, empty;
  uint32_t present;  // a bit a slot
  float factors[c.topk];
};

// The warp that loads. Its lanes look at the slots of as many tokens as they have room for, a round ahead.
template <MoeUnpermuteConfig c>
DEVICE void load_rows(const MoeUnpermuteArgs& args, char* ring, UnpermuteStage<c>* stages) {
  using U = Unpermute<c>;
  using Y = typename U::Y;
  constexpr int together = 32 / c.topk, piece = c.threads * U::n;
  const int lane = threadIdx.x % 32, mine = lane / c.topk, choice = lane % c.topk;
  int32_t next_row;
  float next_factor;
  auto look = [&](int64_t first) {
    const int64_t token = first + int64_t(mine) * gridDim.x, slot = token * c.topk + choice;
    next_row = mine < together && token < args.tokens ? args.slots_to_rows[slot] : kDropped;
    const bool present = next_row >= 0 && next_row < args.rows;
    next_factor = present ? U::factor(args, slot, next_row) : 0.f;
  };
  look(blockIdx.x);
  int stage = 0;
  uint32_t parity = 1;
  for (int64_t first = blockIdx.x; first < args.tokens; first += int64_t(together) * gridDim.x) {
    const int32_t row = next_row;
    const float factor = next_factor;
    look(first + int64_t(together) * gridDim.x);
    const bool present = row >= 0 && row < args.rows;
    const uint32_t all_present = __ballot_sync(0xffffffff, present);
    const uint32_t all_poisoned = __ballot_sync(0xffffffff, row < kDropped || row >= args.rows);
    for (int i = 0; i < together && first + int64_t(i) * gridDim.x < args.tokens; ++i) {
      constexpr uint32_t slots = (1u << c.topk) - 1;
      const uint32_t here = all_present >> i * c.topk & slots;
      const bool poisoned = (all_poisoned >> i * c.topk & slots) != 0;
      for (int64_t at = 0; at < args.hidden_size; at += piece) {
        const uint32_t bytes = uint32_t(args.hidden_size - at < piece ? args.hidden_size - at : piece) * sizeof(Y);
        UnpermuteStage<c>& s = stages[stage];
        wait_barrier(&s.empty, parity);
        if (mine == i) s.factors[choice] = factor;
        if (lane == 0) s.present = here | (poisoned ? s.poisoned : 0);
        __syncwarp();
        if (lane == 0) expect_bytes(&s.full, (__popc(here) + c.added) * bytes);
        __syncwarp();
        if (mine == i && present)
          bulk_load(ring + (stage * s.rows + choice) * piece * sizeof(Y),
                    static_cast<const Y*>(args.y) + row * args.row_stride + at, bytes, &s.full);
        if (c.added && lane == 0)
          bulk_load(ring + (stage * s.rows + c.topk) * piece * sizeof(Y),
                    static_cast<const Y*>(args.addend) + (first + int64_t(i) * gridDim.x) * args.hidden_size + at, bytes,
                    &s.full);
        if (++stage == c.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }
}

template <MoeUnpermuteConfig c>
DEVICE void moe_unpermute_bulk(const MoeUnpermuteArgs& args) {
  using U = Unpermute<c>;
  using Y = typename U::Y;
  constexpr int n = U::n, piece = c.threads * n;
  extern __shared__ __align__(128) char ring[];
  __shared__ UnpermuteStage<c> stages[c.stages];
  if (threadIdx.x < c.stages) {
    init_barrier(&stages[threadIdx.x].full, 1);
    init_barrier(&stages[threadIdx.x].empty, c.threads / 32);
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x >= c.threads) return load_rows<c>(args, ring, stages);
  int stage = 0;
  uint32_t parity = 0;
  for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
    for (int64_t i = int(threadIdx.x) * n; i - int(threadIdx.x) * n < args.hidden_size; i += piece) {
      UnpermuteStage<c>& s = stages[stage];
      wait_barrier(&s.full, parity);
      const Y* rows = reinterpret_cast<const Y*>(ring) + stage * s.rows * piece + threadIdx.x * n;
      const uint32_t present = s.present;
      float sum[n] = {};
#pragma unroll
      for (int j = 0; j < c.topk; ++j)
        if (present >> j & 1) U::add(sum, *reinterpret_cast<const Vec<Y, n>*>(rows + j * piece), s.factors[j]);
      Vec<typename U::T, n> y = U::result(sum, present & s.poisoned);
      if constexpr (c.added) y = U::plus(y, *reinterpret_cast<const Vec<Y, n>*>(rows + c.topk * piece));
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(&s.empty);
      if (i < args.hidden_size)
        store_vector<n, n>(static_cast<typename U::T*>(args.out) + token * args.hidden_size, i, args.hidden_size, y);
      if (++stage == c.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

}  // namespace deepinfer
