// Range checks of indices need their values. On a CPU these are always looked at; on a GPU or NPU, which would have to
// be waited for, only with DEEPINFER_CHECK=1. Otherwise kernels turn a wrong index into NaN.
#pragma once

#include <cstdlib>
#include <string_view>

#include "check.h"

namespace deepinfer {

inline bool sees_indices(const Tensor& indices) {
  static const bool always = [] {
    const char* set = std::getenv("DEEPINFER_CHECK");
    return set && std::string_view(set) == "1";
  }();
  return indices.is_cpu() || always;
}

// Each of the int32 or int64 indices lies in [low, limit).
inline void check_indices(const char* op, const char* argument, const Tensor& indices, int64_t low, int64_t limit) {
  if (!sees_indices(indices)) return;
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor dense = torch::stable::contiguous(indices.is_cpu() ? indices : torch::stable::to(indices, cpu));
  const auto check_all = [&](const auto* data) {
    for (int64_t i = 0; i < dense.numel(); ++i)
      DI_CHECK(data[i] >= low && data[i] < limit, op, ": ", argument, " must lie in [", low, ", ", limit, "), got ",
               data[i]);
  };
  if (indices.scalar_type() == ScalarType::Long) {
    check_all(static_cast<const int64_t*>(dense.const_data_ptr()));
  } else {
    check_all(static_cast<const int32_t*>(dense.const_data_ptr()));
  }
}

}  // namespace deepinfer
