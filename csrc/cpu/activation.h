#pragma once

#include "../ops/activation.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(gated_activation, GatedArgs)

}  // namespace deepinfer::cpu
