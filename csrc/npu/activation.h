#pragma once

#include "../ops/activation.h"

namespace deepinfer::npu {

// On torch's current stream of the device. Takes no interleaved columns.
void gated_activation(const GatedArgs& args, int device);

}  // namespace deepinfer::npu
