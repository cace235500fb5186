// RMSNorm with and without a residual. Bound by memory: read x (and the residual), write the norm (and the sum). A row
// that is to be quantised goes into a scratch, out of which its codes are made.

#include "norm.h"

#include "norm_row.h"
#include "quantizer.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

template <typename T, typename W, typename Out, WeightForm form, typename To>
inline void norm_row_of(const RmsNormArgs& args, int64_t row, To* out) {
  const int64_t n = args.hidden_size;
  const W* weight = static_cast<const W*>(args.weight);
  const T* x = static_cast<const T*>(args.x) + row_offset(args.x_rows, row);
  if (!args.residual) return norm_row<T, W, Out, form, false>(x, nullptr, weight, out, nullptr, n, args.eps);
  const T* residual = static_cast<const T*>(args.residual) + row_offset(args.residual_rows, row);
  norm_row<T, W, Out, form, true>(x, residual, weight, out, static_cast<T*>(args.sum) + row * n, n, args.eps);
}

template <typename T, typename W, typename Out, WeightForm form>
void norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  if (args.out) {
    for (int64_t row = begin; row < end; ++row)
      norm_row_of<T, W, Out, form>(args, row, static_cast<Out*>(args.out) + row * args.hidden_size);
  } else {
    const Scratch<float> scratch(args.hidden_size, args.hidden_size);
    for (int64_t row = begin; row < end; ++row) {
      norm_row_of<T, W, Out, form>(args, row, scratch.data());
      quantize_piece(scratch.data(), args.hidden_size, args.quantized, row, args.hidden_size, 0);
    }
  }
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
