// What topk hands to the kernels of any device.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

enum class TopkOrder : int { by_index, by_value };

struct TopkArgs {
  const void* x;             // rows of `row_size` elements of `dtype`
  const int32_t* lengths;    // [rows]: elements of each row that take part, or null
  const int32_t* offsets;    // [rows]: added to each index, or null
  const int32_t* page_table; // [rows, pages]: index i becomes page i / page_size, times page_size, plus the rest; null
  void* values;              // [rows, k] of `dtype`, or null
  void* indices;             // [rows, k], int32 or int64
  uint64_t* candidates;      // scratch: CPU [rows, parts, k]; CUDA, for large k, [rows, k up to a power of two]
  int64_t* counts;           // scratch: CPU [rows, parts]
  Rows x_rows;
  int64_t row_size, k, pages, page_size;
  int64_t fill_index;  // where a row has fewer than k elements
  float fill_value;
  int parts;  // CPU: pieces of a row that are searched in parallel
  TopkOrder order;
  DType dtype;
  int wide_index;  // 1: int64
};

}  // namespace deepinfer
