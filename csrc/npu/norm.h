#pragma once

#include "../ops/norm.h"

namespace deepinfer::npu {

// Whether rms_norm writes codes where `args` has no `out`; if not, its norm is to be quantised.
bool quantizes_rows(const RmsNormArgs& args, int device);

// On torch's current stream of the device.
void rms_norm(const RmsNormArgs& args, int device);

}  // namespace deepinfer::npu
