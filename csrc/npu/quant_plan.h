#pragma once

#include "chip.h"
#include "quant_tiling.h"

namespace deepinfer::npu {

// Both of at least one block. As many blocks as the unified buffer takes twice, or a part of one; of blocks of one column,
// a strip of columns and as many rows of it as fit.
QuantTiling tile_quantize(const QuantizeArgs& args, const Chip& chip);
QuantTiling tile_dequantize(const DequantizeArgs& args, const Chip& chip);

// From the first byte of the scales of so many bands to the last one; of so many codes.
int64_t bytes_of(const Scales& scales, int64_t bands);
int64_t code_bytes_of(Code code, int64_t elements);

// Cores that have work.
int64_t blocks_of(const QuantTiling& tiling, const Chip& chip);

}  // namespace deepinfer::npu
