#pragma once

#include "../ops/moe_router.h"

namespace deepinfer::npu {

int64_t most_router_experts();

// On torch's current stream of the device. The bias is of float32.
void moe_router(const MoeRouterArgs& args, int device);

}  // namespace deepinfer::npu
