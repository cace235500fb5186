// RMSNorm with and without a residual. A row is read once, held in registers while its squares are summed, and written
// once, as it is or as codes and scales: bound by memory.
#pragma once

#include "norm_config.h"
#include "norm_row.cuh"
#include "quantizer.cuh"

namespace deepinfer {

// Piece k of a thread begins at element first + k * lanes * n. A group lies within one piece of each of its threads, or
// is the whole row. Its threads make the scales of their groups in parallel, one each: divisions cost more than
// shuffles.
template <RmsNormConfig c, typename Out, int n>
DEVICE void quantize_row(const QuantizedRows& out, const Vec<Out, n> (&y)[c.vectors], int64_t row, int first, int size,
                         bool active) {
  __shared__ float scratch[32];
  constexpr int lanes = c.group_lanes, step = c.lanes * n, groups = c.row_scale ? 1 : c.vectors;
  float amax[groups] = {};
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) amax[k % groups] = max_or_nan(amax[k % groups], largest_magnitude(y[k]));
#pragma unroll
  for (int k = 0; k < groups; ++k) amax[k] = max_over<lanes>(amax[k], scratch);

  constexpr int turns = (groups + lanes - 1) / lanes;
  const int lane = threadIdx.x % lanes;
  const int64_t band = band_offset<c.scale>(out.scales, row);
  float factors[turns];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    float own = amax[turn * lanes];
#pragma unroll
    for (int k = turn * lanes + 1; k < groups; ++k)
      if (k == turn * lanes + lane) own = amax[k];
    const auto scale = scale_of<c.code, c.scale>(own);
    factors[turn] = scale.factor;
    const int k = turn * lanes + lane, begin = first - lane * n + k * step;
    if (active && k < groups && begin < size)
      store_scale<c.scale>(out.scales, band, c.row_scale ? 0 : begin / (lanes * n), scale.stored);
  }

  auto* codes = static_cast<uint8_t*>(out.codes) + row * code_bytes<c.code>(int64_t(size));
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) {
    const float largest = amax[k % groups];
    GroupScale scale{largest - largest, factors[0]};  // NaN if there is no scale
    if constexpr (!c.row_scale) scale.factor = __shfl_sync(0xffffffff, factors[k / lanes], k % lanes, lanes);
    const int i = first + k * step;
    if (active) store_codes<c.code, c.access, n>(codes, i, size, scaled_codes<c.code>(y[k], scale));
  }
}

template <RmsNormConfig c>
DEVICE void rms_norm(const RmsNormArgs& args) {
  using T = Element<c.x>;
  using W = Element<c.weight>;
  using Out = Element<c.out>;
  constexpr int n = kVectorBytes / sizeof(T);
  constexpr int step = c.lanes * n;
  constexpr bool weighted = c.form != WeightForm::none;
  using Values = Vec<T, n>;
  __shared__ float scratch[32];

  using Size = Choose<c.longer, int64_t, int>;  // what fits registers is short
  Size size = Size(args.hidden_size);
  if constexpr (!c.longer) asm("" : "+r"(size));  // or the compiler goes on in 64 bits
  const int64_t wanted = int64_t(blockIdx.x) * c.rows + threadIdx.x / c.lanes;
  // Threads past the last row repeat it, for the sake of the shuffles, and write nothing.
  const bool active = c.rows == 1 || wanted < args.x_rows.count;
  const int64_t row = active ? wanted : args.x_rows.count - 1;
  const int first = threadIdx.x % c.lanes * n;
  const T* x = static_cast<const T*>(args.x) + row_offset<c.strided>(args.x_rows, row);
  const W* weight = static_cast<const W*>(args.weight);
  Out* out = static_cast<Out*>(args.out) + row * size;
  T* sum = static_cast<T*>(args.sum) + row * size;

  wait_for_previous_kernel();

  auto read = [&](Size i) { return load_vector<c.access, n>(x, i, size); };
  auto read_weight = [&](Size i) {
    if constexpr (weighted) return load_vector<c.access, n>(weight, i, size);
    else return Vec<W, n>{};
  };
  auto add_residual = [&](Values& v, const Values& r, Size i) {
    v = deepinfer::sum(v, r);
    if (active) store_vector<c.access, n>(sum, i, size, v);
  };
  auto write = [&](const Values& v, const Vec<W, n>& w, float scale, Size i) {
    const auto y = normed<Out, c.form>(v, w, scale);
    if (active) store_vector<c.access, n>(out, i, size, y);
  };

  // All loads first, so that they are under way together.
  Values held[c.vectors];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) held[k] = read(first + k * step);
  const T* residual = nullptr;
  if constexpr (c.add) {
    residual = static_cast<const T*>(args.residual) + row_offset<c.strided>(args.residual_rows, row);
    Values other[c.vectors];
#pragma unroll
    for (int k = 0; k < c.vectors; ++k)
      other[k] = load_vector<c.access, n>(residual, first + k * step, size);
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) add_residual(held[k], other[k], first + k * step);
  }
  Vec<W, n> weights[c.vectors];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) weights[k] = read_weight(first + k * step);
  let_next_kernel_start();

  float total = 0;
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) total += sum_of_squares(held[k]);
  if constexpr (c.longer) {
    for (int64_t i = first + c.vectors * step; i < size; i += step) {
      Values v = read(i);
      if constexpr (c.add) add_residual(v, load_vector<c.access, n>(residual, i, size), i);
      total += sum_of_squares(v);
    }
  }
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) forget_conversions(held[k]);
  const float scale = inverse_norm(sum_over<c.lanes>(total, scratch), size, args.eps);

  if constexpr (c.group_lanes > 0) {
    Vec<Out, n> y[c.vectors];
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) y[k] = normed<Out, c.form>(held[k], weights[k], scale);
    quantize_row<c>(args.quantized, y, row, first, size, active);
  } else {
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) write(held[k], weights[k], scale, first + k * step);
  }
  if constexpr (c.longer) {
    const T* again = c.add ? sum : x;  // each thread reads what it has itself written
    for (int64_t i = first + c.vectors * step; i < size; i += step)
      write(load_vector<c.access, n>(again, i, size), read_weight(i), scale, i);
  }
}

}  // namespace deepinfer
