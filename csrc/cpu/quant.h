#pragma once

#include "../ops/quant.h"
#include "isa.h"

namespace deepinfer::cpu {

// A work item of both is one strip of blocks.
DEEPINFER_KERNEL(quantize, QuantizeArgs)
DEEPINFER_KERNEL(dequantize, DequantizeArgs)

}  // namespace deepinfer::cpu
