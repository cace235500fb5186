#pragma once

#include "../ops/quant.h"

namespace deepinfer::npu {

// Throws std::invalid_argument, naming the op, where this NPU has no conversion for such codes or scales: a 910B knows
// int8 with scales of float32 alone.
void check_codes(const char* op, Code code, ScaleType scales, int device);

// On torch's current stream of the device.
void quantize(const QuantizeArgs& args, int device);
void dequantize(const DequantizeArgs& args, int device);

}  // namespace deepinfer::npu
