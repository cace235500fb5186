// Argument checks shared by all ops. A failed check throws std::invalid_argument, which reaches Python as ValueError.
// Messages name the op and the argument, what was given and what is allowed.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../cpu/types.h"

namespace deepinfer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

#define DI_CHECK(condition, ...)                  \
  do {                                            \
    if (!(condition)) ::deepinfer::fail(__VA_ARGS__); \
  } while (0)

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2: return "float4_e2m1fn_x2";
    default: return "an unsupported dtype";
  }
}

// The shape as Python prints it: [2, 3].
inline std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != b.size(d)) return false;
  return true;
}

inline bool is_float_dtype(ScalarType t) {
  return t == ScalarType::Float || t == ScalarType::BFloat16 || t == ScalarType::Half;
}

// The kernels' dtype of a floating-point argument.
inline DType float_dtype(const char* op, const char* argument, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    default: fail(op, ": ", argument, " must be float32, bfloat16 or float16, got ", name_of(dtype));
  }
}
inline DType float_dtype(const char* op, const char* argument, const Tensor& t) {
  return float_dtype(op, argument, t.scalar_type());
}

// torch's promotion rule, for the three floating-point dtypes the ops take.
inline ScalarType promote(ScalarType a, ScalarType b) { return a == b ? a : ScalarType::Float; }

// torch_npu registers Ascend devices under the key that torch keeps for backends of others.
inline bool is_npu(const Tensor& t) { return t.device().type() == torch::headeronly::DeviceType::PrivateUse1; }

inline void check_same_device(const char* op, const char* argument, const Tensor& t, const Tensor& x) {
  DI_CHECK(t.device() == x.device(), op, ": ", argument, " must be on the same device as the first argument");
}

// A fresh contiguous tensor on the device of `like`. Half the cost of torch::stable::new_empty, which looks the
// operator up by name at every call.
inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  int32_t device_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                                         shim_dtype, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes(t.dim());
  for (int64_t d = 0; d < t.dim(); ++d) sizes[d] = t.size(d);
  return sizes;
}

}  // namespace deepinfer
