// Conversions between float32 and float8_e4m3fn, sixteen at a time. Include from kernel files only, as vec.h.
#pragma once

#include "vec.h"

namespace {

// Round to nearest even; beyond 448 saturates. x must not be NaN.
inline U8 to_e4m3(F32 x) {
  const F32 a = min(abs(x), splat(448.f));
  // The 20 mantissa bits that go, rounded; a carry moves on into the exponent, whose bias goes from 127 to 7.
  const I32 bits = bit_cast<I32>(a);
  const I32 normal = (bits + ((bits >> 20) & 1) + (0x7ffff - (120 << 23))) >> 20;
  // Below 2^-6 the codes are multiples of 2^-9, and so are the floats from 2^14: the addition rounds.
  const I32 subnormal = bit_cast<I32>(a + 0x1p14f);
  const I32 code = a < 0x1p-6f ? subnormal : normal;  // in the low byte
  return to_u8(bit_cast<U32>(code | ((bit_cast<I32>(x) >> 24) & 0x80)));
}

inline F32 from_e4m3(U8 codes) {
  const I32 code = bit_cast<I32>(widen(codes));
  const I32 magnitude = code & 0x7f;
  const F32 normal = bit_cast<F32>((magnitude << 20) + (120 << 23));
  const F32 subnormal = __builtin_convertvector(magnitude, F32) * 0x1p-9f;
  const F32 finite = magnitude < 8 ? subnormal : normal;
  const F32 value = magnitude == 0x7f ? splat(__builtin_nanf("")) : finite;
  return bit_cast<F32>(bit_cast<I32>(value) | ((code & 0x80) << 24));
}

// A code of float8_e4m3fn.
struct e4m3 { uint8_t bits; };
inline F32 load(const e4m3* p) { U8 codes; std::memcpy(&codes, p, sizeof(codes)); return from_e4m3(codes); }
inline float load1(const e4m3* p) { return from_e4m3(U8{p->bits})[0]; }

}  // namespace
