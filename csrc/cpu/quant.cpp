// Block quantisation and its inverse. A block is read twice, the second time out of the cache: its largest magnitude
// gives the scale, then every element is multiplied once and converted once, so the codes are the same on any device.

#include "quant.h"

#include "fp8.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr uint32_t kInfinity = 0x7f800000;

struct Strip {
  int64_t scale;           // index of the first block's scale
  int64_t strided, dense;  // offsets of the first element on the two sides
  int64_t rows, columns, blocks;
};

template <typename F>
inline void for_each_strip(const Blocks& b, int64_t begin, int64_t end, F&& f) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t band = item / b.strips, first = item % b.strips * b.strip;
    const int64_t matrix = band / b.down, row = band % b.down * b.block_rows;
    const int64_t column = first * b.block_columns;
    const int64_t rows = b.rows - row, columns = b.columns - column, blocks = b.across - first;
    f(Strip{.scale = band * b.across + first,
            .strided = row_offset(b.matrices, matrix) + row * b.row_stride + column,
            .dense = (matrix * b.rows + row) * b.columns + column,
            .rows = rows < b.block_rows ? rows : b.block_rows,
            .columns = columns < b.strip * b.block_columns ? columns : b.strip * b.block_columns,
            .blocks = blocks < b.strip ? blocks : b.strip});
  }
}

// Calls f(block, start, size) for the piece of a row that belongs to each block of a strip.
template <typename F>
inline void for_pieces(const Blocks& b, const Strip& strip, F&& f) {
  for (int64_t block = 0, start = 0; block < strip.blocks; ++block, start += b.block_columns) {
    const int64_t left = strip.columns - start;
    f(block, start, left < b.block_columns ? left : b.block_columns);
  }
}

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

struct Scale {
  float stored;  // turns codes into values
  float factor;  // turns values into codes; not the reciprocal of a scale that is no power of two
};

template <Code code>
inline Scale scale_of(float amax, bool power_of_two) {
  constexpr float max = Format<code>::kMax, floor = Format<code>::kFloor;
  amax = amax > floor ? amax : floor;
  const float scale = amax / max;
  if (!power_of_two) return {scale, max / amax};
  // The next power of two: any mantissa bit carries into the exponent. The floor and the range of float keep the
  // exponents of both it and its reciprocal normal.
  const uint32_t exponent = (bit_cast<uint32_t>(scale) + 0x7fffffu) >> 23;
  return {bit_cast<float>(exponent << 23), bit_cast<float>((254 - exponent) << 23)};
}

inline uint8_t to_e8m0(float power_of_two) { return uint8_t(bit_cast<uint32_t>(power_of_two) >> 23); }  // NaN: 0xff

inline float from_e8m0(uint8_t exponent) {
  if (exponent == 0xff) return __builtin_nanf("");
  return exponent == 0 ? 0x1p-127f : bit_cast<float>(uint32_t(exponent) << 23);
}

inline void store_codes(uint8_t* p, U8 codes, int n) {
  if (n == kLanes) return void(std::memcpy(p, &codes, sizeof(codes)));
  for (int i = 0; i < n; ++i) p[i] = codes[i];
}

inline U8 load_codes(const uint8_t* p, int n) {
  U8 codes = {};
  if (n == kLanes) {
    std::memcpy(&codes, p, sizeof(codes));
  } else {
    for (int i = 0; i < n; ++i) codes[i] = p[i];
  }
  return codes;
}

// The bits of the largest magnitude. As integers the bits order magnitudes with infinity and then NaN at the top, so
// neither is lost.
inline uint32_t reduce_max(I32 x) {
  int32_t lanes[kLanes], largest = 0;
  std::memcpy(lanes, &x, sizeof(lanes));
  for (int32_t lane : lanes) largest = lane > largest ? lane : largest;
  return uint32_t(largest);
}

