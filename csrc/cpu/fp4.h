// Conversions between float32 and the codes of float4_e2m1, one a byte, sixteen at a time. Include from kernel files
// only, as vec.h.
#pragma once

#include "vec.h"

namespace {

// Round to nearest even; beyond 6 saturates. x must not be NaN.
inline U8 to_e2m1(F32 x) {
  const F32 a = min(abs(x), splat(6.f));
  // The 22 mantissa bits that go, rounded; a carry moves on into the exponent, whose bias goes from 127 to 1.
  const I32 bits = bit_cast<I32>(a);
  const I32 normal = (bits + ((bits >> 22) & 1) + (0x1fffff - (126 << 23))) >> 22;
  // Below 1 the codes are multiples of 1/2, and so are the floats from 2^22: the addition rounds.
  const I32 subnormal = bit_cast<I32>(a + 0x1p22f) & 7;
  const I32 code = a < 1.f ? subnormal : normal;
  return to_u8(bit_cast<U32>(code | ((bit_cast<I32>(x) >> 28) & 8)));
}

inline F32 from_e2m1(U8 codes) {
  const I32 code = bit_cast<I32>(widen(codes));
  const I32 magnitude = code & 7;
  const F32 normal = bit_cast<F32>((magnitude << 22) + (126 << 23));
  const F32 value = magnitude < 2 ? __builtin_convertvector(magnitude, F32) * 0.5f : normal;
  return bit_cast<F32>(bit_cast<I32>(value) | ((code & 8) << 28));
}

typedef uint8_t U8x8 __attribute__((vector_size(8)));

// Two a byte, the first in the low nibble, and back.
inline U8x8 pack_pairs(U8 codes) {
  return __builtin_shufflevector(codes, codes, 0, 2, 4, 6, 8, 10, 12, 14) |
         (__builtin_shufflevector(codes, codes, 1, 3, 5, 7, 9, 11, 13, 15) << 4);
}

inline U8 unpack_pairs(U8x8 bytes) {
  const U8x8 low = bytes & 15, high = bytes >> 4;
  return __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
}

}  // namespace
