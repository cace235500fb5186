// From values to codes and scales, for every kernel that quantises: the largest magnitude of a group, its scale, the
// conversions and the places of codes and scales. Bit for bit what csrc/cpu/quantizer.h computes.
//
// A kernel whose threads hold a group calls largest_magnitude, max_over, scale_of, store_scale, scaled_codes and
// store_codes, in this order.
#pragma once

#include "../ops/quant.h"
#include "device.cuh"

namespace deepinfer {

// ---- largest magnitudes; NaN is the largest ----

DEVICE float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

template <int n>
DEVICE float largest_magnitude(const float (&x)[n]) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < n; ++i) largest = max_or_nan(largest, fabsf(x[i]));
  return largest;
}

// The same, before the conversion to float: of the 16-bit types two elements at a time, as integers, whose order is
// that of the magnitudes with infinity and then NaN at the top.
DEVICE uint32_t max_of_halves(uint32_t a, uint32_t b) {
  uint32_t y;
#if __CUDA_ARCH__ >= 900
  asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
#else
  const uint32_t high = (a > b ? a : b) & 0xffff0000u;
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  y = high | low;
#endif
  return y;
}

template <typename T, int n>
DEVICE float largest_magnitude(const Vec<T, n>& v) {
  if constexpr (sizeof(T) == 2 && n % 2 == 0) {
    const auto* pairs = reinterpret_cast<const uint32_t*>(&v);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) largest = max_of_halves(largest, pairs[i] & 0x7fff7fffu);
    largest = max_of_halves(largest, largest >> 16) & 0xffffu;
    T value;
    value.bits = uint16_t(largest);
    return to_float(value);
  } else {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < n; ++i) largest = max_or_nan(largest, fabsf(to_float(v.at[i])));
    return largest;
  }
}

// The largest magnitude of each of n columns.
template <typename T, int n>
struct ColumnMagnitudes {
  Vec<float, n> so_far{};
  DEVICE void add(const Vec<T, n>& v) {
#pragma unroll
    for (int i = 0; i < n; ++i) so_far.at[i] = max_or_nan(so_far.at[i], fabsf(to_float(v.at[i])));
  }
  DEVICE Vec<float, n> get() const { return so_far; }
};
template <typename T, int n>
  requires(sizeof(T) == 2 && n % 2 == 0)
struct ColumnMagnitudes<T, n> {
  Vec<uint32_t, n / 2> so_far{};
  DEVICE void add(const Vec<T, n>& v) {
    const auto* pairs = reinterpret_cast<const uint32_t*>(&v);
#pragma unroll
    for (int i = 0; i < n / 2; ++i) so_far.at[i] = max_of_halves(so_far.at[i], pairs[i] & 0x7fff7fffu);
  }
  DEVICE Vec<float, n> get() const {
    Vec<float, n> y;
#pragma unroll
    for (int i = 0; i < n; ++i) y.at[i] = to_float(T{uint16_t(so_far.at[i / 2] >> (i % 2 * 16))});
    return y;
  }
};

struct Greatest {
  static DEVICE float of(float a, float b) { return max_or_nan(a, b); }
};

// Of magnitudes, which are not negative; the rules are those of over_lanes.
template <int lanes>
DEVICE float max_over(float x, float* scratch) {
  return over_lanes<Greatest, lanes>(x, scratch);
}

// ---- scales ----

template <Code code> struct CodeFacts;
template <> struct CodeFacts<Code::e4m3> {
  static constexpr float largest = 448.f, amax_floor = 1e-4f;
  static constexpr uint32_t nan = 0x7f7f7f7f;
};
template <> struct CodeFacts<Code::int8> {
  static constexpr float largest = 127.f, amax_floor = 1e-10f;
  static constexpr uint32_t nan = 0;  // the scale alone carries the NaN
};
template <> struct CodeFacts<Code::e2m1> {
  static constexpr float largest = 6.f, amax_floor = 6 * 0x1p-126f;
  static constexpr uint32_t nan = 0;
};

struct GroupScale {
  float stored;  // turns codes into values; NaN if the group holds NaN or infinity
  float factor;  // turns values into codes; not the reciprocal of a scale that is no power of two
};

