// From values to codes and scales and back, for every kernel that quantises. Include from kernel files only, as vec.h.
//
// A kernel that makes rows puts pieces of them into a scratch and calls quantize_piece.
#pragma once

#include "../ops/quant.h"
#include "fp4.h"
#include "fp8.h"

namespace {

using deepinfer::Code;
using deepinfer::QuantizedRows;
using deepinfer::Scales;
using deepinfer::ScaleType;

// `encode` takes no NaN, and values that exceed the largest code by a rounding at most, or saturates as `clamp` does.
template <Code code> struct Format;
template <> struct Format<Code::e4m3> {
  static constexpr float kMax = 448, kFloor = 1e-4f;
  static constexpr uint8_t kNan = 0x7f;
  static U8 encode(F32 x) { return to_e4m3(x); }
  static F32 decode(U8 codes) { return from_e4m3(codes); }
};
template <> struct Format<Code::int8> {
  static constexpr float kMax = 127, kFloor = 1e-10f;
  static constexpr uint8_t kNan = 0;  // the scale alone carries the NaN
  // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold. |x| is below 127.5.
  static U8 encode(F32 x) { return to_u8(bit_cast<U32>(x + 12582912.f)); }
  static F32 decode(U8 codes) { return __builtin_convertvector(bit_cast<I32>(widen(codes) << 24) >> 24, F32); }
};
template <> struct Format<Code::e2m1> {
  static constexpr float kMax = 6, kFloor = 6 * 0x1p-126f;
  static constexpr uint8_t kNan = 0;
  static U8 encode(F32 x) { return to_e2m1(x); }
  static F32 decode(U8 codes) { return from_e2m1(codes); }
};

// Any values: NaN gives NaN, or 0 where there is none.
template <Code code>
inline U8 encode_any(F32 x) {
  const I32 is_nan = x != x;
  const F32 clamped = max(splat(-Format<code>::kMax), min(splat(Format<code>::kMax), select(is_nan, F32{}, x)));
  const U8 nan = U8{} + Format<code>::kNan, codes = Format<code>::encode(clamped);
  const U8 mask = to_u8(bit_cast<U32>(is_nan));
  return (codes & ~mask) | (nan & mask);
}

// Bytes that hold the codes of this many elements.
template <Code code>
inline int64_t code_bytes(int64_t elements) { return code == Code::e2m1 ? elements / 2 : elements; }

// To elements [i, i + n) of dense codes; pairs are whole.
template <Code code>
inline void store_codes(uint8_t* codes, int64_t i, U8 values, int n) {
  uint8_t* p = codes + code_bytes<code>(i);
  if constexpr (code == Code::e2m1) {
    const U8x8 pairs = pack_pairs(values);
    if (n == kLanes) return void(std::memcpy(p, &pairs, sizeof(pairs)));
    for (int j = 0; j < n / 2; ++j) p[j] = pairs[j];
  } else {
    if (n == kLanes) return void(std::memcpy(p, &values, sizeof(values)));
    for (int j = 0; j < n; ++j) p[j] = values[j];
  }
}

template <Code code>
inline U8 load_codes(const uint8_t* codes, int64_t i, int n) {
  const uint8_t* p = codes + code_bytes<code>(i);
  if constexpr (code == Code::e2m1) {
    U8x8 pairs = {};
    if (n == kLanes) {
      std::memcpy(&pairs, p, sizeof(pairs));
    } else {
      for (int j = 0; j < n / 2; ++j) pairs[j] = p[j];
    }
    return unpack_pairs(pairs);
  } else {
    U8 values = {};
    if (n == kLanes) {
      std::memcpy(&values, p, sizeof(values));
    } else {
      for (int j = 0; j < n; ++j) values[j] = p[j];
    }
    return values;
  }
}

// ---- scales ----

struct Scale {
  float stored;  // turns codes into values
  float factor;  // turns values into codes; not the reciprocal of a scale that is no power of two
};

// Infinite or NaN magnitudes give NaN.
template <Code code>
inline Scale scale_of(float amax, bool power_of_two) {
  constexpr float max = Format<code>::kMax, floor = Format<code>::kFloor;
  if (!(amax < __builtin_inff())) return {__builtin_nanf(""), 0.f};
  amax = amax > floor ? amax : floor;
  const float scale = amax / max;
  if (!power_of_two) return {scale, max / amax};
  // The next power of two: any mantissa bit carries into the exponent. The floor and the range of float keep the
  // exponents of both it and its reciprocal normal.
  const uint32_t exponent = (bit_cast<uint32_t>(scale) + 0x7fffffu) >> 23;
  return {bit_cast<float>(exponent << 23), bit_cast<float>((254 - exponent) << 23)};
}

// Reads and writes the scales of one band.
class Band {
 public:
  Band(const Scales& scales, int64_t band) : scales_(scales) {
    at_ = band < scales.rows ? band * scales.row
                             : band / scales.rows * scales.matrix + band % scales.rows * scales.row;
  }

  void store(int64_t column, float scale) const {
    const uint32_t bits = bit_cast<uint32_t>(scale);
    switch (scales_.type) {
      case ScaleType::f32:
      case ScaleType::power: static_cast<float*>(scales_.data)[at_ + column * scales_.column] = scale; return;
      case ScaleType::e8m0: *byte(column) = uint8_t(bits >> 23); return;  // NaN: 0xff
      case ScaleType::packed:
        *byte(column) = uint8_t(bits >> 23);
        if (column + 1 == scales_.across)
          for (int64_t left = 1; left < 4 - column % 4; ++left) byte(column)[left] = 0;
    }
  }

