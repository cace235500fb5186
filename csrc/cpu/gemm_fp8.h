#pragma once

#include "isa.h"
#include "types.h"

namespace deepinfer {

// out[r, k] = codes[r, k] * scale(r, k): rows of e4m3 operands as float32. Both are dense.
struct WidenArgs {
  const void* codes;
  float* out;
  int64_t depth;
  const float* scales;
  int64_t scale_rows;  // rows that a scale is for
  int64_t scale_row_stride, scale_depth_stride;  // the latter from one 128 of k to the next
};

namespace cpu {

DEEPINFER_KERNEL(widen_e4m3, WidenArgs)

}  // namespace cpu

}  // namespace deepinfer
