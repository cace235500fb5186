#pragma once

#include "../ops/moe_router.h"

namespace deepinfer::npu {

// Whether the scores of a token fit a core.
bool router_fits(const MoeRouterArgs& args, int device);

// On torch's current stream of the device. The bias is of float32.
void moe_router(const MoeRouterArgs& args, int device);

}  // namespace deepinfer::npu