template <typename T, Code code>
void quantize_strips(const QuantizeArgs& args, int64_t begin, int64_t end) {
  const Blocks blocks = args.blocks;
  for_each_strip(blocks, begin, end, [&](const Strip& strip) {
    const T* x = static_cast<const T*>(args.x) + strip.strided;
    uint8_t* codes = static_cast<uint8_t*>(args.codes) + strip.dense;
    I32 largest[Blocks::kMaxStrip];
    for (int64_t i = 0; i < strip.blocks; ++i) largest[i] = I32{};
    for (int64_t row = 0; row < strip.rows; ++row)
      for_pieces(blocks, strip, [&](int64_t block, int64_t start, int64_t size) {
        const T* piece = x + row * blocks.row_stride + start;
        I32 so_far = largest[block];
        for_lanes(size, [&](int64_t i, int n) {
          const I32 bits = bit_cast<I32>(load(piece + i, n)) & 0x7fffffff;
          so_far = bits > so_far ? bits : so_far;
        });
        largest[block] = so_far;
      });
    bool finite[Blocks::kMaxStrip];
    float factors[Blocks::kMaxStrip];
    for (int64_t i = 0; i < strip.blocks; ++i) {
      const uint32_t amax = reduce_max(largest[i]);
      finite[i] = amax < kInfinity;
      const Scale scale = finite[i] ? scale_of<code>(bit_cast<float>(amax), args.power_of_two)
                                    : Scale{__builtin_nanf(""), 0};
      factors[i] = scale.factor;
      if (args.scale_is_e8m0) {
        static_cast<uint8_t*>(args.scales)[strip.scale + i] = to_e8m0(scale.stored);
      } else {
        static_cast<float*>(args.scales)[strip.scale + i] = scale.stored;
      }
    }
    for (int64_t row = 0; row < strip.rows; ++row)
      for_pieces(blocks, strip, [&](int64_t block, int64_t start, int64_t size) {
        const T* piece = x + row * blocks.row_stride + start;
        uint8_t* out = codes + row * blocks.columns + start;
        const F32 factor = splat(factors[block]);
        if (!finite[block]) return void(std::memset(out, Format<code>::kNan, size_t(size)));
        for_lanes(size, [&](int64_t i, int n) {
          store_codes(out + i, Format<code>::encode(load(piece + i, n) * factor), n);
        });
      });
  });
}

template <typename T, Code code>
void dequantize_strips(const DequantizeArgs& args, int64_t begin, int64_t end) {
  const Blocks blocks = args.blocks;
  for_each_strip(blocks, begin, end, [&](const Strip& strip) {
    const uint8_t* codes = static_cast<const uint8_t*>(args.codes) + strip.strided;
    T* out = static_cast<T*>(args.out) + strip.dense;
    float scales[Blocks::kMaxStrip];
    for (int64_t i = 0; i < strip.blocks; ++i)
      scales[i] = args.scale_is_e8m0 ? from_e8m0(static_cast<const uint8_t*>(args.scales)[strip.scale + i])
                                     : static_cast<const float*>(args.scales)[strip.scale + i];
    for (int64_t row = 0; row < strip.rows; ++row)
      for_pieces(blocks, strip, [&](int64_t block, int64_t start, int64_t size) {
        const uint8_t* piece = codes + row * blocks.row_stride + start;
        T* values = out + row * blocks.columns + start;
        const F32 scale = splat(scales[block]);
        for_lanes(size, [&](int64_t i, int n) {
          store(values + i, Format<code>::decode(load_codes(piece + i, n)) * scale, n);
        });
      });
  });
}

template <typename T>
void quantize_from(const QuantizeArgs& args, int64_t begin, int64_t end) {
  switch (args.code) {
    case Code::e4m3: return quantize_strips<T, Code::e4m3>(args, begin, end);
    case Code::int8: return quantize_strips<T, Code::int8>(args, begin, end);
  }
}

template <typename T>
void dequantize_to(const DequantizeArgs& args, int64_t begin, int64_t end) {
  switch (args.code) {
    case Code::e4m3: return dequantize_strips<T, Code::e4m3>(args, begin, end);
    case Code::int8: return dequantize_strips<T, Code::int8>(args, begin, end);
  }
}

}  // namespace

void quantize(const QuantizeArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return quantize_from<float>(args, begin, end);
    case DType::bf16: return quantize_from<bf16>(args, begin, end);
    case DType::f16: return quantize_from<f16>(args, begin, end);
  }
}

void dequantize(const DequantizeArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::f32: return dequantize_to<float>(args, begin, end);
    case DType::bf16: return dequantize_to<bf16>(args, begin, end);
    case DType::f16: return dequantize_to<f16>(args, begin, end);
  }
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
