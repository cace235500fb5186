#pragma once

#include "chip.h"
#include "rope_tiling.h"

namespace deepinfer::npu {

// Of tensor 0 (q) or 1 (k). Rows of a group together, as many as the unified buffer takes.
RopeTiling tile_rope(const RopeArgs& args, int tensor, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const RopeTiling& tiling, const Chip& chip);

// Whole rows have to fit the core.
constexpr int64_t kMostRopeSize = 2048;

}  // namespace deepinfer::npu
