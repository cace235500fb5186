#pragma once

#include "../ops/rope.h"

namespace deepinfer::npu {

int64_t most_rope_size();

// On torch's current stream of the device. The columns of the tables are dense.
void rotary_embedding(const RopeArgs& args, int device);

}  // namespace deepinfer::npu
