// act(gate) * up, sixteen elements at a time. Include from kernel files only, as vec.h.
#pragma once

#include "activation.h"
#include "vec.h"

namespace {

using deepinfer::Gated;

// The standard normal distribution function, relative error below 1e-6 down to its denormals: no 1 + erf(x), which
// cancels for negative x. For a = |x|, with s = (a - 4) / (a + 4) in [-1, 1):
//   Phi(-a) = exp(-a^2 / 2) P(s) / (a + 4)
// P fits (a + 4) erfcx(a / sqrt 2) / 2 to 9e-9. The rounding error of a^2 is put back into the exponential.
inline F32 normal_cdf(F32 x) {
  const F32 a = min(splat(14.5f), abs(x));  // Phi(-14.5) rounds to 0; NaN stays
  const F32 r = 1.f / (a + 4.f);
  const F32 s = (a - 4.f) * r;
  F32 p = splat(-1.31974454e-4f);
  p = fma(p, s, splat(1.79349300e-4f));
  p = fma(p, s, splat(1.56992301e-3f));
  p = fma(p, s, splat(-3.51251052e-3f));
  p = fma(p, s, splat(-7.52527034e-3f));
  p = fma(p, s, splat(6.04038313e-2f));
  p = fma(p, s, splat(-1.86523438e-1f));
  p = fma(p, s, splat(3.87136906e-1f));
  p = fma(p, s, splat(-6.07896566e-1f));
  p = fma(p, s, splat(7.55285144e-1f));
  const F32 square = a * a;
  const F32 e = exp(-0.5f * square);
  const F32 error = fma(a, a, -square);
  const F32 tail = fma(e, -0.5f * error, e) * (p * r);
  return select(x > 0.f, 1.f - tail, tail);
}

// The activations as functions of one argument; `swish` stands for silu here. Both forms of gelu are x Phi(x), and the
// tanh form's 0.5 (1 + tanh(u)) is the logistic function of 2u.
template <Gated form>
inline F32 activate(F32 x) {
  if constexpr (form == Gated::gelu) return x * normal_cdf(x);
  if constexpr (form == Gated::gelu_tanh)
    return x / (1.f + exp(-1.59576912160573071f * x * (1.f + 0.044715f * x * x)));  // 2 sqrt(2 / pi)
  return x / (1.f + exp(-x));
}

// A gated activation for storage type T with its constants at hand. The last rounding to T is left to the caller.
template <typename T, Gated form>
struct Gating {
  F32 limit, alpha, up_offset;

  // A limit that T cannot hold acts as the nearest value of T, as in a clamp of that type.
  Gating(float limit, float alpha, float up_offset)
      : limit(splat(round_to1<T>(limit))), alpha(splat(alpha)), up_offset(splat(up_offset)) {}

  F32 operator()(F32 gate, F32 up) const {
    if constexpr (form == Gated::silu || form == Gated::swish) {
      gate = min(limit, gate);  // in this order NaN stays
      up = max(-limit, min(limit, up));
    }
    if constexpr (form != Gated::swish) return round_to<T>(activate<form>(gate)) * up;
    const F32 gated = round_to<T>(gate * round_to<T>(sigmoid(round_to<T>(alpha * gate))));
    return round_to<T>(up + up_offset) * gated;
  }
};

}  // namespace
