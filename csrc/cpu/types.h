// Plain types that pass from the op checks to the kernels of any device. No torch headers here: kernel files compile
// in seconds and carry no inline code that a linker could share between instruction sets. No functions either: NVRTC
// reads this file too, and takes any for host code.
#pragma once

#if defined(__CUDACC_RTC__)  // which has no standard headers
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

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
