// From columns to rows: copies of matrices with dense columns. Include from kernel files only, as vec.h.
#pragma once

#include "vec.h"

namespace {

constexpr int kTransposed = 16;  // columns of a block
template <typename T>
constexpr int kTransposedDepth = 64 / sizeof(T);  // its rows

#if defined(__AVX512F__)
// Rows to columns of a 16 x 16 matrix.
inline void transpose(U32 (&r)[16]) {
  U32 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int a = i / 2 * 4 + i % 2, b = a + 2, to = i / 2 * 4 + i % 2 * 2;
    r[to] = __builtin_shufflevector(t[a], t[b], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[to + 1] = __builtin_shufflevector(t[a], t[b], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  // r[4 g + j]: the 128-bit lane l holds column 4 l + j of the rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const U32 low[2] = {
        __builtin_shufflevector(r[j], r[4 + j], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
        __builtin_shufflevector(r[8 + j], r[12 + j], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)};
    const U32 high[2] = {
        __builtin_shufflevector(r[j], r[4 + j], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31),
        __builtin_shufflevector(r[8 + j], r[12 + j], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)};
    t[j] = __builtin_shufflevector(low[0], low[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[4 + j] = __builtin_shufflevector(high[0], high[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[8 + j] = __builtin_shufflevector(low[0], low[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    t[12 + j] = __builtin_shufflevector(high[0], high[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}
#endif

// to[n * to_stride + k] = from[k * from_stride + n] for n < kTransposed and k < kTransposedDepth<T>. The rows of `from`
// are far apart in memory, where no hardware prefetcher finds them: those of the next block but one are fetched here.
template <typename T>
void transpose_block(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
#if defined(__AVX512F__)
  const T* ahead = from + 2 * kTransposedDepth<T> * from_stride;
  U32 r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if constexpr (sizeof(T) == 4) {
      std::memcpy(&r[i], from + i * from_stride, sizeof(r[i]));
      __builtin_prefetch(ahead + i * from_stride);
    } else {
      U16 even, odd;
      std::memcpy(&even, from + 2 * i * from_stride, sizeof(even));
      std::memcpy(&odd, from + (2 * i + 1) * from_stride, sizeof(odd));
      __builtin_prefetch(ahead + 2 * i * from_stride);
      __builtin_prefetch(ahead + (2 * i + 1) * from_stride);
      r[i] = widen(even) | widen(odd) << 16;
    }
  }
  transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &r[i], sizeof(r[i]));
#else
  for (int k = 0; k < kTransposedDepth<T>; ++k)
    for (int n = 0; n < kTransposed; ++n) to[n * to_stride + k] = from[k * from_stride + n];
#endif
}

}  // namespace
