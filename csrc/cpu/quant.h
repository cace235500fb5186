#pragma once

#include "isa.h"
#include "types.h"

namespace deepinfer {

enum class Code : int { e4m3, int8 };

// A batch of matrices cut into blocks that share one scale; a token group is a block of one row. Blocks at the lower
// and right edges may be smaller. One side of a kernel is strided with dense columns, the other side is dense. The
// scales are dense: [matrices, blocks down, blocks across].
struct Blocks {
  static constexpr int kMaxStrip = 32;
  Rows matrices;  // of the strided side
  int64_t rows, columns, row_stride;
  int64_t block_rows, block_columns;
  int64_t down, across;  // blocks of one matrix
  int64_t strip;         // neighbouring blocks that one work item takes, so that it reads long pieces of rows
  int64_t strips;        // work items across
};

struct QuantizeArgs {
  const void* x;  // strided, of `dtype`
  void* codes;    // dense, one byte each
  void* scales;   // float, or the exponent bytes of float8_e8m0fnu if scale_is_e8m0
  Blocks blocks;
  DType dtype;
  Code code;
  bool power_of_two;  // scales are rounded up to powers of two
  bool scale_is_e8m0;
};

struct DequantizeArgs {
  const void* codes;  // strided
  const void* scales;
  void* out;  // dense, of `dtype`
  Blocks blocks;
  DType dtype;
  Code code;
  bool scale_is_e8m0;
};

// A work item of both is one strip.
namespace cpu {
DEEPINFER_KERNEL(quantize, QuantizeArgs)
DEEPINFER_KERNEL(dequantize, DequantizeArgs)
}  // namespace cpu

}  // namespace deepinfer
