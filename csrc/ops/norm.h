// What the norm ops hand to the kernels of any device.
#pragma once

#include "quant.h"

namespace deepinfer {

enum class WeightForm : int { cast_mul, mul_cast, one_plus, none };

struct RmsNormArgs {
  const void* x;         // rows of `hidden_size` elements of `dtype`
  const void* residual;  // added to x before the norm, or null
  const void* weight;    // [hidden_size] of weight_dtype, dense; null for WeightForm::none
  void* out;             // dense rows of out_dtype; null if they are quantised
  void* sum;             // dense rows of `dtype`: x + residual; null without a residual
  Rows x_rows, residual_rows;
  int64_t hidden_size;
  float eps;
  WeightForm form;
  DType dtype, weight_dtype, out_dtype;
  QuantizedRows quantized;  // the rows in out_dtype, if there is no `out`
};

}  // namespace deepinfer
