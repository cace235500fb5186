// How the rows of an RMSNorm are cut for the cores of an NPU. Shared by host and kernel.
#pragma once

#include "../ops/norm.h"

namespace deepinfer::npu {

struct RmsNormTiling {
  Rows x_rows, residual_rows;
  int64_t hidden_size;
  int64_t x_bytes, residual_bytes, weight_bytes, out_bytes, sum_bytes, scale_bytes;  // that the kernel may touch
  Scales scales;  // of rows that are quantised
  float eps;
  int32_t rows;     // of a tile
  int32_t chunk;    // elements of a row that are on the core at once: all, or a multiple of kPiece
  int32_t pitch;    // elements from row to row on the core
  int32_t group;    // elements that share a scale
  int32_t buffers;  // of each queue: 2 to load the next tile beside the work on this one

  // Squares are summed piece by piece, so that the order of the sum does not depend on the size of the chunk.
  static constexpr int32_t kPiece = 2048;
};

// Bytes for the sums of short rows (row_norms.h): two blocks a row, of eight rows each.
constexpr int64_t row_norm_bytes(int64_t rows) { return (rows + 7) / 8 * 8 * 2 * 32; }

}  // namespace deepinfer::npu
