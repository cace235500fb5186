// How rows are quantised in groups on the cores of an NPU. Shared by host and kernel.
#pragma once

#include "../ops/quant.h"

namespace deepinfer::npu {

struct QuantTiling {
  Rows rows;
  int64_t columns, group, across;          // across: groups of a row
  int64_t x_bytes, code_bytes, scale_bytes;  // that the kernel may touch
  Scales scales;
  int32_t pieces;  // groups of a tile, of one row or of several; 1 if a group does not fit as a whole
  int32_t chunk;   // elements of a group that are on the core at once
  int32_t pitch;   // elements from group to group on the core
};

}  // namespace deepinfer::npu
