// Gated activations: act(gate) * up in one pass over memory. A row is cut into runs, and a block takes one run, or some
// short rows. Bound by memory: gate and up once, the result once, also when it is quantised on the way.
#pragma once

#include "activation_config.h"
#include "device.cuh"
#include "gated.cuh"
#include "quantizer.cuh"

namespace deepinfer {

// The pieces of gate and up of one thread, and their products.
template <auto c, typename Index>
struct GatedPieces {
  using T = Element<c.x>;
  static constexpr int wide = kVectorBytes / sizeof(T), n = c.interleaved ? wide / 2 : wide;  // results of a piece
  // Of pairs that alignment lets a load move, half as many results.
  static constexpr int access = c.interleaved ? (c.access + 1) / 2 : c.access;
  struct Pair { Vec<T, wide> gate, up; };

  const T *gate, *up;
  Index end;  // elements from there on are not read, but 0
  float weight = 0.f;
  Gating<T, c.form, c.limited> gating;

  DEVICE GatedPieces(const GatedArgs& args, int64_t gate_offset, int64_t up_offset, Index end)
      : gate(static_cast<const T*>(args.gate) + gate_offset),
        up(static_cast<const T*>(args.up) + (c.interleaved ? 0 : up_offset)),
        end(end),
        gating(args.limit, args.alpha, args.up_offset) {}

  DEVICE Pair load(Index i) const {
    Pair p;
    p.gate = load_vector<c.access, wide>(gate, c.interleaved ? 2 * i : i, c.interleaved ? 2 * end : end);
    if constexpr (!c.interleaved) p.up = load_vector<c.access, wide>(up, i, end);
    return p;
  }

  DEVICE Vec<T, n> product(const Pair& p) const {
    Vec<T, n> y;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const T a = p.gate.at[c.interleaved ? 2 * i : i], b = c.interleaved ? p.gate.at[2 * i + 1] : p.up.at[i];
      float product = gating(to_float(a), to_float(b));
      if constexpr (c.weighted) product = round_to<T>(product) * weight;
      y.at[i] = from_float<T>(product);
    }
    return y;
  }
};

template <GatedConfig c>
DEVICE void gated_activation(const GatedArgs& args) {
  using Pieces = GatedPieces<c, int64_t>;
  using T = typename Pieces::T;
  constexpr int n = Pieces::n, step = c.lanes * n, run = c.vectors * step;
  const uint32_t runs = uint32_t((args.size + run - 1) / run);
  const int64_t row = int64_t(blockIdx.x / runs) * c.rows + threadIdx.x / c.lanes;
  const int64_t first = int64_t(blockIdx.x % runs) * run + threadIdx.x % c.lanes * n;
  if (row >= args.gate_rows.count) return;
  Pieces pieces(args, row_offset<c.strided>(args.gate_rows, row), row_offset<c.strided>(args.up_rows, row), args.size);
  T* out = static_cast<T*>(args.out) + row * args.size;
  wait_for_previous_kernel();

  // All loads first, so that they are under way together.
  typename Pieces::Pair held[c.vectors];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) held[k] = pieces.load(first + k * step);
  pieces.weight = load_access<float, 1>(args.row_weights + row, c.weighted).at[0];
  let_next_kernel_start();

#pragma unroll
  for (int k = 0; k < c.vectors; ++k)
    store_vector<Pieces::access, n>(out, first + k * step, args.size, pieces.product(held[k]));
}

// The products stay in registers, where their group is quantised: as quantize_rows in quant.cuh.
template <GatedQuantConfig c>
DEVICE void gated_quant(const GatedQuantArgs& args) {
  using Index = IndexOf<c.longer>;
  using Pieces = GatedPieces<c, Index>;
  using T = typename Pieces::T;
  constexpr int n = Pieces::n, step = c.lanes * n;
  __shared__ float scratch[32];
  const GatedArgs& gated = args.gated;
  const QuantizedRows& out = args.quantized;
  const GroupPlace<c.lanes, c.groups, c.rows, Index> at(gated.gate_rows.count, gated.size, out.group,
                                                        out.scales.across, n, blockIdx.x);
  Pieces pieces(gated, row_offset<c.strided>(gated.gate_rows, at.row) + (c.interleaved ? 2 : 1) * at.begin,
                row_offset<c.strided>(gated.up_rows, at.row) + at.begin, at.size);
  wait_for_previous_kernel();

  int64_t slot = at.row;
  bool invalid = false;
  if constexpr (c.mapped) {  // rows without a slot are not read; what is no slot poisons its row
    slot = load_access<int32_t, 1>(args.rows_to_slots + at.row, at.active).at[0];
    invalid = slot < -1 || slot >= args.slots;
    if (slot < 0 || invalid) pieces.end = 0;
  }
  typename Pieces::Pair held[c.vectors];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) held[k] = pieces.load(at.first + k * step);
  if constexpr (c.weighted)
    pieces.weight = load_access<float, 1>(gated.row_weights + slot, at.active && pieces.end > 0).at[0];
  let_next_kernel_start();

  Vec<T, n> y[c.vectors];
  float amax = invalid ? __uint_as_float(0x7fffffff) : 0.f;
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    y[k] = pieces.product(held[k]);
    amax = max_or_nan(amax, largest_magnitude(y[k]));
  }
  if constexpr (c.longer)
    for (Index i = at.first + c.vectors * step; i < pieces.end; i += step)
      amax = max_or_nan(amax, largest_magnitude(pieces.product(pieces.load(i))));
  const GroupScale scale = scale_of<c.code, c.scale>(max_over<c.lanes>(amax, scratch));
  if (!at.active) return;
  if (threadIdx.x % c.lanes == 0)
    store_scale<c.scale>(out.scales, band_offset<c.scale>(out.scales, at.row), at.index, scale.stored);

  uint8_t* codes = static_cast<uint8_t*>(out.codes) + code_bytes<c.code>(at.row * gated.size + at.begin);
#pragma unroll
  for (int k = 0; k < c.vectors; ++k)
    store_codes<c.code, Pieces::access, n>(codes, at.first + k * step, at.size, scaled_codes<c.code>(y[k], scale));
  if constexpr (c.longer)
    for (Index i = at.first + c.vectors * step; i < at.size; i += step)
      store_codes<c.code, Pieces::access, n>(codes, i, at.size,
                                             scaled_codes<c.code>(pieces.product(pieces.load(i)), scale));
}

}  // namespace deepinfer
