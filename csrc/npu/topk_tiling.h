// How a top-k is done on the vector cores of an NPU. Shared by host and kernel.
#pragma once

#include "../ops/topk.h"

namespace deepinfer::npu {

struct TopkTiling {
  Rows rows;
  int64_t row_size, k, pages, page_size, fill_index;
  int64_t x_bytes, values_bytes, indices_bytes;  // that the kernel may touch
  int64_t row_bytes, table_bytes;                // of lengths and of offsets, of the page table
  int32_t lengths, offsets;                      // whether there are any
  float fill_value;
  int32_t window;  // ranks that are found at once
  int32_t chunk;   // elements of a row that are loaded at once
  int32_t room;    // of the list of candidates: a window and at least a chunk
  // All three are multiples of kUnit: what comparisons take.
  static constexpr int32_t kUnit = 64;
};

}  // namespace deepinfer::npu