// amax / largest, correctly rounded without the branches of a division: the remainder of an estimate is exact, and was
// found to lead to the right neighbour for every mantissa. The quotient is normal.
template <Code code>
DEVICE float over_largest(float amax) {
  constexpr float largest = CodeFacts<code>::largest, reciprocal = 1.f / largest;
  const float q = amax * reciprocal;
  return fmaf(fmaf(-q, largest, amax), reciprocal, q);
}

// largest / amax in the same way. The reciprocal of a huge amax would be denormal: its quotient is taken at 2^-64.
template <Code code>
DEVICE float largest_over(float amax) {
  constexpr float largest = CodeFacts<code>::largest;
  const float unit = amax > 0x1p64f ? 0x1p-64f : 1.f, a = amax * unit;
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(a));
  const float reciprocal = fmaf(estimate, fmaf(-a, estimate, 1.f), estimate);
  const float q = largest * reciprocal;
  return fmaf(fmaf(-a, q, largest), reciprocal, q) * unit;
}

template <Code code, ScaleType type>
DEVICE GroupScale scale_of(float amax) {
  const bool finite = amax < __uint_as_float(0x7f800000);
  amax = fmaxf(amax, CodeFacts<code>::amax_floor);
  GroupScale scale{over_largest<code>(amax), 0.f};
  if constexpr (type == ScaleType::f32) {
    scale.factor = largest_over<code>(amax);
  } else {
    // The next power of two: any mantissa bit carries into the exponent. The floor and the range of float keep the
    // exponents of both it and its reciprocal normal.
    const uint32_t exponent = (__float_as_uint(scale.stored) + 0x7fffffu) >> 23;
    scale.stored = __uint_as_float(exponent << 23);
    scale.factor = __uint_as_float((254 - exponent) << 23);
  }
  if (!finite) scale = {__uint_as_float(0x7fffffff), 0.f};
  return scale;
}

// Where the scales of a band begin; as the address of a byte for `packed`.
template <ScaleType type>
DEVICE int64_t band_offset(const Scales& scales, int64_t band) {
  int64_t offset = band * scales.row;
  if (band >= scales.rows) {  // of another matrix, which the host lets happen below 2^32 bands only
    const uint32_t matrix = uint32_t(band) / uint32_t(scales.rows);
    offset = matrix * scales.matrix + int64_t(uint32_t(band) - matrix * uint32_t(scales.rows)) * scales.row;
  }
  return type == ScaleType::packed ? 4 * offset : offset;
}

template <ScaleType type>
DEVICE int64_t scale_offset(const Scales& scales, int64_t column) {
  return type == ScaleType::packed ? column / 4 * scales.column * 4 + column % 4 : column * scales.column;
}

// `at` is band_offset. Each exponent of a word is stored by the thread that has it: a word may belong to several
// blocks.
template <ScaleType type>
DEVICE void store_scale(const Scales& scales, int64_t at, int64_t column, float stored) {
  const int64_t i = at + scale_offset<type>(scales, column);
  if constexpr (type == ScaleType::f32 || type == ScaleType::power) {
    static_cast<float*>(scales.data)[i] = stored;
  } else {
    auto* bytes = static_cast<uint8_t*>(scales.data) + i;
    *bytes = uint8_t(__float_as_uint(stored) >> 23);  // NaN: 0xff
    if constexpr (type == ScaleType::packed)
      if (column + 1 == scales.across)
        for (int left = 1; left < 4 - column % 4; ++left) bytes[left] = 0;
  }
}

template <ScaleType type>
DEVICE float load_scale(const Scales& scales, int64_t at, int64_t column) {
  const int64_t i = at + scale_offset<type>(scales, column);
  if constexpr (type == ScaleType::f32 || type == ScaleType::power) {
    return load_access<float, 1>(static_cast<const float*>(scales.data) + i).at[0];
  } else {
    const uint32_t byte = load_access<uint8_t, 1>(static_cast<const uint8_t*>(scales.data) + i).at[0];
    return __uint_as_float(byte == 0xff ? 0x7fffffffu : byte == 0 ? 0x00400000u : byte << 23);
  }
}

// ---- codes ----

