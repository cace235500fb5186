// Tensor maps: how the bulk copy engine of Hopper and later sees a tensor. Encoded on the host, passed to the kernel by
// value inside its arguments.
#pragma once

#include <cstdint>

#include "../cuda/tensor_map.h"

namespace deepinfer::jit {

enum class TensorMapType : int { u8 = 0, u16 = 1, u32 = 2, f16 = 6, f32 = 7, bf16 = 9 };
enum class Swizzle : int { none = 0, bytes32 = 1, bytes64 = 2, bytes128 = 3 };

// Dimensions from the innermost, which is dense. `strides` are in bytes and start at the second dimension: multiples
// of 16. Elements of a box that lie outside the tensor read as zero and are not written.
struct TensorMapSpec {
  static constexpr int kMaxRank = 5;

  TensorMapType type;
  int rank;
  void* address;  // 16-byte aligned
  uint64_t sizes[kMaxRank];
  uint64_t strides[kMaxRank - 1];
  uint32_t box[kMaxRank];  // at most 256 each
  Swizzle swizzle;
};

// Throws std::runtime_error with `what` and the facts of the tensor when the driver refuses them.
TensorMap encode_tensor_map(const TensorMapSpec& spec, const char* what);

}  // namespace deepinfer::jit
