// What the tilings of all families share. Plain C++: tested on a host without torch.
#pragma once

#include "../cpu/types.h"
#include "chip.h"

namespace deepinfer::npu {

constexpr int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// From the first byte of strided rows to the last one.
inline int64_t bytes_of(const Rows& rows, int64_t width, int64_t item) {
  if (rows.count == 0) return 0;
  int64_t last = 0;
  for (int d = 0; d < rows.dims; ++d) last += (rows.sizes[d] - 1) * rows.strides[d];
  return (last + width) * item;
}

// A buffer of the core is rounded up to 32 bytes, and there are at most 64.
constexpr int64_t kRounding = 64 * 32;

}  // namespace deepinfer::npu
