// How matrices are quantised in blocks, and back, on the cores of an NPU. Shared by host and kernels.
#pragma once

#include "../ops/quant.h"

namespace deepinfer::npu {

struct QuantTiling {
  Rows matrices;  // of the strided side: values to be quantised, codes to be turned back
  int64_t rows, columns, row_stride;
  int64_t block_rows, block_columns, down, across;  // down, across: blocks of a matrix
  int64_t strided_bytes, dense_bytes, scale_bytes;  // that the kernel may touch
  Scales scales;
  int32_t pieces;      // blocks of a tile; 1 if a block does not fit as a whole. Of one column: columns of a strip
  int32_t chunk_rows;  // rows and columns of a block that are on the core at once
  int32_t chunk;
  int32_t pitch;       // elements from row to row on the core
  int32_t coded;       // 0: only the scales are wanted
};

// Elements from row to row on the core are a multiple of this, so that their codes are whole blocks of 32 bytes.
constexpr int32_t code_alignment(Code code) { return code == Code::e2m1 ? 64 : 32; }

// Bytes that a Quantizer takes on the core: for a group, of which there are eight at a time, and for all of them.
constexpr int64_t kGroupBytes = 4 * 32;
constexpr int64_t quantizer_bytes(int64_t groups) { return (groups + 7) / 8 * 8 * kGroupBytes + 3 * 64 * 4 + 32; }

}  // namespace deepinfer::npu
