// The element types that a host compiler lacks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace twin {

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace twin

struct half {
  uint16_t bits;
};

struct bfloat16_t {
  uint16_t bits;
};

struct fp8_e4m3fn_t {
  uint8_t bits;
};

namespace twin {

inline float to_float(float x) { return x; }
inline float to_float(half x) { return float(bits_of<_Float16>(x.bits)); }
inline float to_float(bfloat16_t x) { return bits_of<float>(uint32_t(x.bits) << 16); }

inline float to_float(fp8_e4m3fn_t x) {
  const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  const float magnitude = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(8.f + float(mantissa), exponent - 10);
  if ((x.bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  return x.bits & 0x80 ? -magnitude : magnitude;
}

// To nearest, ties to even; what is too large becomes infinite, NaN stays NaN.
template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline half from_float<half>(float x) { return {bits_of<uint16_t>(_Float16(x))}; }
template <>
inline bfloat16_t from_float<bfloat16_t>(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  if (std::isnan(x)) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// e4m3 without infinities. What is too large, and NaN, is the caller's to refuse.
template <>
inline fp8_e4m3fn_t from_float<fp8_e4m3fn_t>(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude >= 448) return {uint8_t(sign | 0x7e)};
  if (magnitude < 0x1p-6f) return {uint8_t(sign | uint8_t(std::nearbyint(magnitude * 512)))};
  int exponent;
  std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, f in [0.5, 1)
  const float rounded = std::nearbyint(std::ldexp(magnitude, 4 - exponent));  // 8 to 16
  const int code = (exponent - 1 + 7) * 8 + int(rounded) - 8;
  return {uint8_t(sign | uint8_t(code))};
}

}  // namespace twin
