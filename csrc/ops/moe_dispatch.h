// What the dispatch ops hand to the kernels of any device.
#pragma once

#include "quant.h"

namespace deepinfer {

// A counting sort of slots (token * topk + choice) by expert. The slots are cut into chunks; each is counted, the
// counts become the rows where a chunk's next slot of an expert goes, and each chunk places its slots.
struct ExpertMapArgs {
  const void* ids;  // [slots], int64 or int32, dense
  bool wide_ids;
  int64_t slots, chunks;
  int64_t num_experts, first_expert, num_local_experts, alignment;
  int32_t* cursors;        // [chunks, num_local_experts], scratch
  int64_t* invalid;        // [chunks]: the first slot whose id is out of range, or -1
  int64_t rows;            // of rows_to_slots, at least as many as the layout takes
  int32_t* rows_to_slots;  // [rows]
  int32_t* slots_to_rows;  // [slots]
  int32_t* offsets;        // [num_local_experts + 1]
  int32_t* counts;         // [num_local_experts]
  int32_t* tail;           // three numbers that become tail_value, 0 and 0, or null; on CUDA
  int32_t tail_value;
};

struct MoePermuteArgs {
  const char* x;  // rows of row_bytes, row_stride bytes apart
  char* out;      // dense
  const int32_t* rows_to_slots;
  const int32_t* slots_to_rows;  // the inverse, or null
  int64_t row_bytes, row_stride, topk;
  int64_t rows, tokens;
};

// The scales of tokens that are gathered like the tokens themselves. Strides are in elements of `bytes` bytes.
struct MoePermuteScalesArgs {
  const void* scales;
  void* out;
  const int32_t* rows_to_slots;
  int64_t row_stride, column_stride, out_row_stride, out_column_stride;
  int64_t columns, topk;
  int64_t rows, tokens;
  int bytes;
};

struct MoeUnpermuteArgs {
  const void* y;  // rows of `hidden_size` elements of `dtype`, or of codes
  const int32_t* slots_to_rows;
  const void* weights;      // of weights_dtype, one for each slot; null: 1
  const float* row_scales;  // one for each row of y; null: 1
  const void* addend;       // dense rows of `dtype`, added to the rounded sums; null: none; not to those of codes
  void* out;                // dense rows of `dtype`
  int64_t row_stride, hidden_size, topk;
  int64_t rows, tokens;
  DType dtype, weights_dtype;
  bool coded;  // y is float8_e4m3fn
};

}  // namespace deepinfer
