// act(gate) * up of one element, with the roundings of csrc/cpu/gated.h.
#pragma once

#include "../ops/activation.h"
#include "device.cuh"

namespace deepinfer {

// Within 2^-22 of the result; 0 for denormal ones.
DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2e = 1.44269504088896341f;

// x / (1 + exp(-t)). For the 16-bit types by approximations, which are off by far less than these types resolve. The
// quarter keeps the reciprocal normal for as long as exp(-t) is finite.
template <typename T>
DEVICE float times_logistic(float x, float t) {
  return 0.25f * x * fast_reciprocal(0.25f + fast_exp2(fmaf(t, -kLog2e, -2.f)));
}
template <>
DEVICE float times_logistic<float>(float x, float t) { return x / (1.f + expf(-t)); }

// The standard normal distribution function: see csrc/cpu/gated.h.
template <typename T>
DEVICE float normal_cdf(float x) {
  constexpr bool exact = sizeof(T) == 4;
  const float a = fminf(fabsf(x), 14.5f);
  const float r = exact ? 1.f / (a + 4.f) : fast_reciprocal(a + 4.f);
  const float s = (a - 4.f) * r;
  float p = -1.31974454e-4f;
  p = fmaf(p, s, 1.79349300e-4f);
  p = fmaf(p, s, 1.56992301e-3f);
  p = fmaf(p, s, -3.51251052e-3f);
  p = fmaf(p, s, -7.52527034e-3f);
  p = fmaf(p, s, 6.04038313e-2f);
  p = fmaf(p, s, -1.86523438e-1f);
  p = fmaf(p, s, 3.87136906e-1f);
  p = fmaf(p, s, -6.07896566e-1f);
  p = fmaf(p, s, 7.55285144e-1f);
  const float square = a * a;
  float tail;
  if constexpr (exact) {
    const float e = expf(-0.5f * square), error = fmaf(a, a, -square);
    tail = fmaf(e, -0.5f * error, e) * (p * r);
  } else {  // the square is exact; the exponential stays normal
    tail = fast_exp2(fmaf(square, -0.5f * kLog2e, 24.f)) * (p * r) * 0x1p-24f;
  }
  return x > 0.f ? 1.f - tail : tail;
}

// `swish` stands for silu here.
template <typename T, Gated form>
DEVICE float activate(float x) {
  if constexpr (form == Gated::gelu) return x * normal_cdf<T>(x);
  if constexpr (form == Gated::gelu_tanh)
    return times_logistic<T>(x, 1.59576912160573071f * x * (1.f + 0.044715f * x * x));  // 2 sqrt(2 / pi)
  return times_logistic<T>(x, x);
}

// A gated activation for storage type T. The last rounding to T is left to the caller.
template <typename T, Gated form, bool limited>
struct Gating {
  float limit, alpha, up_offset;

  // A limit that T cannot hold acts as the nearest value of T, as in a clamp of that type.
  DEVICE Gating(float limit, float alpha, float up_offset)
      : limit(round_to<T>(limit)), alpha(alpha), up_offset(up_offset) {}

  DEVICE float operator()(float gate, float up) const {
    if constexpr (limited) {  // by comparisons, which NaN passes
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up < -limit ? -limit : up;
    }
    if constexpr (form != Gated::swish) return round_to<T>(activate<T, form>(gate)) * up;
    const float logistic = round_to<T>(times_logistic<T>(1.f, round_to<T>(alpha * gate)));
    return round_to<T>(up + up_offset) * round_to<T>(gate * logistic);
  }
};

}  // namespace deepinfer
