#pragma once

#include "../ops/norm.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(rms_norm, RmsNormArgs)

}  // namespace deepinfer::cpu
