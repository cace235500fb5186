// Plain types that pass from the op checks to the kernels of any device. No torch headers here: kernel files compile
// in seconds and carry no inline code that a linker could share between instruction sets.
#pragma once

#include <cstdint>

namespace deepinfer {

enum class DType : int { f32, bf16, f16 };

// The leading dimensions of a tensor whose last dimension is one row. Offsets are in elements.
struct Rows {
  static constexpr int kMaxDims = 8;
  int64_t count = 1;  // number of rows
  int dims = 0;       // after merging neighbours that are contiguous with each other
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
};

}  // namespace deepinfer