// The codes of n elements as bytes, and how many bytes `elements` take.
template <Code code>
DEVICE constexpr int code_bytes(int elements) { return code == Code::e2m1 ? (elements + 1) / 2 : elements; }
template <Code code>
DEVICE int64_t code_bytes(int64_t elements) { return code == Code::e2m1 ? elements / 2 : elements; }
template <Code code, int n>
using Codes = Vec<uint8_t, code == Code::e2m1 ? n / 2 : n>;

// Any value.
DEVICE uint32_t to_e4m3(float x) {
  const float a = fminf(fabsf(x), 448.f);
  // The 20 mantissa bits that go, rounded; a carry moves on into the exponent, whose bias goes from 127 to 7.
  const uint32_t bits = __float_as_uint(a);
  const uint32_t normal = (bits + ((bits >> 20) & 1) + (0x7ffffu - (120u << 23))) >> 20;
  // Below 2^-6 the codes are multiples of 2^-9, and so are the floats from 2^14: the addition rounds.
  const uint32_t subnormal = __float_as_uint(a + 0x1p14f);
  return x != x ? 0x7f : ((a < 0x1p-6f ? subnormal : normal) & 0x7f) | ((__float_as_uint(x) >> 24) & 0x80);
}

// The low 23 bits are the code. Between 2^e and 2^(e+1), and below 2 for e = 0, values are multiples of 2^(e-1): so are
// the floats from 2^(22+e), and the addition rounds. What it adds has 2e, the code less its multiple, in its last bits.
// |x| exceeds 6 by a rounding at most.
DEVICE uint32_t to_e2m1(float x) {
  const uint32_t bits = __float_as_uint(fmaxf(fabsf(x), 1.f)), exponent = bits >> 23;
  const float rounder = __uint_as_float(exponent * 0x800002u + ((22u << 23) - 2 * 127));
  return __float_as_uint(fabsf(x) + rounder) | ((__float_as_uint(x) >> 28) & 8);
}

// Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
DEVICE uint32_t to_int8(float x) { return __float_as_uint(x + 12582912.f) & 0xff; }

// Four codes.
template <Code code>
DEVICE uint32_t to_word(float a, float b, float c, float d) {
  if constexpr (code == Code::int8)
    return to_int8(a) | to_int8(b) << 8 | to_int8(c) << 16 | to_int8(d) << 24;
#if __CUDA_ARCH__ >= 890
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
#else
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
#endif
}

// To nearest even. Values beyond the largest code by more than a rounding are for to_codes_saturating.
template <Code code, int n>
DEVICE Codes<code, n> to_codes(const float (&x)[n]) {
  static_assert(n % 2 == 0);
  Codes<code, n> codes;
  if constexpr (code == Code::e2m1) {
    constexpr int together = n < 4 ? n : 4;  // as many as fit below the exponents
#pragma unroll
    for (int i = 0; i < n; i += together) {
      uint32_t word = 0;
#pragma unroll
      for (int j = together - 1; j >= 0; --j) word = word * 16 + to_e2m1(x[i + j]);
#pragma unroll
      for (int j = 0; j < together / 2; ++j) codes.at[i / 2 + j] = uint8_t(word >> (8 * j));
    }
  } else if constexpr (n % 4 == 0) {
    auto* words = reinterpret_cast<uint32_t*>(&codes);
#pragma unroll
    for (int i = 0; i < n; i += 4) words[i / 4] = to_word<code>(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const uint32_t word = to_word<code>(x[i], x[i + 1], 0.f, 0.f);
      codes.at[i] = uint8_t(word);
      codes.at[i + 1] = uint8_t(word >> 8);
    }
  }
  return codes;
}

// Any values: beyond the largest code they saturate; NaN gives NaN, or 0 where there is none.
template <Code code, int n>
DEVICE Codes<code, n> to_codes_saturating(const float (&x)[n]) {
  if constexpr (code == Code::e4m3) {  // as the conversion does
    return to_codes<code, n>(x);
  } else {
    constexpr float largest = CodeFacts<code>::largest;
    float clamped[n];
#pragma unroll
    for (int i = 0; i < n; ++i) clamped[i] = x[i] == x[i] ? fminf(fmaxf(x[i], -largest), largest) : 0.f;
    return to_codes<code, n>(clamped);
  }
}

