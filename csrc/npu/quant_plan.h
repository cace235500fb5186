#pragma once

#include "chip.h"
#include "quant_tiling.h"

namespace deepinfer::npu {

// Of `args` with at least one block, all of which are one row high: as many groups as the unified buffer takes twice, or a part of one.
QuantTiling tile_quantize(const QuantizeArgs& args, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const QuantTiling& tiling, const Chip& chip);

}  // namespace deepinfer::npu
