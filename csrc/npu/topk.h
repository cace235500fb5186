#pragma once

#include "../ops/topk.h"

namespace deepinfer::npu {

// On torch's current stream of the device.
void topk(const TopkArgs& args, int device);

}  // namespace deepinfer::npu
