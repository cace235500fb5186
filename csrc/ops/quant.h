// What the quantisation ops, and the ops that quantise their result, hand to the kernels of any device.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

// float8_e4m3fn and int8: one byte an element. float4_e2m1fn_x2: two elements a byte, the first in the low nibble.
enum class Code : int { e4m3, int8, e2m1 };

// What a scale may be and how it is stored: any float; a float that is a power of two; such a power by its exponent
// (float8_e8m0fnu); the exponents of four neighbouring blocks across in the bytes of an int32, the first in the lowest,
// those that are left over 0.
enum class ScaleType : int { f32, power, e8m0, packed };

// The scales of bands, the rows of blocks of all matrices one after the other. Strides are in elements of the tensor.
struct Scales {
  void* data;
  int64_t rows;  // bands of a matrix; of all matrices if one stride leads through them
  int64_t matrix;
  uint32_t row, column;
  int64_t across;  // blocks of a band
  ScaleType type;
};

// Dense rows of codes, quantised in groups of `group` neighbours, as a fused op writes them. A row is a band.
struct QuantizedRows {
  void* codes;
  Scales scales;
  int64_t group;
  Code code;
};

// A batch of matrices cut into blocks that share one scale. Blocks at the lower and right edges may be smaller. One
// side of a kernel is strided with dense columns, the other side is dense. For token groups each row is a matrix.
struct Blocks {
  static constexpr int kMaxStrip = 32, kColumnStrip = 256;  // the latter for blocks of one column
  Rows matrices;  // of the strided side, in elements; in bytes for codes
  int64_t rows, columns, row_stride;
  int64_t block_rows, block_columns;
  int64_t down, across;  // blocks of one matrix
  int64_t strip;         // neighbouring blocks that one work item of a CPU takes, so that it reads long pieces of rows
  int64_t strips;        // work items across
};

struct QuantizeArgs {
  const void* x;  // strided, of `dtype`
  void* codes;    // dense; null if only the scales are wanted
  Scales scales;  // to be written; read if they are `given`
  Blocks blocks;
  DType dtype;
  Code code;
  bool given;
};

struct DequantizeArgs {
  const void* codes;  // strided
  Scales scales;
  void* out;  // dense, of `dtype`
  Blocks blocks;
  DType dtype;
  Code code;
};

}  // namespace deepinfer
