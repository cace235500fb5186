// The register tile of the grouped product: kTileRows rows of x against kTileColumns rows of a weight whose k is dense.
//
// Every sum is a dot product along k: the lanes of one accumulator hold partial sums of interleaved k, added in a fixed
// tree at the end. So a weight is read once, in storage order, without packing, which is what decoding is bound by; and
// an element of the result never depends on how many other rows or columns are computed with it.
#pragma once

#include <type_traits>

#include "vec.h"

namespace {

#if defined(__AVX512F__)
constexpr int kTileColumns = 6, kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kTileColumns = 3, kVectorBytes = 32;
#else
constexpr int kTileColumns = 3, kVectorBytes = 16;
#endif
constexpr int kTileRows = 4;
constexpr int kVector = kVectorBytes / 4;
typedef float Sum __attribute__((vector_size(kVectorBytes)));

// What multiplies with what: Packed is the storage of the packed x, Operand a register of kStep elements.
template <typename T>
struct Unit {
  using Packed = float;
  using Operand = Sum;
  static constexpr int kStep = kVector;

  static Operand load_packed(const float* p) {
    Operand r;
    std::memcpy(&r, p, sizeof(r));
    return r;
  }
  static Operand load_weight(const T* p) {
#if defined(__AVX512F__)
    return load(p);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4) return (Sum)_mm256_loadu_ps(p);
    const __m128i half = _mm_loadu_si128((const __m128i*)p);
    if constexpr (dtype_of<T>::value == DType::f16) return (Sum)_mm256_cvtph_ps(half);
    return (Sum)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    if constexpr (dtype_of<T>::value == DType::bf16) {
      typedef uint16_t Bits __attribute__((vector_size(kVectorBytes / 2)));
      typedef uint32_t Wide __attribute__((vector_size(kVectorBytes)));
      Bits bits;
      std::memcpy(&bits, p, sizeof(bits));
      return bit_cast<Sum>(__builtin_convertvector(bits, Wide) << 16);
    }
    Operand r;
    for (int i = 0; i < kVector; ++i) r[i] = load1(p + i);
    return r;
#endif
  }
  static Operand load_weight_part(const T* p, int n) {
    Operand r{};
    for (int i = 0; i < n; ++i) r[i] = load1(p + i);
    return r;
  }
  // One step of x; zeros fill an incomplete one.
  static void pack(const T* x, int n, Packed* out) {
    const Operand values = n == kStep ? load_weight(x) : load_weight_part(x, n);
    std::memcpy(out, &values, sizeof(values));
  }
  static Sum multiply_add(Sum sum, Operand x, Operand w) {
#if defined(__AVX512F__)
    return (Sum)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined(__AVX2__)
    return (Sum)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#else
    return sum + x * w;
#endif
  }
};

#if defined(__AVX512BF16__)
// Pairs of bf16 multiply into one float32 lane.
template <>
struct Unit<bf16> {
  using Packed = bf16;
  using Operand = __m512i;
  static constexpr int kStep = 2 * kVector;

  static Operand load_packed(const bf16* p) { return _mm512_loadu_si512(p); }
  static Operand load_weight(const bf16* p) { return _mm512_loadu_si512(p); }
  static Operand load_weight_part(const bf16* p, int n) {
    return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << n) - 1), p);
  }
  static void pack(const bf16* x, int n, bf16* out) {
    _mm512_storeu_si512(out, n == kStep ? load_weight(x) : load_weight_part(x, n));
  }
  static Sum multiply_add(Sum sum, Operand x, Operand w) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
  }
};
#endif

#if defined(__AVX512F__)
// Each adds lanes at one distance (8, 4, 2, 1) of both arguments and keeps the sums of a and b apart.
inline F32 halves(F32 a, F32 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline F32 quarters(F32 a, F32 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
inline F32 pairs(F32 a, F32 b) {
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline F32 neighbours(F32 a, F32 b) {
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// The lane sums of a 4 x 6 tile, transposing while adding.
inline void store_sums(const Sum (&sum)[4][6], int rows, float* out, int64_t out_stride) {
  F32 column[4];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) column[n] = quarters(halves(sum[0][n], sum[1][n]), halves(sum[2][n], sum[3][n]));
  const F32 first = neighbours(pairs(column[0], column[1]), pairs(column[2], column[3]));
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n)
    column[n] = quarters(halves(sum[0][4 + n], sum[1][4 + n]), halves(sum[2][4 + n], sum[3][4 + n]));
  const F32 both = pairs(column[0], column[1]);
  const F32 last = neighbours(both, both);
  float a[16], b[16];
  store(a, first);
  store(b, last);
  for (int m = 0; m < rows; ++m) {
    std::memcpy(out + m * out_stride, a + 4 * m, 16);
    std::memcpy(out + m * out_stride + 4, b + 4 * m, 8);
  }
}
#else
inline float lane_sum(Sum x) {
  float a[kVector];
  std::memcpy(a, &x, sizeof(a));
  for (int width = kVector / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  return a[0];
}

inline void store_sums(const Sum (&sum)[kTileRows][kTileColumns], int rows, float* out, int64_t out_stride) {
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < kTileColumns; ++n) out[m * out_stride + n] = lane_sum(sum[m][n]);
}
#endif

// Columns of a weight: vectors along k that start `stride` elements apart.
template <typename T>
struct Columns {
  const T* first;
  int64_t stride, count;

  Columns from(int64_t n) const { return {first + n * stride, stride, count - n}; }
};

// out[m, n] = dot(packed row m, column n) for `rows` packed rows, stored as kStep elements of each row in turn.
// Meanwhile the columns `ahead` come into the L2 cache; a hardware prefetcher does not see where the next ones start.
template <typename T, int rows>
void multiply_tile(const typename Unit<T>::Packed* x, const T* const (&column)[kTileColumns], int64_t depth,
                   Columns<T> ahead, float* out, int64_t out_stride) {
  using U = Unit<T>;
  Sum sum[kTileRows][kTileColumns];
#pragma GCC unroll 4
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kTileColumns; ++n) sum[m][n] = Sum{};
  auto step = [&](auto load_weight) {
    typename U::Operand w[kTileColumns];
#pragma GCC unroll 8
    for (int n = 0; n < kTileColumns; ++n) w[n] = load_weight(column[n]);
#pragma GCC unroll 4
    for (int m = 0; m < rows; ++m) {
      const typename U::Operand v = U::load_packed(x + m * U::kStep);
#pragma GCC unroll 8
      for (int n = 0; n < kTileColumns; ++n) sum[m][n] = U::multiply_add(sum[m][n], v, w[n]);
    }
    x += rows * U::kStep;
  };
  int64_t k = 0;
  for (; k + U::kStep <= depth; k += U::kStep) {
    const T* line = ahead.first + k;
    for (int64_t i = 0; i < ahead.count; ++i, line += ahead.stride) __builtin_prefetch(line, 0, 2);
    step([k](const T* p) { return U::load_weight(p + k); });
  }
  if (k < depth) step([k, depth](const T* p) { return U::load_weight_part(p + k, int(depth - k)); });
  store_sums(sum, rows, out, out_stride);
}

}  // namespace
