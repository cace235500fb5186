#pragma once

#include "chip.h"
#include "moe_router_tiling.h"

namespace deepinfer::npu {

// Tiles of as many tokens as the unified buffer takes.
MoeRouterTiling tile_moe_router(const MoeRouterArgs& args, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const MoeRouterTiling& tiling, const Chip& chip);

// Whose scores, ranked as a whole, fit the core.
constexpr int64_t kMostRouterExperts = 2048;

}  // namespace deepinfer::npu
