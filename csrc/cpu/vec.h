// Sixteen floats at a time, on any instruction set, by the compiler's own vector types. Include from kernel files only:
// everything is in an unnamed namespace, since each file is compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using deepinfer::DType;

constexpr int kLanes = 16;
typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef uint8_t U8 __attribute__((vector_size(16)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <typename T> struct dtype_of;
template <> struct dtype_of<float> { static constexpr DType value = DType::f32; };
template <> struct dtype_of<bf16> { static constexpr DType value = DType::bf16; };
template <> struct dtype_of<f16> { static constexpr DType value = DType::f16; };

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline F32 splat(float x) { return F32{} + x; }
inline F32 select(I32 mask, F32 a, F32 b) { return mask ? a : b; }
// If one is NaN, the second one.
#if defined(__AVX512F__)
inline F32 max(F32 a, F32 b) { return (F32)_mm512_max_ps((__m512)a, (__m512)b); }
inline F32 min(F32 a, F32 b) { return (F32)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline F32 max(F32 a, F32 b) { return a > b ? a : b; }
inline F32 min(F32 a, F32 b) { return a < b ? a : b; }
#endif
inline F32 abs(F32 x) { return bit_cast<F32>(bit_cast<U32>(x) & 0x7fffffffu); }

inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  F32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

inline float reduce_add(F32 x) {
  // A fixed tree, so that the sum is the same on every instruction set.
  float a[kLanes];
  std::memcpy(a, &x, sizeof(a));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  return a[0];
}

inline float reduce_max(F32 x) {
  float a[kLanes];
  std::memcpy(a, &x, sizeof(a));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  return a[0];
}

// ---- integer widths: compilers split these conversions more than the hardware needs -------------------------------

inline U32 widen(U16 x) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu16_epi32((__m256i)x);
#else
  return __builtin_convertvector(x, U32);
#endif
}

inline U32 widen(U8 x) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu8_epi32((__m128i)x);
#else
  return __builtin_convertvector(__builtin_convertvector(x, U16), U32);
#endif
}

// The low bits of each lane.
inline U16 to_u16(U32 x) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, U16);
#endif
}

inline U8 to_u8(U32 x) {
#if defined(__AVX512F__)
  return (U8)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector(__builtin_convertvector(x, U16), U8);
#endif
}

// ---- conversions: round to nearest even, NaN stays NaN -------------------------------------------------------------

// The bf16 bits in the upper halves; the lower ones are left over.
inline U32 bf16_above(F32 x) {
  U32 u = bit_cast<U32>(x);
  return x != x ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1u);
}

inline U16 to_bf16(F32 x) { return to_u16(bf16_above(x) >> 16); }

inline F32 from_bf16(U16 x) { return bit_cast<F32>(widen(x) << 16); }

inline uint16_t to_bf16(float x) {
  uint32_t u = bit_cast<uint32_t>(x);
  if (x != x) return uint16_t((u >> 16) | 0x40u);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float from_bf16(uint16_t x) { return bit_cast<float>(uint32_t(x) << 16); }

inline float from_f16(uint16_t x) { return float(bit_cast<_Float16>(x)); }
inline uint16_t to_f16(float x) { return bit_cast<uint16_t>(_Float16(x)); }

inline F32 from_f16(U16 x) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  __m128i in[2];
  std::memcpy(in, &x, sizeof(in));
  const __m256 out[2] = {_mm256_cvtph_ps(in[0]), _mm256_cvtph_ps(in[1])};
  F32 r;
  std::memcpy(&r, out, sizeof(r));
  return r;
#else
  F32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = from_f16(uint16_t(x[i]));
  return r;
#endif
}

inline U16 to_f16(F32 x) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  __m256 in[2];
  std::memcpy(in, &x, sizeof(in));
  const __m128i out[2] = {_mm256_cvtps_ph(in[0], _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(in[1], _MM_FROUND_TO_NEAREST_INT)};
  U16 r;
  std::memcpy(&r, out, sizeof(r));
  return r;
#else
  U16 r;
  for (int i = 0; i < kLanes; ++i) r[i] = to_f16(float(x[i]));
  return r;
#endif
}

// ---- memory --------------------------------------------------------------------------------------------------------

