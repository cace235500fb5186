#pragma once

#include "activation.h"
#include "isa.h"
#include "types.h"

namespace deepinfer {

// Consecutive rows of one expert.
struct RowBlock {
  int64_t expert;
  int64_t first_row;
  int64_t rows;
};

// One grouped product: out[r, j] = scale * sum_k x[row(r), k] * weight[expert(r), j, k] (+ bias[expert(r), j])
// (+ addend[r, j]), or, with a gate, the activated pair of a gate and an up column. The work is cut into items of (row
// block, column chunk); every thread takes the next one from `next_item`.
struct GroupedGemmArgs {
  const void* x;          // dense rows of `depth` elements
  int64_t x_stride;       // from row to row
  const int32_t* x_rows;  // row r reads the row x_rows[r] of x; null: the row r itself
  const void* weight;
  int64_t expert_stride, column_stride, depth_stride;
  const void* bias;  // dense rows of out_dtype, one an expert; null without a bias
  int64_t bias_stride;
  const void* addend;  // dense rows of out_dtype; null without one
  int64_t addend_stride;
  void* out;  // dense rows of `columns` elements of out_dtype
  int64_t out_stride;
  int64_t columns, depth;
  const RowBlock* blocks;
  int64_t block_count;
  int64_t chunk;  // columns of one item, a multiple of kColumnTile
  int64_t* next_item;
  // For each worker: its packed rows of x, the products and the bias of one item, copies of weight columns if their k
  // is strided.
  void* scratch;
  int64_t scratch_bytes, packed_bytes, product_bytes, bias_bytes;
  int64_t copy_stride;  // from column to column of such a copy
  float scale;
  bool round_sums;  // before the bias is added; otherwise scale, bias and addend are rounded once with the sum
  DType dtype, out_dtype;  // the same, or float32
  // With a gate the weight has 2 * columns columns: the gate's and then the up columns, or both alternating.
  bool gated, interleaved;
  Gated form;
  float limit, alpha, up_offset;
};

namespace cpu {

constexpr int kColumnTile = 12;  // a multiple of the columns of the register tile of every instruction set

DEEPINFER_KERNEL(grouped_gemm, GroupedGemmArgs)

}  // namespace cpu

}  // namespace deepinfer
