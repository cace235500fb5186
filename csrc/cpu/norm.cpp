// RMSNorm with and without a residual. One pass reads the row and accumulates the squares, a second one, out of the L1
// cache, scales it. Bound by memory: read x (and the residual), write the norm (and the sum).

#include "norm.h"

#include "vec.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

// xhat times the weight, with the roundings of the model's own code.
template <typename T, WeightForm form>
inline F32 apply_weight(F32 normed, F32 weight) {
  if constexpr (form == WeightForm::cast_mul) return round_to<T>(normed) * weight;
  if constexpr (form == WeightForm::mul_cast) return normed * weight;
  if constexpr (form == WeightForm::one_plus) return normed * (1.f + weight);
  return normed;
}

template <typename T, typename W, typename Out, WeightForm form, bool add>
void norm_row(const RmsNormArgs& args, int64_t row) {
  const int64_t n = args.hidden_size;
  const T* x = static_cast<const T*>(args.x) + row_offset(args.x_rows, row);
  const W* w = static_cast<const W*>(args.weight);
  Out* out = static_cast<Out*>(args.out) + row * n;
  F32 squares[4] = {};
  auto square_at = [&](int64_t i, int lane_group, F32 v) { squares[lane_group] = squares[lane_group] + v * v; };
  int64_t i = 0;
  int group = 0;
  if constexpr (add) {
    const T* r = static_cast<const T*>(args.residual) + row_offset(args.residual_rows, row);
    T* sum = static_cast<T*>(args.sum) + row * n;
    for (; i + kLanes <= n; i += kLanes, group = (group + 1) & 3) {
      F32 v = round_to<T>(load(x + i) + load(r + i));
      store(sum + i, v);
      square_at(i, group, v);
    }
    if (i < n) {
      F32 v = round_to<T>(load_part(x + i, n - i) + load_part(r + i, n - i));
      store_part(sum + i, v, n - i);
      square_at(i, group, v);
    }
    x = sum;
  } else {
    for (; i + kLanes <= n; i += kLanes, group = (group + 1) & 3) square_at(i, group, load(x + i));
    if (i < n) square_at(i, group, load_part(x + i, n - i));
  }
  const float mean = reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(n);
  const F32 scale = splat(1.f / __builtin_sqrtf(mean + args.eps));
  for (i = 0; i + kLanes <= n; i += kLanes) {
    F32 weight = form == WeightForm::none ? F32{} : load(w + i);
    store(out + i, apply_weight<T, form>(load(x + i) * scale, weight));
  }
  if (i < n) {
    F32 weight = form == WeightForm::none ? F32{} : load_part(w + i, n - i);
    store_part(out + i, apply_weight<T, form>(load_part(x + i, n - i) * scale, weight), n - i);
  }
}

template <typename T, typename W, typename Out, WeightForm form>
void norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    args.residual ? norm_row<T, W, Out, form, true>(args, row) : norm_row<T, W, Out, form, false>(args, row);
}

template <typename T, typename W>
void with_form(const RmsNormArgs& args, int64_t begin, int64_t end) {
  switch (args.form) {
    case WeightForm::cast_mul:  // the only form whose result type follows torch's promotion
      return args.out_dtype == args.dtype ? norm_rows<T, W, T, WeightForm::cast_mul>(args, begin, end)
                                          : norm_rows<T, W, float, WeightForm::cast_mul>(args, begin, end);
    case WeightForm::mul_cast: return norm_rows<T, W, T, WeightForm::mul_cast>(args, begin, end);
    case WeightForm::one_plus: return norm_rows<T, W, T, WeightForm::one_plus>(args, begin, end);
    case WeightForm::none: return norm_rows<T, W, T, WeightForm::none>(args, begin, end);
  }
}

template <typename T>
void with_weight(const RmsNormArgs& args, int64_t begin, int64_t end) {
  switch (args.weight_dtype) {
    case DType::f32: return with_form<T, float>(args, begin, end);
    case DType::bf16: return with_form<T, bf16>(args, begin, end);
    case DType::f16: return with_form<T, f16>(args, begin, end);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return with_weight<float>(args, begin, end);
    case DType::bf16: return with_weight<bf16>(args, begin, end);
    case DType::f16: return with_weight<f16>(args, begin, end);
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
