#pragma once

#include "../ops/moe_router.h"

namespace deepinfer::cuda {

// On torch's current stream of the device.
void moe_router(const MoeRouterArgs& args, int device);

}  // namespace deepinfer::cuda