  float load(int64_t column) const {
    if (scales_.type == ScaleType::f32 || scales_.type == ScaleType::power)
      return static_cast<const float*>(scales_.data)[at_ + column * scales_.column];
    const uint8_t exponent = *byte(column);
    if (exponent == 0xff) return __builtin_nanf("");
    return exponent == 0 ? 0x1p-127f : bit_cast<float>(uint32_t(exponent) << 23);
  }

 private:
  uint8_t* byte(int64_t column) const {
    uint8_t* bytes = static_cast<uint8_t*>(scales_.data);
    if (scales_.type == ScaleType::e8m0) return bytes + at_ + column * scales_.column;
    return bytes + 4 * (at_ + column / 4 * scales_.column) + column % 4;
  }

  const Scales& scales_;
  int64_t at_;
};

inline bool is_power_of_two(ScaleType type) { return type != ScaleType::f32; }

// ---- strips: neighbouring blocks of one band ----

constexpr int kMaxStrip = deepinfer::Blocks::kMaxStrip;

// Calls f(block, start, size) for the piece of a row of `columns` that belongs to each block.
template <typename F>
inline void for_pieces(int64_t columns, int64_t block_columns, F&& f) {
  for (int64_t block = 0, start = 0; start < columns; ++block, start += block_columns) {
    const int64_t left = columns - start;
    f(block, start, left < block_columns ? left : block_columns);
  }
}

// The bits of the largest magnitude. As integers the bits order magnitudes with infinity and then NaN at the top, so
// neither is lost.
inline float largest(I32 bits) {
  int32_t lanes[kLanes], most = 0;
  std::memcpy(lanes, &bits, sizeof(lanes));
  for (int32_t lane : lanes) most = lane > most ? lane : most;
  return bit_cast<float>(most);
}

// Quantises `rows` x `columns` elements, at most kMaxStrip blocks from `first_block` on. x and codes are those of the
// first element, rows are x_stride and code_stride elements apart; no codes are wanted if null. The second reading of x
// comes out of the cache.
template <typename T, Code code>
void quantize_strip(const T* x, int64_t x_stride, uint8_t* codes, int64_t code_stride, int64_t rows, int64_t columns,
                    int64_t block_columns, const Scales& scales, int64_t band, int64_t first_block) {
  I32 most[kMaxStrip] = {};
  for (int64_t row = 0; row < rows; ++row)
    for_pieces(columns, block_columns, [&](int64_t block, int64_t start, int64_t size) {
      const T* piece = x + row * x_stride + start;
      I32 so_far = most[block];
      for_lanes(size, [&](int64_t i, int n) {
        const I32 bits = bit_cast<I32>(load(piece + i, n)) & 0x7fffffff;
        so_far = bits > so_far ? bits : so_far;
      });
      most[block] = so_far;
    });
  Scale scale[kMaxStrip];
  const Band out(scales, band);
  for_pieces(columns, block_columns, [&](int64_t block, int64_t, int64_t) {
    scale[block] = scale_of<code>(largest(most[block]), is_power_of_two(scales.type));
    out.store(first_block + block, scale[block].stored);
  });
  if (!codes) return;
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* code_row = codes + code_bytes<code>(row * code_stride);
    for_pieces(columns, block_columns, [&](int64_t block, int64_t start, int64_t size) {
      const T* piece = x + row * x_stride + start;
      const F32 factor = splat(scale[block].factor);
      if (scale[block].stored != scale[block].stored)
        return void(std::memset(code_row + code_bytes<code>(start), Format<code>::kNan, code_bytes<code>(size)));
      for_lanes(size, [&](int64_t i, int n) {
        store_codes<code>(code_row, start + i, Format<code>::encode(load(piece + i, n) * factor), n);
      });
    });
  }
}

template <typename T, Code code>
void quantize_piece_as(const T* x, int64_t size, const QuantizedRows& out, int64_t row, int64_t row_size,
                       int64_t first) {
  uint8_t* codes = static_cast<uint8_t*>(out.codes) + code_bytes<code>(row * row_size + first);
  for (int64_t i = 0; i < size; i += kMaxStrip * out.group) {
    const int64_t left = size - i, columns = left < kMaxStrip * out.group ? left : kMaxStrip * out.group;
    quantize_strip<T, code>(x + i, 0, codes + code_bytes<code>(i), 0, 1, columns, out.group, out.scales, row,
                            (first + i) / out.group);
  }
}

// Quantises elements [first, first + size) of a row of `row_size`, which x holds; first is a multiple of the group.
template <typename T>
void quantize_piece(const T* x, int64_t size, const QuantizedRows& out, int64_t row, int64_t row_size, int64_t first) {
  switch (out.code) {
    case Code::e4m3: return quantize_piece_as<T, Code::e4m3>(x, size, out, row, row_size, first);
    case Code::int8: return quantize_piece_as<T, Code::int8>(x, size, out, row, row_size, first);
    case Code::e2m1: return quantize_piece_as<T, Code::e2m1>(x, size, out, row, row_size, first);
  }
}

// Room for a piece of a row: as many whole groups as make `wanted` elements, at least one.
template <typename T>
class Scratch {
 public:
  Scratch(int64_t group, int64_t row_size, int64_t wanted = 4096) {
    size_ = group >= wanted ? group : wanted / (group > 0 ? group : 1) * group;
    if (size_ > row_size) size_ = row_size;
    data_ = static_cast<T*>(::operator new(size_t(size_ + kLanes) * sizeof(T)));
  }
  ~Scratch() { ::operator delete(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  T* data_;
  int64_t size_;
};

}  // namespace
