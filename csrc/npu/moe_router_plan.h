#pragma once

#include "chip.h"
#include "moe_router_tiling.h"

namespace deepinfer::npu {

// Tiles of as many tokens as the unified buffer takes.
MoeRouterTiling tile_moe_router(const MoeRouterArgs& args, const Chip& chip);

// Whether a token, which is ranked as a whole, fits the core.
bool router_fits(const MoeRouterArgs& args, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const MoeRouterTiling& tiling, const Chip& chip);

}  // namespace deepinfer::npu
