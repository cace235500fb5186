#pragma once

#include "../ops/activation.h"
#include "isa.h"

namespace deepinfer::cpu {

// Over rows.
DEEPINFER_KERNEL(gated_activation, GatedArgs)
DEEPINFER_KERNEL(gated_quant, GatedQuantArgs)

}  // namespace deepinfer::cpu
