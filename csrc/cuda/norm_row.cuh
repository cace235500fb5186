// The arithmetic of an RMSNorm, for the kernels that have one inside.
#pragma once

#include "../ops/norm.h"
#include "device.cuh"

namespace deepinfer {

// Of elements [first, last).
template <int first, int last, typename T, int n>
DEVICE float sum_of_squares(const Vec<T, n>& x) {
  float total = 0;
#pragma unroll
  for (int i = first; i < last; ++i) total += value(x, i) * value(x, i);
  return total;
}
template <typename T, int n>
DEVICE float sum_of_squares(const Vec<T, n>& x) { return sum_of_squares<0, n>(x); }

DEVICE float inverse_norm(float squares, int64_t size, float eps) { return 1.f / sqrtf(squares / float(size) + eps); }

// x times the inverse norm and the weight, with the roundings of the model's own code.
template <typename Out, WeightForm form, typename T, typename W, int n>
DEVICE Vec<Out, n> normed(const Vec<T, n>& x, const Vec<W, n>& weight, float scale) {
  const auto xhat = [&](int i) { return value(x, i) * scale; };
  if constexpr (form == WeightForm::cast_mul) {
    const auto cast = rounded<T, n>(xhat);
    if constexpr (is_same<T, W> && is_same<T, Out>) return product(cast, weight);
    else return rounded<Out, n>([&](int i) { return value(cast, i) * value(weight, i); });
  } else if constexpr (form == WeightForm::none) {
    return rounded<Out, n>(xhat);
  } else {
    return rounded<Out, n>([&](int i) {
      const float w = value(weight, i);
      return xhat(i) * (form == WeightForm::one_plus ? 1.f + w : w);
    });
  }
}

}  // namespace deepinfer
