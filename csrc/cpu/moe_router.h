#pragma once

#include "../ops/moe_router.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(moe_router, MoeRouterArgs)

}  // namespace deepinfer::cpu
