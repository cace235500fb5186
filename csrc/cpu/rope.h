#pragma once

#include "../ops/rope.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(rotary_embedding, RopeArgs)

}  // namespace deepinfer::cpu
