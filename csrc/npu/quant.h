#pragma once

#include "../ops/quant.h"

namespace deepinfer::npu {

// What the kernel can do: codes of int8 with scales of float32, in groups of one row. Throws std::invalid_argument for the
// rest, naming the op.
void check_quantize(const char* op, const QuantizeArgs& args);

// On torch's current stream of the device.
void quantize(const QuantizeArgs& args, int device);

}  // namespace deepinfer::npu
