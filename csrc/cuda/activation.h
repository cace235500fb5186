#pragma once

#include "../ops/activation.h"

namespace deepinfer::cuda {

// On torch's current stream of the device.
void gated_activation(const GatedArgs& args, int device);
void gated_quant(const GatedQuantArgs& args, int device);

}  // namespace deepinfer::cuda
