// Gated activations: act(gate) * up in one pass over memory. A row is cut into runs, and a block takes one run, or some
// short rows. Bound by memory: gate and up once, the result once.
#pragma once

#include "activation_config.h"
#include "device.cuh"
#include "gated.cuh"

namespace deepinfer {

template <GatedConfig c>
DEVICE void gated_activation(const GatedArgs& args) {
  using T = Element<c.x>;
  constexpr int wide = kVectorBytes / sizeof(T), n = c.interleaved ? wide / 2 : wide;  // results of a piece
  constexpr int step = c.lanes * n, run = c.vectors * step;
  const uint32_t runs = uint32_t((args.size + run - 1) / run);
  const int64_t row = int64_t(blockIdx.x / runs) * c.rows + threadIdx.x / c.lanes;
  const int64_t first = int64_t(blockIdx.x % runs) * run + threadIdx.x % c.lanes * n;
  if (row >= args.gate_rows.count) return;
  const T* gate = static_cast<const T*>(args.gate) + row_offset<c.strided>(args.gate_rows, row);
  T* out = static_cast<T*>(args.out) + row * args.size;
  const Gating<T, c.form, c.limited> gating(args.limit, args.alpha, args.up_offset);

  wait_for_previous_kernel();

  // All loads first, so that they are under way together.
  Vec<T, wide> held[c.vectors], other[c.vectors];
  if constexpr (c.interleaved) {
#pragma unroll
    for (int k = 0; k < c.vectors; ++k)
      held[k] = load_vector<Reuse::once, c.access, wide>(gate, 2 * (first + k * step), 2 * args.size);
  } else {
    const T* up = static_cast<const T*>(args.up) + row_offset<c.strided>(args.up_rows, row);
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) {
      held[k] = load_vector<Reuse::once, c.access, wide>(gate, first + k * step, args.size);
      other[k] = load_vector<Reuse::once, c.access, wide>(up, first + k * step, args.size);
    }
  }
  const float weight = load_access<Reuse::often, float, 1>(args.row_weights + row, c.weighted).at[0];
  let_next_kernel_start();

#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    Vec<T, n> y;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const T a = held[k].at[c.interleaved ? 2 * i : i], b = c.interleaved ? held[k].at[2 * i + 1] : other[k].at[i];
      float product = gating(to_float(a), to_float(b));
      if constexpr (c.weighted) product = round_to<T>(product) * weight;
      y.at[i] = from_float<T>(product);
    }
    // Of pairs that alignment lets a load move, half as many results.
    store_vector<c.interleaved ? (c.access + 1) / 2 : c.access, n>(out, first + k * step, args.size, y);
  }
}

}  // namespace deepinfer
