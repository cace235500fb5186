#pragma once

#include "../ops/moe_dispatch.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(expert_count, ExpertMapArgs)    // over chunks; writes `cursors` and `invalid` only
DEEPINFER_KERNEL(expert_layout, ExpertMapArgs)   // over [0, 1)
DEEPINFER_KERNEL(expert_place, ExpertMapArgs)    // over chunks
DEEPINFER_KERNEL(moe_permute, MoePermuteArgs)      // over rows of the result
DEEPINFER_KERNEL(moe_permute_scales, MoePermuteScalesArgs)
DEEPINFER_KERNEL(moe_unpermute, MoeUnpermuteArgs)  // over tokens

}  // namespace deepinfer::cpu
