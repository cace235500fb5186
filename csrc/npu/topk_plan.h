#pragma once

#include "chip.h"
#include "topk_tiling.h"

namespace deepinfer::npu {

// A window takes all of k that the unified buffer has room for beside a chunk; the list of candidates takes what is left.
TopkTiling tile_topk(const TopkArgs& args, const Chip& chip);

int64_t blocks_of(const TopkTiling& tiling, const Chip& chip);

}  // namespace deepinfer::npu
