#pragma once

#include "chip.h"
#include "moe_dispatch_tiling.h"

namespace deepinfer::npu {

ExpertMapTiling tile_expert_map(const ExpertMapArgs& args, const Chip& chip);
PermuteTiling tile_permute(const MoePermuteArgs& args, const Chip& chip);
PermuteScalesTiling tile_permute_scales(const MoePermuteScalesArgs& args);
UnpermuteTiling tile_unpermute(const MoeUnpermuteArgs& args, const Chip& chip);

// Cores that have work.
int64_t blocks_of(const PermuteTiling& tiling, const Chip& chip);
int64_t blocks_of(const PermuteScalesTiling& tiling, const Chip& chip);
int64_t blocks_of(const UnpermuteTiling& tiling, const Chip& chip);

// The map of a token has to fit the core.
constexpr int64_t kMostChoices = 4096;

}  // namespace deepinfer::npu
