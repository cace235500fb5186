#pragma once

#include "../ops/moe_dispatch.h"

namespace deepinfer::cuda {

// All on torch's current stream of the device.

// What the tables of expert_map have room for.
int64_t most_local_experts(int device);

// Into how many chunks the slots are cut, and whether args.cursors has to have room for the counts of each.
struct ExpertMapPlan {
  int64_t chunks;
  bool counted;
};
ExpertMapPlan plan_expert_map(int64_t slots, int64_t num_local_experts, int device);
void expert_map(const ExpertMapArgs& args, int device);

void moe_permute(const MoePermuteArgs& args, int device);
void moe_permute_scales(const MoePermuteScalesArgs& args, int device);
void moe_unpermute(const MoeUnpermuteArgs& args, int device);

}  // namespace deepinfer::cuda
