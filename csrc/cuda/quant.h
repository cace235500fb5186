#pragma once

#include "../ops/quant.h"

namespace deepinfer::cuda {

// On torch's current stream of the device.
void quantize(const QuantizeArgs& args, int device);
void dequantize(const DequantizeArgs& args, int device);

}  // namespace deepinfer::cuda
