#pragma once

#include "activation_tiling.h"
#include "chip.h"

namespace deepinfer::npu {

// Tiles of as many whole rows as the unified buffer takes, or of a part of one row.
GatedTiling tile_gated(const GatedArgs& args, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const GatedTiling& tiling, const Chip& chip);

}  // namespace deepinfer::npu
