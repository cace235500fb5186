// The matrix unit of one warp: 16 x 16 times 16 x 8 of 16-bit elements, the products added to 16 x 8 floats.
//
// With g = lane / 4 and t = lane % 4, a lane holds
//   of the first factor   {[g, 2t], [g, 2t+1]}, the same of row g + 8, then both of columns 2t + 8 and 2t + 9
//   of the second factor  {[2t, g], [2t+1, g]}, {[2t+8, g], [2t+9, g]}
//   of the sums           [g, 2t], [g, 2t+1], [g+8, 2t], [g+8, 2t+1]
#pragma once

#include "device.cuh"

namespace deepinfer {

template <typename T>
DEVICE void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define DEEPINFER_MMA(type)                                                                          \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}," \
      " {%8, %9}, {%0, %1, %2, %3};"                                                                 \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (is_same<T, bf16>) DEEPINFER_MMA("bf16");
  else DEEPINFER_MMA("f16");
#undef DEEPINFER_MMA
}

// Of 8 x 8 elements of 16 bits, [g, 2t] and [g, 2t+1] in a lane, the transposed.
DEVICE uint32_t transposed(uint32_t pair) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pair));
  return y;
}

// The low halves of two words, and the high ones.
DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

}  // namespace deepinfer
