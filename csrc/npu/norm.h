#pragma once

#include "../ops/norm.h"

namespace deepinfer::npu {

// On torch's current stream of the device.
void rms_norm(const RmsNormArgs& args, int device);

}  // namespace deepinfer::npu
