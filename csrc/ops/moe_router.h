// What moe_router hands to the kernels of any device.
#pragma once

#include "../cpu/types.h"

namespace deepinfer {

enum class Score : int { softmax, sigmoid, sqrt_softplus };
enum class GroupScore : int { top2_sum, max };

struct MoeRouterArgs {
  static constexpr int64_t kMaxExperts = 16384;

  const void* logits;  // rows of `num_experts` elements of `dtype`
  const void* bias;    // [num_experts] of bias_dtype, dense, or null
  void* weights;       // [rows, topk] of weights_dtype
  void* ids;           // [rows, topk] of int64 or int32
  int64_t tokens;
  int64_t row_stride;  // of the logits, in elements
  int64_t num_experts, topk;
  int64_t num_groups, topk_groups;  // equal when all groups are kept
  float renorm_eps, renorm_min, scale;
  Score score;
  GroupScore group_score;
  DType dtype, bias_dtype, weights_dtype;
  bool score_after_topk, renormalize, wide_ids;
};

}  // namespace deepinfer
