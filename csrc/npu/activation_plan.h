#pragma once

#include "activation_tiling.h"
#include "chip.h"

namespace deepinfer::npu {

// Tiles of as many whole rows as the unified buffer takes, or of a part of one row.
// Quantised, if `gated` has no `out`.
GatedTiling tile_gated(const GatedQuantArgs& args, const Chip& chip);

// Whether a row fits the core with its codes, and its groups are whole blocks of them.
bool quantizes_rows(const GatedQuantArgs& args, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const GatedTiling& tiling, const Chip& chip);

}  // namespace deepinfer::npu