inline F32 load(const float* p) { F32 r; std::memcpy(&r, p, sizeof(r)); return r; }
inline F32 load(const bf16* p) { U16 r; std::memcpy(&r, p, sizeof(r)); return from_bf16(r); }
inline F32 load(const f16* p) { U16 r; std::memcpy(&r, p, sizeof(r)); return from_f16(r); }
inline void store(float* p, F32 x) { std::memcpy(p, &x, sizeof(x)); }
inline void store(bf16* p, F32 x) { U16 r = to_bf16(x); std::memcpy(p, &r, sizeof(r)); }
inline void store(f16* p, F32 x) { U16 r = to_f16(x); std::memcpy(p, &r, sizeof(r)); }

inline float load1(const float* p) { return *p; }
inline float load1(const bf16* p) { return from_bf16(p->bits); }
inline float load1(const f16* p) { return from_f16(p->bits); }
inline void store1(float* p, float x) { *p = x; }
inline void store1(bf16* p, float x) { p->bits = to_bf16(x); }
inline void store1(f16* p, float x) { p->bits = to_f16(x); }

// The first n (< 16) elements; the other lanes hold `fill`.
template <typename T>
inline F32 load_part(const T* p, int n, float fill = 0.f) {
  F32 r = splat(fill);
  for (int i = 0; i < n; ++i) r[i] = load1(p + i);
  return r;
}
template <typename T>
inline void store_part(T* p, F32 x, int n) {
  for (int i = 0; i < n; ++i) store1(p + i, x[i]);
}

// The same for n <= 16; a constant n = 16 costs nothing.
template <typename T>
inline F32 load(const T* p, int n) { return n == kLanes ? load(p) : load_part(p, n); }
template <typename T>
inline void store(T* p, F32 x, int n) { n == kLanes ? store(p, x) : store_part(p, x, n); }

// Calls f(i, n) for the pieces [i, i + n) of [0, size): n is 16, and less in the last one.
template <typename F>
inline void for_lanes(int64_t size, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) f(i, int(size - i));
}

// x rounded to the storage type T and back.
template <typename T> inline F32 round_to(F32 x);
template <> inline F32 round_to<float>(F32 x) { return x; }
template <> inline F32 round_to<bf16>(F32 x) { return bit_cast<F32>(bf16_above(x) & 0xffff0000u); }
template <> inline F32 round_to<f16>(F32 x) { return from_f16(to_f16(x)); }
template <typename T> inline float round_to1(float x);
template <> inline float round_to1<float>(float x) { return x; }
template <> inline float round_to1<bf16>(float x) { return from_bf16(to_bf16(x)); }
template <> inline float round_to1<f16>(float x) { return from_f16(to_f16(x)); }

// ---- elementary functions ------------------------------------------------------------------------------------------

// e^x within 1 ulp or so: x = n ln2 + r, a degree 6 polynomial in r, scaling by 2^n so that denormal results and the
// overflow to infinity come out right. NaN stays NaN: min and max return their second argument then.
inline F32 exp(F32 x) {
  x = min(splat(89.f), max(splat(-104.f), x));
  const F32 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  F32 n = (x * 1.44269504088896341f + magic) - magic;
  F32 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.3888889e-3f);
  p = fma(p, r, splat(8.3333333e-3f));
  p = fma(p, r, splat(4.1666667e-2f));
  p = fma(p, r, splat(1.6666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p * r, r, r) + 1.f;
#if defined(__AVX512F__)
  return (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  I32 k = __builtin_convertvector(n, I32);
  I32 half = k >> 1;  // in two steps, each within the exponents of normal numbers
  return p * bit_cast<F32>((half + 127) << 23) * bit_cast<F32>((k - half + 127) << 23);
#endif
}

inline F32 sigmoid(F32 x) { return 1.f / (1.f + exp(-x)); }

// Offset of row i of a strided set of rows.
inline int64_t row_offset(const deepinfer::Rows& rows, int64_t i) {
  if (rows.dims == 1) return i * rows.strides[0];
  int64_t offset = 0;
  for (int d = rows.dims - 1; d >= 0; --d) {
    offset += (i % rows.sizes[d]) * rows.strides[d];
    i /= rows.sizes[d];
  }
  return offset;
}

}  // namespace
