#pragma once

#include "../ops/activation.h"

namespace deepinfer::npu {

// On torch's current stream of the device. Takes no interleaved columns.
void gated_activation(const GatedArgs& args, int device);

// Codes where `gated` has no `out`, if quantizes_rows; else its rows, to be quantised.
void gated_quant(const GatedQuantArgs& args, int device);
bool quantizes_rows(const GatedQuantArgs& args, int device);

}  // namespace deepinfer::npu
