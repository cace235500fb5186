#pragma once

#include "../ops/moe_dispatch.h"

namespace deepinfer::npu {

// All on torch's current stream of the device. `counts_of_chunks` has room for the counts of each core.
int64_t cores(int device);
int64_t most_local_experts();
void expert_map(const ExpertMapArgs& args, int32_t* counts_of_chunks, int device);
void moe_permute(const MoePermuteArgs& args, int device);
void moe_permute_scales(const MoePermuteScalesArgs& args, int device);
int64_t most_choices();
void moe_unpermute(const MoeUnpermuteArgs& args, int device);

}  // namespace deepinfer::npu
