#pragma once

#include "../ops/topk.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(topk_rows, TopkArgs)   // over rows
DEEPINFER_KERNEL(topk_parts, TopkArgs)  // over rows x parts: the candidates of each part
DEEPINFER_KERNEL(topk_merge, TopkArgs)  // over rows: the best of the candidates

}  // namespace deepinfer::cpu
