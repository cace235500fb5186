// How the router is cut for the cores of an NPU. Shared by host and kernel.
#pragma once

#include "../ops/moe_router.h"

namespace deepinfer::npu {

struct MoeRouterTiling {
  Rows rows;  // of the logits
  int64_t logits_bytes;
  float renorm_eps, renorm_min, scale;
  int32_t experts, topk;
  int32_t groups, kept_groups;
  int32_t group_keys;  // that make the score of a group; 0: all groups are kept
  int32_t biased, after, renormalize;
  int32_t tokens;   // of a tile
  int32_t pitch;    // elements from token to token on the core, of logits and scores
  int32_t choices;  // the same of weights and ids
  int32_t buffers;  // of the logits: 2 to load the next tile beside the work on this one
  int32_t work;     // floats that reductions need
};

// Scores of the logits hold more intermediate values than the others.
constexpr int scratch_of(Score score) { return score == Score::sqrt_softplus ? 2 : 1; }

}  // namespace deepinfer::npu
