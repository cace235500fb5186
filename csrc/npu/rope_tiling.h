// How the rows of q or k are rotated on the cores of an NPU. Shared by host and kernel.
#pragma once

#include "../ops/rope.h"
#include "norm_tiling.h"

namespace deepinfer::npu {

struct RopeTiling {
  Rows in_groups, in_rows, out_groups, out_rows;  // as in RopeTensor
  Rows cos_groups, sin_groups, position_groups;
  int64_t in_bytes, out_bytes, cos_bytes, sin_bytes, position_bytes;  // that the kernel may touch
  int64_t cos_row_stride, sin_row_stride, cache_rows;                 // with positions
  float sin_sign;
  int32_t head_size, rotary_dim, columns;
  int32_t rows;       // of a tile, all of one group
  int32_t positioned;  // 1: the rows of the tables are chosen by positions
  int32_t together;    // 1: the rows of a tile share their instructions
  int64_t weight_bytes;  // of a norm in front of the rotation
  float eps;
};

}  // namespace deepinfer::npu
