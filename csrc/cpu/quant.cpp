// Block quantisation and its inverse. A block is read twice, the second time out of the cache: its largest magnitude
// gives the scale, then every element is multiplied once and converted once, so the codes are the same on any device.

#include "quant.h"

#include "quantizer.h"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

struct Strip {
  int64_t band, first_block;
  int64_t strided, dense;  // offsets of the first element on the two sides
  int64_t rows, columns;
};

template <typename F>
inline void for_each_strip(const Blocks& b, int64_t begin, int64_t end, F&& f) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t band = item / b.strips, first = item % b.strips * b.strip;
    const int64_t matrix = band / b.down, row = band % b.down * b.block_rows;
    const int64_t column = first * b.block_columns;
    const int64_t rows = b.rows - row, columns = b.columns - column;
    f(Strip{.band = band,
            .first_block = first,
            .strided = row_offset(b.matrices, matrix) + row * b.row_stride,
            .dense = (matrix * b.rows + row) * b.columns + column,
            .rows = rows < b.block_rows ? rows : b.block_rows,
            .columns = columns < b.strip * b.block_columns ? columns : b.strip * b.block_columns});
  }
}

// Multiplies by 1 / scale, of the scales that are given.
template <typename T, Code code>
void apply_scales(const QuantizeArgs& args, const Strip& strip, const T* x, uint8_t* codes) {
  const Blocks& b = args.blocks;
  const Band scales(args.scales, strip.band);
  float factors[Blocks::kMaxStrip];
  for_pieces(strip.columns, b.block_columns, [&](int64_t block, int64_t, int64_t) {
    factors[block] = 1.f / scales.load(strip.first_block + block);
  });
  for (int64_t row = 0; row < strip.rows; ++row)
    for_pieces(strip.columns, b.block_columns, [&](int64_t block, int64_t start, int64_t size) {
      const T* piece = x + row * b.row_stride + start;
      const F32 factor = splat(factors[block]);
      for_lanes(size, [&](int64_t i, int n) {
        store_codes<code>(codes, row * b.columns + start + i, encode_any<code>(load(piece + i, n) * factor), n);
      });
    });
}

template <typename T, Code code>
void quantize_strips(const QuantizeArgs& args, int64_t begin, int64_t end) {
  const Blocks& b = args.blocks;
  for_each_strip(b, begin, end, [&](const Strip& strip) {
    const T* x = static_cast<const T*>(args.x) + strip.strided + strip.first_block * b.block_columns;
    uint8_t* codes = args.codes ? static_cast<uint8_t*>(args.codes) + code_bytes<code>(strip.dense) : nullptr;
    if (args.given) return apply_scales<T, code>(args, strip, x, codes);
    quantize_strip<T, code>(x, b.row_stride, codes, b.columns, strip.rows, strip.columns, b.block_columns, args.scales,
                            strip.band, strip.first_block);
  });
}

// Blocks of one column: each lane has its own.
template <typename T, Code code>
void quantize_column_strips(const QuantizeArgs& args, int64_t begin, int64_t end) {
  const Blocks& b = args.blocks;
  for_each_strip(b, begin, end, [&](const Strip& strip) {
    const T* x = static_cast<const T*>(args.x) + strip.strided + strip.first_block;
    uint8_t* codes = static_cast<uint8_t*>(args.codes) + (args.codes ? code_bytes<code>(strip.dense) : 0);
    const Band scales(args.scales, strip.band);
    I32 most[Blocks::kColumnStrip / kLanes] = {};
    for (int64_t row = 0; row < strip.rows && !args.given; ++row)
      for_lanes(strip.columns, [&](int64_t i, int n) {
        const I32 bits = bit_cast<I32>(load(x + row * b.row_stride + i, n)) & 0x7fffffff;
        I32& so_far = most[i / kLanes];
        so_far = bits > so_far ? bits : so_far;
      });
    F32 factors[Blocks::kColumnStrip / kLanes], stored[Blocks::kColumnStrip / kLanes];
    for_lanes(strip.columns, [&](int64_t i, int n) {
      F32& factor = factors[i / kLanes];
      for (int j = 0; j < n; ++j) {
        if (args.given) {
          factor[j] = 1.f / scales.load(strip.first_block + i + j);
          continue;
        }
        const float amax = bit_cast<F32>(most[i / kLanes])[j];
        const Scale scale = scale_of<code>(amax, is_power_of_two(args.scales.type));
        scales.store(strip.first_block + i + j, scale.stored);
        factor[j] = scale.factor;
        stored[i / kLanes][j] = scale.stored;
      }
    });
    for (int64_t row = 0; row < strip.rows && args.codes; ++row)
      for_lanes(strip.columns, [&](int64_t i, int n) {
        F32 value = load(x + row * b.row_stride + i, n) * factors[i / kLanes];
        // A column with NaN or infinity is all NaN.
        if (!args.given) value = select(stored[i / kLanes] == stored[i / kLanes], value, stored[i / kLanes]);
        store_codes<code>(codes, row * b.columns + i, encode_any<code>(value), n);
      });
  });
}

template <typename T, Code code>
void dequantize_strips(const DequantizeArgs& args, int64_t begin, int64_t end) {
  const Blocks& b = args.blocks;
  for_each_strip(b, begin, end, [&](const Strip& strip) {
    const uint8_t* codes = static_cast<const uint8_t*>(args.codes) + strip.strided;
    const int64_t column = strip.first_block * b.block_columns;
    T* out = static_cast<T*>(args.out) + strip.dense;
    const Band scales(args.scales, strip.band);
    float factors[Blocks::kColumnStrip];
    for_pieces(strip.columns, b.block_columns, [&](int64_t block, int64_t, int64_t) {
      factors[block] = scales.load(strip.first_block + block);
    });
    for (int64_t row = 0; row < strip.rows; ++row) {
      const uint8_t* code_row = codes + row * b.row_stride;
      T* values = out + row * b.columns;
      if (b.block_columns == 1) {
        for_lanes(strip.columns, [&](int64_t i, int n) {
          const F32 value = Format<code>::decode(load_codes<code>(code_row, column + i, n));
          store(values + i, value * load(factors + i, n), n);
        });
        continue;
      }
      for_pieces(strip.columns, b.block_columns, [&](int64_t block, int64_t start, int64_t size) {
        const F32 factor = splat(factors[block]);
        for_lanes(size, [&](int64_t i, int n) {
          store(values + start + i,
                Format<code>::decode(load_codes<code>(code_row, column + start + i, n)) * factor, n);
        });
      });
    }
  });
}

template <typename T, Code code>
void quantize_blocks(const QuantizeArgs& args, int64_t begin, int64_t end) {
  args.blocks.block_columns == 1 ? quantize_column_strips<T, code>(args, begin, end)
                                 : quantize_strips<T, code>(args, begin, end);
}

template <typename T>
void quantize_from(const QuantizeArgs& args, int64_t begin, int64_t end) {
  switch (args.code) {
    case Code::e4m3: return quantize_blocks<T, Code::e4m3>(args, begin, end);
    case Code::int8: return quantize_blocks<T, Code::int8>(args, begin, end);
    case Code::e2m1: return quantize_blocks<T, Code::e2m1>(args, begin, end);
  }
}

template <typename T>
void dequantize_to(const DequantizeArgs& args, int64_t begin, int64_t end) {
  switch (args.code) {
    case Code::e4m3: return dequantize_strips<T, Code::e4m3>(args, begin, end);
    case Code::int8: return dequantize_strips<T, Code::int8>(args, begin, end);
    case Code::e2m1: return dequantize_strips<T, Code::e2m1>(args, begin, end);
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
