// The static facts of a router kernel. Shared by host and device code.
#pragma once

#include "../ops/moe_router.h"

namespace deepinfer {

struct MoeRouterConfig {
  DType logits, bias, weights;
  Score score;
  GroupScore group_score;
  int experts, topk;
  int groups, kept_groups;  // 1 and 1 when no group is masked
  int has_bias, score_after_topk, renormalize, wide_ids;
  int access;   // logits that alignment lets one access move
  int threads;  // of a block
};

}  // namespace deepinfer
