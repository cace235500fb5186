// How a matrix product is cut for the cube cores of an NPU, and what is left to the vector cores. Shared by host and
// kernels.
#pragma once

#include "../ops/gemm.h"

namespace deepinfer::npu {

// out[m, n] = sum_k a[m, k] * b[n, k]
struct GemmTiling {
  int64_t rows, columns, depth;
  int64_t a_stride, b_stride, out_stride;  // elements between the dense runs of each, along k or across it
  int64_t a_bytes, b_bytes, out_bytes;     // that the kernel may touch
  int32_t tile_rows, tile_columns;         // of the result that a core makes at once, multiples of 16
  int32_t chunk;                           // of the depth that is in L1 at once, a multiple of `step`
  int32_t step;                            // of the depth that is in L0A and L0B at once, a multiple of 16
  int32_t sums;                            // tiles that L0C holds: 2 to write one out beside the next
};

// out = scale * sum + bias + addend, rounded once. Rows of the sums are dense.
struct GemmFinishTiling {
  int64_t rows, columns;
  int64_t addend_stride, out_stride;
  int64_t sum_bytes, bias_bytes, addend_bytes, out_bytes;
  float scale;
  int32_t tile_rows;  // of a tile
  int32_t chunk;      // columns of a tile
  int32_t pitch;      // elements from row to row on the core
};

}  // namespace deepinfer::npu
