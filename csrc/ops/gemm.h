// What the matrix products hand to the kernels of a GPU.
#pragma once

#include "activation.h"

namespace deepinfer {

// Which rows of x meet which weight. `ends`: the rows up to ends[e] and from the end before on; `counts`: the first
// counts[e] of every `group_rows` rows; `batch`: each weight has a matrix x of its own, of `rows` rows; `depth`: no
// rows but the k from ends[e - 1] to ends[e] of x and the one weight make the result of expert e.
enum class RowGroups : int { none, ends, counts, batch, depth };

// `once`: sum, scale, bias and addend are rounded together. `rounded`: the sum is rounded before the bias is added.
enum class BiasStep : int { none, once, rounded };

// Of the columns of a product, after bias and rounding: `halves`: gate, then up; `alternating`: gate and up in turn.
enum class GateUp : int { none, halves, alternating };

// out[m, n] = scale * sum_k x[m, k] * weight[e(m), n, k] + bias[e(m), n] + addend[m, n]; or act(gate) * up of that,
// half as many columns.
struct MatmulArgs {
  const void* x;
  const void* weight;
  const void* bias;    // of out_dtype, dense along n; null without a bias
  const void* addend;  // of out_dtype, dense along n; null without one; may be `out`
  void* out;           // dense along n
  const int32_t* groups;  // ends, counts or ends of k, one an expert
  int64_t rows, columns, depth, experts;
  int64_t x_stride, x_depth_stride;
  int64_t x_batch_stride, out_batch_stride;  // from one expert to the next, for a batch; of out and addend, by depth
  int64_t expert_stride, column_stride, depth_stride;
  int64_t bias_stride, addend_stride, out_stride;
  int64_t group_rows;
  // The scales of e4m3 operands: of x for each row and block of 128 of k, dense along the rows; of the weight for each
  // column or 128 of them and block of k. A stride along k may be 0.
  const float* x_scale;
  const float* weight_scale;
  int64_t x_scale_depth_stride;
  int64_t scale_expert_stride, scale_column_stride, scale_depth_stride;
  float scale;
  DType dtype, out_dtype;
  bool e4m3;           // both operands, instead of dtype
  bool column_scales;  // of the weight: for each column
  RowGroups row_groups;
  BiasStep bias_step;
  bool fill;  // rows of no group become zeros
  GateUp gate_up;
  Gated form;
  float limit, alpha, up_offset;  // see GatedArgs
  bool settled;  // the last kernel before the product wrote neither `groups` nor the weight, but an earlier one
  // One expert more, number `experts`, that sees every token: shared_rows rows of shared_x, or of x behind those of the
  // other experts, and of the result behind theirs. 0: there is none.
  int64_t shared_rows;
  const void* shared_weight;  // dense along k; of the gates, with a weight of the same strides for the ups
  const void* shared_up;
  const void* shared_x;  // or null
  int64_t shared_column_stride, shared_x_stride;
  int32_t* handed_out;  // a zero on the device, with which tiles of groups of unequal size are handed out, or null
  // Two products over the same groups, of which the second, whose x is the result of the first, starts with what is
  // there. Of each expert the number of its rows, to which the first adds, for each part of its result that it has
  // written, the rows times the columns: all are there when that is rows * (1 + columns). One of the two, or none.
  int32_t* finished;
  const int32_t* awaited;
};

}  // namespace deepinfer
