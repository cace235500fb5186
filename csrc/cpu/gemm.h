#pragma once

#include "isa.h"
#include "types.h"

namespace deepinfer {

// How a pair of columns of the gate and up product becomes one activated column.
enum class Gate : int { none, silu, gelu, gelu_tanh };

// Consecutive rows of one expert.
struct RowBlock {
  int64_t expert;
  int64_t first_row;
  int64_t rows;
};

// One grouped product: out[r, j] = sum_k x[row(r), k] * weight[expert(r), j, k] (+ bias[expert(r), j]), or, with a gate,
// the activated pair of a gate and an up column. The work is cut into items of (row block, column chunk);
// every thread takes the next one from `next_item`.
struct GroupedGemmArgs {
  const void* x;          // dense rows of `depth` elements
  int64_t x_stride;       // from row to row
  const int32_t* x_rows;  // row r reads the row x_rows[r] of x; null: the row r itself
  const void* weight;
  int64_t expert_stride, column_stride, depth_stride;
  const void* bias;  // dense rows, one an expert; null without a bias
  int64_t bias_stride;
  void* out;  // dense rows of `columns` elements
  int64_t columns, depth;
  const RowBlock* blocks;
  int64_t block_count;
  int64_t chunk;  // columns of one item, a multiple of kColumnTile
  int64_t* next_item;
  // For each worker: its packed rows of x, the products of one item, and copies of weight columns if their k is strided.
  void* scratch;
  int64_t scratch_bytes, packed_bytes, product_bytes;
  DType dtype;
  // The gate column j is column gate_step * j of the weight, its up column is up_column + gate_step * j.
  Gate gate;
  int64_t gate_step, up_column;
  bool clamped;
  float limit, alpha, up_offset;
};

// Row r of the result is the weighted sum of rows y[slots_to_rows[r, :]], accumulated in float32 in that order.
struct WeightedSumArgs {
  const void* y;  // dense rows
  const int32_t* slots_to_rows;
  const void* weights;  // dense, like slots_to_rows
  void* out;
  int64_t topk, columns;
  DType dtype, weights_dtype;
};

namespace cpu {

constexpr int kColumnTile = 12;  // a multiple of the columns of the register tile of every instruction set

DEEPINFER_KERNEL(grouped_gemm, GroupedGemmArgs)
DEEPINFER_KERNEL(weighted_sum, WeightedSumArgs)

}  // namespace cpu

}  // namespace deepinfer
