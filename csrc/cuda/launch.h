// What the host side of every family needs to plan a launch.
#pragma once

#include <cstdint>

#include "../cpu/types.h"

namespace deepinfer::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// The most elements, a power of two up to `most`, that one access may move in every tensor of a kernel: each row and
// each address has to be a multiple of them, or of 16 bytes.
class Access {
 public:
  Access(int64_t row_size, int most) : elements_(most) {
    while (row_size % elements_ != 0) elements_ /= 2;
  }

  // Null tensors do not limit.
  void limit(const void* data, int element_size) { fit(reinterpret_cast<uintptr_t>(data), element_size); }
  void limit(const void* data, const Rows& rows, int element_size) {
    if (!data) return;
    uint64_t bits = reinterpret_cast<uintptr_t>(data);
    for (int d = 0; d < rows.dims; ++d) bits |= uint64_t(rows.strides[d] * element_size);
    fit(bits, element_size);
  }

  void limit_stride(int64_t stride, int element_size) { fit(uint64_t(stride) * element_size, element_size); }

  // No more than divide `n`.
  void divide(int64_t n) {
    while (n % elements_ != 0) elements_ /= 2;
  }

  int elements() const { return elements_; }

 private:
  void fit(uint64_t bits, int element_size) {
    while (bits % (elements_ * element_size < 16 ? elements_ * element_size : 16) != 0) elements_ /= 2;
  }

  int elements_;
};

}  // namespace deepinfer::cuda