template <Code code, int n>
DEVICE void from_codes(const Codes<code, n>& codes, float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    if constexpr (code == Code::e2m1) {  // to the top of a float, whose exponent is then 126 too small
      const uint32_t byte = codes.at[i / 2];
      x[i] = __uint_as_float((byte & 7) << 22 | (byte & 8) << 28) * 0x1p126f;
      x[i + 1] = __uint_as_float((byte & 0x70) << 18 | (byte & 0x80) << 24) * 0x1p126f;
    } else if constexpr (code == Code::int8) {
      x[i] = float(int8_t(codes.at[i]));
      x[i + 1] = float(int8_t(codes.at[i + 1]));
    } else {
#if __CUDA_ARCH__ >= 890
      const uint16_t pair = uint16_t(codes.at[i] | codes.at[i + 1] << 8);
      uint32_t halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
      x[i] = to_float(f16{uint16_t(halves)});
      x[i + 1] = to_float(f16{uint16_t(halves >> 16)});
#else
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        const uint32_t code_bits = codes.at[j], magnitude = code_bits & 0x7f;
        const float finite = __uint_as_float(magnitude << 20) * 0x1p120f;
        const float value = magnitude == 0x7f ? __uint_as_float(0x7fffffff) : finite;
        x[j] = __uint_as_float(__float_as_uint(value) | (code_bits & 0x80) << 24);
      }
#endif
    }
  }
}

// ---- groups ----

// n codes of elements [first, first + n) to a row of `size` elements; `access` elements may be moved at once.
template <Code code, int access, int n>
DEVICE void store_codes(uint8_t* row, int64_t first, int64_t size, const Codes<code, n>& codes) {
  store_vector<code_bytes<code>(access), code_bytes<code>(n)>(row, code_bytes<code>(first), code_bytes<code>(size),
                                                              codes);
}

// The codes of values of a group with this scale.
template <Code code, int n, typename T>
DEVICE Codes<code, n> scaled_codes(const Vec<T, n>& x, const GroupScale& scale) {
  float scaled[n];
#pragma unroll
  for (int i = 0; i < n; ++i) scaled[i] = to_float(x.at[i]) * scale.factor;
  Codes<code, n> codes = to_codes<code, n>(scaled);
  constexpr int bytes = code_bytes<code>(n);
  if constexpr (bytes % 4 == 0) {
    auto* words = reinterpret_cast<uint32_t*>(&codes);
#pragma unroll
    for (int i = 0; i < bytes / 4; ++i) words[i] = scale.stored == scale.stored ? words[i] : CodeFacts<code>::nan;
  } else {
#pragma unroll
    for (int i = 0; i < bytes; ++i)
      codes.at[i] = scale.stored == scale.stored ? codes.at[i] : uint8_t(CodeFacts<code>::nan);
  }
  return codes;
}

// Of offsets inside a group: 32 bits unless it may be longer than what threads hold in registers.
template <bool longer> struct IndexType { using type = int; };
template <> struct IndexType<true> { using type = int64_t; };
template <bool longer> using IndexOf = typename IndexType<longer>::type;

// A kernel over groups inside rows: a group has `lanes` threads, a CUDA block takes `groups` neighbours of each of
// `rows` rows; blockIdx.z and .y count the blocks of rows. Offsets inside a group are of type Index.
template <int lanes, int groups, int rows, typename Index>
struct GroupPlace {
  int64_t row, index, begin;  // of the group in its row, and its first element
  Index first, size;          // of the group's elements the first one of this thread, and how many there are
  bool active;                // threads without a group take part in the shuffles

  GroupPlace() = default;
  // `width` elements of a thread lie beside each other. What is the same for a block is written so that the compiler
  // sees it.
  DEVICE GroupPlace(int64_t row_count, int64_t row_size, int64_t group_size, int64_t across, int width,
                    uint32_t run_index) {
    const int place = threadIdx.x / lanes, in_run = rows == 1 ? place : place % groups;
    const int64_t first_row = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * rows, run = int64_t(run_index) * groups;
    row = first_row + (rows == 1 ? 0 : place / groups);
    index = run + in_run;
    active = place < groups * rows && row < row_count && index < across;
    begin = run * group_size + int64_t(in_run) * Index(group_size);
    first = threadIdx.x % lanes * width;
    const int64_t left = row_size - begin;
    size = active ? Index(left < group_size ? left : group_size) : 0;
  }
};

}  // namespace deepinfer
