// The static facts of the attention kernels. Shared by host and device code.
#pragma once

#include "../ops/attention.h"

namespace deepinfer {

struct AttentionPortableConfig {
  DType type;
  AttentionMask mask;
  DType mask_type;  // of a mask that is added
  int threads;
};

}  // namespace deepinfer
