#pragma once

#include "../ops/moe_dispatch.h"

namespace deepinfer::cuda {

// All on torch's current stream of the device.

// How many chunks the slots are cut into; with more than `kMostChunksInOneLaunch` args.cursors has to hold their counts.
int64_t expert_map_chunks(int64_t slots);
bool expert_map_needs_counts(int64_t slots);
void expert_map(const ExpertMapArgs& args, int device);

void moe_permute(const MoePermuteArgs& args, int device);
void moe_unpermute(const MoeUnpermuteArgs& args, int device);

}  // namespace deepinfer::cuda
