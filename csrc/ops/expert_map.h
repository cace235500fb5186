// Sorting slots by expert on a GPU, for the ops that need the map.
#pragma once

#include "check.h"
#include "moe_dispatch.h"

namespace deepinfer {

// Plans and launches with what `args` says; the counts of chunks live on the device of `ids` meanwhile.
void expert_map_on_cuda(ExpertMapArgs& args, const Tensor& ids);

}  // namespace deepinfer
