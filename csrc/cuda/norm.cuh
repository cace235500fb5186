// RMSNorm with and without a residual. A row is read once, held in registers while its squares are summed, and written
// once: bound by memory.
#pragma once

#include "device.cuh"
#include "norm_config.h"

namespace deepinfer {

template <typename T, WeightForm form>
DEVICE float apply_weight(float normed, float weight) {
  if constexpr (form == WeightForm::cast_mul) return round_to<T>(normed) * weight;
  if constexpr (form == WeightForm::mul_cast) return normed * weight;
  if constexpr (form == WeightForm::one_plus) return normed * (1.f + weight);
  return normed;
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

  const int64_t size = args.hidden_size;
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

  auto read = [&](int64_t i) { return load_vector<Reuse::once, c.access, n>(x, i, size); };
  auto read_weight = [&](int64_t i) {
    if constexpr (weighted) return load_vector<Reuse::often, c.access, n>(weight, i, size);
    else return Vec<W, n>{};
  };
  auto add_residual = [&](Values& v, const Values& r, int64_t i) {
#pragma unroll
    for (int j = 0; j < n; ++j) v.at[j] = from_float<T>(to_float(v.at[j]) + to_float(r.at[j]));
    if (active) store_vector<c.access, n>(sum, i, size, v);
  };
  auto squares = [&](const Values& v) {
    float total = 0;
#pragma unroll
    for (int j = 0; j < n; ++j) total += to_float(v.at[j]) * to_float(v.at[j]);
    return total;
  };
  auto write = [&](const Values& v, const Vec<W, n>& w, float scale, int64_t i) {
    Vec<Out, n> y;
#pragma unroll
    for (int j = 0; j < n; ++j)
      y.at[j] = from_float<Out>(apply_weight<T, c.form>(to_float(v.at[j]) * scale, to_float(w.at[j])));
    if (active) store_vector<c.access, n>(out, i, size, y);
  };

  // All loads first, so that they are under way together.
  Values held[c.vectors];
  Vec<W, n> weights[c.vectors];
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) held[k] = read(first + k * step);
  const T* residual = nullptr;
  if constexpr (c.add) {
    residual = static_cast<const T*>(args.residual) + row_offset<c.strided>(args.residual_rows, row);
    Values other[c.vectors];
#pragma unroll
    for (int k = 0; k < c.vectors; ++k)
      other[k] = load_vector<Reuse::once, c.access, n>(residual, first + k * step, size);
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) weights[k] = read_weight(first + k * step);
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) add_residual(held[k], other[k], first + k * step);
  } else {
#pragma unroll
    for (int k = 0; k < c.vectors; ++k) weights[k] = read_weight(first + k * step);
  }
  let_next_kernel_start();

  float total = 0;
#pragma unroll
  for (int k = 0; k < c.vectors; ++k) total += squares(held[k]);
  if constexpr (c.longer) {
    for (int64_t i = first + c.vectors * step; i < size; i += step) {
      Values v = read(i);
      if constexpr (c.add) add_residual(v, load_vector<Reuse::once, c.access, n>(residual, i, size), i);
      total += squares(v);
    }
  }
  const float mean = sum_over<c.lanes>(total, scratch) / float(size);
  const float scale = 1.f / sqrtf(mean + args.eps);

#pragma unroll
  for (int k = 0; k < c.vectors; ++k) write(held[k], weights[k], scale, first + k * step);
  if constexpr (c.longer) {
    const T* again = c.add ? sum : x;  // each thread reads what it has itself written
    for (int64_t i = first + c.vectors * step; i < size; i += step)
      write(load_vector<Reuse::once, c.access, n>(again, i, size), read_weight(i), scale, i);
  }
}

}  // namespace deepinfer
