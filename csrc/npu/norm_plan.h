#pragma once

#include "chip.h"
#include "norm_tiling.h"

namespace deepinfer::npu {

// Rows are shared out evenly; a tile holds as many as the unified buffer takes twice, or once if it takes no two.
RmsNormTiling tile_rms_norm(const RmsNormArgs& args, const Chip& chip);

// Whether a row fits the core with its codes, and its groups are whole blocks of them.
bool quantizes_rows(const RmsNormArgs& args, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const RmsNormTiling& tiling, const Chip& chip);

}  // namespace deepinfer::npu
