// Shared by host and device code.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

// The driver's opaque description of a tensor. A member of a kernel's arguments; kernels use its address there.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace deepinfer
